"""Questions about one document: ``make demo``.

All questions share the document's KV blocks. Every decode step reads these blocks from memory once
for all questions instead of once per question. Answers are checked against the text, tokens against
the baseline's.

    python examples/document_qa.py                       the handbook in this folder
    python examples/document_qa.py --document F --questions F    your own
    python examples/document_qa.py --no-compare          without vLLM's default backend

A file of questions has one question per line. To check an answer, add the words that it must have
after a bar: How high is the lighthouse? | 38 metres
"""

import argparse
import json
import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import common  # in this folder

from vllm_prefixshare import PrefixShareError

DOCUMENT = Path(__file__).resolve().parent / "document.md"
#: Whole calls on a GPU, and the name of the call that is like this example's.
PUBLISHED = Path(__file__).resolve().parents[1] / "benchmarks" / "published" / "whole_call.json"
CALL = "cached"


class Question(NamedTuple):
    """A question. expected: words of the answer in the document; empty if not known."""

    text: str
    expected: str = ""


QUESTIONS = (
    Question("When was the museum founded?", "1952"),
    Question("Who is the director of the museum?", "Peter Lund"),
    Question("When does the museum open?", "10 in the morning"),
    Question("How much does an adult ticket cost?", "12 euros"),
    Question("Who was the architect of the lighthouse?", "Henry Moss"),
    Question("How high is the lighthouse?", "38 metres"),
    Question("When was the lighthouse switched off?", "1996"),
    Question("Which island can visitors see from the gallery?", "Stour"),
    Question("What was the Marigold made of?", "oak"),
    Question("When did the Marigold sink?", "1919"),
    Question("What is the smallest boat?", "canoe"),
    Question("What is the hardest of the knots called?", "carrick bend"),
    Question("What does the garden grow?", "sea kale"),
    Question("How many books does the library have?", "12,000"),
    Question("Where is the café?", "boat shed"),
    Question("Who was the first keeper?", "Thomas Harrow"),
)


def read_questions(path: Path | None) -> list[Question]:
    """The questions of a file; without a file, the questions above."""
    if path is None:
        return list(QUESTIONS)
    lines = common.read_text(path, "question file").splitlines()
    parts = [line.partition("|") for line in lines if line.strip()]
    return [Question(text.strip(), expected.strip()) for text, _, expected in parts]


def sentence_with(document: str, words: str) -> str:
    """The first sentence of the document that has these words; empty if there is none."""
    for line in document.splitlines():
        for sentence in re.split(r"(?<=[.!?]) ", line):
            if words.lower() in sentence.lower():
                return sentence
    return ""


def prompt(document: str, question: str) -> str:
    """The prompt of one question: the document comes first, so that all prompts share it."""
    asked = question[:1].lower() + question[1:]
    return f"Document:\n\n{document}\n\nAccording to the document, {asked}"


def count_tokens(model: str, text: str) -> int:
    """Number of tokens of a text."""
    file = Path(model, "tokenizer.json")
    if file.is_file():  # importing transformers takes five seconds
        from tokenizers import Tokenizer

        return len(Tokenizer.from_file(str(file)).encode(text))
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(model).encode(text))


def check_length(document: str, questions: list[Question], args: argparse.Namespace) -> None:
    """Refuse a document that does not fit the model, before an engine starts."""
    longest = max((question.text for question in questions), key=len)
    tokens = count_tokens(args.model, prompt(document, longest)) + 64  # 64: the chat template
    if tokens + args.max_tokens > args.max_model_len:
        raise PrefixShareError(
            f"the document and its longest question are {tokens} tokens, and with "
            f"{args.max_tokens} of answer the model reads {args.max_model_len}: shorten the "
            "document or raise --max-model-len."
        )


def work(llm: Any, args: argparse.Namespace) -> tuple[list[Any], list[str]]:
    """Ask all questions at once; return the answers, which end with a sentence."""
    from vllm import SamplingParams

    outputs = llm.chat(
        [[{"role": "user", "content": text}] for text in args.prompts],
        SamplingParams(
            temperature=0,
            max_tokens=args.max_tokens,
            stop=[". ", "\n"],
            include_stop_str_in_output=True,
            logprobs=args.logprobs,
        ),
        use_tqdm=False,
    )
    return [o.outputs[0] for o in outputs], [o.outputs[0].text for o in outputs]


def show_answers(document: str, questions: list[Question], answers: list[str]) -> None:
    """Print each question with its answer, and whether the answer has the document's words."""
    checked = right = 0
    print("\nanswers:")
    for i, (question, answer) in enumerate(zip(questions, answers, strict=True), 1):
        print(f"\n{i:2}. {question.text}")
        for line in textwrap.wrap(" ".join(answer.split()), 92):
            print(f"    {line}")
        if question.expected:
            sentence = sentence_with(document, question.expected)
            stands = bool(sentence) and question.expected.lower() in answer.lower()
            checked, right = checked + 1, right + stands
            says = f'the text: "{sentence}"' if sentence else "the text does not say it"
            print(
                textwrap.fill(
                    f"{'yes' if stands else 'NO'}, {says}",
                    92,
                    initial_indent="    -> ",
                    subsequent_indent="       ",
                )
            )
    if checked:
        print(f"\n{right} of {checked} answers stand in the text")


def show_published(compare: bool) -> None:
    """Print the published times of such a call on a GPU, next to this machine's."""
    result = json.loads(PUBLISHED.read_text())
    titles = {workload["name"]: workload["title"] for workload in result["workloads"]}
    seconds = {name: row["workloads"][CALL]["seconds"] for name, row in result["rows"].items()}
    baseline = result["baseline"]
    other = f"; {seconds[baseline]:.2f} s with {baseline.upper()}" if compare else ""
    print(
        f"\non an {result['device'].split(' x')[0]}, {titles[CALL]}: "
        f"{seconds['prefix_share']:.2f} s{other}\n"
        f"({result['model']}, {result['documents'][0]['tokens']:,} tokens, answers of "
        f"{result['tokens']}; benchmarks/published/{PUBLISHED.name})"
    )


def main() -> int:
    """Run the example; the exit status is 1 if the tokens of the two engines differ."""
    # short blocks: a pass prefills what a prompt holds behind its last whole block again
    parser = common.options(__doc__, pairs=6, block_size=32)
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parser.add_argument("--questions", type=Path, help="file with one question per line")
    parser.add_argument("--max-tokens", type=int, default=24, help="length of an answer")
    args = parser.parse_args()
    common.at_least(args, 1, "max_tokens")
    document = common.read_text(args.document, "document")
    questions = read_questions(args.questions)
    common.check_options(args)
    check_length(document, questions, args)
    args.prompts = [prompt(document, question.text) for question in questions]
    args.max_num_seqs = len(questions)
    args.trace = common.new_trace()
    found = common.compare(args, work)
    common.print_tree(args.trace)
    common.show_reads(found.ours.stats)
    status = common.show_calls(found)
    show_published(args.compare)
    show_answers(document, questions, found.first[common.OURS].shown)
    return status


if __name__ == "__main__":
    common.run_example(main)
