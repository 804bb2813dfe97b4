"""Documents that prompts share, and questions about them."""

import ast
import hashlib
import random
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Built-in documents, where the user names no files.
BUILT_IN = 5
#: More than English text has, so that a text of so many characters is long enough.
CHARACTERS_PER_TOKEN = 6
QUESTIONS = (
    "What does the text state about {}?",
    "Summarise in two sentences the part that mentions {}.",
    "Which conditions apply to {}?",
    "Explain {} to a reader who is new to the subject.",
    "List the names that occur next to {}.",
    "What would change without {}?",
    "Is anything in the text at odds with {}?",
    "Quote the passage that introduces {}.",
)


@dataclass(frozen=True, slots=True)
class Document:
    """A text and its number of tokens."""

    name: str
    text: str
    num_tokens: int

    def described(self) -> dict[str, object]:
        """Properties for the file of results."""
        return {
            "name": self.name,
            "tokens": self.num_tokens,
            "characters": len(self.text),
            "sha256": hashlib.sha256(self.text.encode()).hexdigest(),
        }


class Tokenizer:
    """The model's tokenizer outside of any engine.

    Args:
        folder: the model's folder, with ``tokenizer.json``.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        self._tokenizer = FastTokenizer.from_file(str(folder / "tokenizer.json"))

    def ids(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the tokenizer adds."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def cut(self, name: str, text: str, num_tokens: int | None) -> Document:
        """The start of ``text``, of at most ``num_tokens`` tokens (None: all)."""
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        if num_tokens is None or len(encoded.ids) <= num_tokens:
            return Document(name, text, len(encoded.ids))
        return Document(name, text[: encoded.offsets[num_tokens][0]], num_tokens)


def documents(
    files: Sequence[Path], tokenizer: Tokenizer, num_tokens: int | None
) -> list[Document]:
    """Documents from files, or from the docstrings of Python's standard library without any.

    Args:
        num_tokens: length of each document in tokens; None for whole files.

    Raises:
        ValueError: a file is empty, or the built-in text is too short.
    """
    if files:
        found = [tokenizer.cut(f.name, f.read_text(errors="replace"), num_tokens) for f in files]
        if empty := [d.name for d in found if not d.num_tokens]:
            raise ValueError(f"{empty[0]} has no text")
        return found
    if num_tokens is None:
        raise ValueError("the built-in documents need a length in tokens")
    text = _start_of(docstrings(), BUILT_IN * CHARACTERS_PER_TOKEN * num_tokens)
    found = []
    for number in range(BUILT_IN):
        document = tokenizer.cut(
            f"docstrings {number}", text[: 2 * CHARACTERS_PER_TOKEN * num_tokens], num_tokens
        )
        if document.num_tokens < num_tokens:
            raise ValueError(
                f"the built-in text has no {BUILT_IN} documents of {num_tokens} tokens"
            )
        found.append(document)
        text = text[len(document.text) :]
    return found


def _start_of(parts: Iterator[str], length: int) -> str:
    """Parts of a text, up to ``length`` characters or a little more."""
    found: list[str] = []
    while length > 0 and (part := next(parts, None)) is not None:
        found.append(part)
        length -= len(part)
    return "\n\n".join(found)


def docstrings() -> Iterator[str]:
    """Docstrings of the standard library of this Python, in the order of its files."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for path in [*sorted(folder.glob("*.py")), *sorted(folder.glob("[a-h]*/*.py"))]:
        try:
            with warnings.catch_warnings():  # of invalid escapes in old files
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_text())
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, kinds) and (found := ast.get_docstring(node)):
                yield found


def shuffled(text: str, seed: int) -> str:
    """Another text of the same words: no long piece of it occurs in ``text``."""
    parts = re.split(r"(\s+)", text)
    words = parts[::2]
    random.Random(seed).shuffle(words)
    parts[::2] = words
    return "".join(parts)


def question(text: str, seed: int, number: int) -> str:
    """A question about a word of ``text``; no two pairs of seed and number have the same one."""
    choice = random.Random(f"{seed} {number}")
    middle = choice.randrange(max(1, len(text) - 400))
    words = re.findall(r"\w{5,}", text[middle : middle + 400]) or ["this"]
    asked = QUESTIONS[number % len(QUESTIONS)].format(choice.choice(words))
    return f"Question {seed}-{number}: {asked}"


def asked(text: str, seed: int, number: int) -> str:
    """A prompt: a document and a question."""
    return f"{text}\n\n{question(text, seed, number)}\nAnswer:"


#: Returns token ids of a text.
Tokenize = Callable[[str], list[int]]
