"""Questions about one document, answered by a real vLLM engine through PREFIX_SHARE.

All questions share the document's KV blocks. Every decode step reads them once for all
questions instead of once for each; the table at the end says how much that saved.

    python examples/document_qa.py                       the handbook beside this file
    python examples/document_qa.py --document F --questions F    your own, one question a line
    python examples/document_qa.py --compare             stock vLLM beside it: time and tokens
"""

import argparse
import contextlib
import os
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, for tests.support

from tests.support.embedded_model import embedded_model_path
from tests.support.engine import (
    PREFIX_SHARE,
    STOCK,
    Batch,
    EngineProcess,
    divergences,
)
from vllm_prefixshare import PrefixShareError

DEFAULT_DOCUMENT = Path(__file__).resolve().parent / "document.md"
DEFAULT_QUESTIONS = (
    "When was the museum founded?",
    "Who is the director of the museum?",
    "How much does an adult ticket cost?",
    "What is the name of the ferry?",
    "How high is the lighthouse?",
    "How many steps does the stair of the lighthouse have?",
    "Who was the architect of the lighthouse?",
    "When was the lighthouse switched off?",
    "How many ships and boats does the museum own?",
    "What is the hardest of the knots called?",
    "How many ship models are there?",
    "Who is the gardener?",
    "How many books does the library have?",
    "What is the café known for?",
    "How much does a bowl of fish soup cost?",
    "How long is the rope walk?",
)
#: Tokens may differ where stock's two best are no further apart, in nats: below it rounding
#: decides. bfloat16 logits between 16 and 32 come in steps of 0.125; two steps are rounding.
MAX_GAP = {"float32": 0.05, "bfloat16": 0.26}


def read_text(path: Path, what: str) -> str:
    """The text of a file. ``what`` names it in the error if it is empty or cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise PrefixShareError(f"{what} {path} cannot be read ({reason}).") from None
    if not text.strip():
        raise PrefixShareError(f"{what} {path} is empty.")
    return text


def read_questions(path: Path | None) -> list[str]:
    """One question a line; the default questions without a file."""
    if path is None:
        return list(DEFAULT_QUESTIONS)
    return [line.strip() for line in read_text(path, "question file").splitlines() if line.strip()]


def check_length(document: str, questions: list[str], model: Path, room: int, limit: int) -> None:
    """Refuse a document that does not fit the model, before an engine starts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    longest = max(questions, key=len)
    tokens = len(tokenizer.encode(prompt(document, longest))) + 64  # the chat template's words
    if tokens + room > limit:
        raise PrefixShareError(
            f"the document and its longest question are {tokens} tokens, and with {room} of "
            f"answer the model reads {limit}: shorten the document or raise --max-model-len."
        )


def prompt(document: str, question: str) -> str:
    """The prompt of one question: the document comes first, so that all prompts share it."""
    return f"Document:\n\n{document}\n\nAnswer in one sentence from the document. {question}"


@contextlib.contextmanager
def library_output(shown: bool) -> Iterator[None]:
    """Unless ``shown``, discard what vLLM and its processes print: warnings, progress bars.

    File descriptors are redirected, because C++ code and child processes print, too. Failures are
    raised, not printed, so nothing of them is lost.
    """
    if shown:
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {stream: os.dup(stream) for stream in (1, 2)}
    try:
        with open(os.devnull, "w") as nowhere:
            for stream in saved:
                os.dup2(nowhere.fileno(), stream)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, copy in saved.items():
            os.dup2(copy, stream)
            os.close(copy)


def answer(
    backend: str, model: Path, prompts: list[str], dtype: str, args: argparse.Namespace
) -> Batch:
    """All prompts at once, answered by an engine with ``backend``."""
    name = "stock vLLM" if backend == STOCK else f"vLLM with {backend}"
    print(f"starting {name}, {dtype}, for {len(prompts)} questions ...", flush=True)
    began = time.perf_counter()
    with (
        library_output(args.verbose),
        EngineProcess(
            backend,
            model,
            environment={"VLLM_PREFIXSHARE_SHARE": args.share},
            dtype=dtype,
            max_model_len=args.max_model_len,
            max_num_seqs=max(8, len(prompts)),
        ) as engine,
    ):
        engine.generate(prompts[:1], 1, chat=True)  # the document into the prefix cache
        batch = engine.generate(prompts, args.max_tokens, chat=True, gaps=args.compare)
    print(f"  answered after {time.perf_counter() - began:.0f} s", flush=True)
    return batch


def show_answers(questions: list[str], batch: Batch) -> None:
    """Print each question with its answer."""
    print()
    for i, (question, found) in enumerate(zip(questions, batch.answers, strict=True)):
        print(f"{i + 1:2}. {question}")
        text = " ".join(found.text.split())
        print(textwrap.fill(text, 96, initial_indent="    ", subsequent_indent="    "))


def show_gain(batch: Batch, stock: Batch | None) -> None:
    """KV tokens read and time per output token, with sharing and without."""
    stats = batch.stats
    read, alone = stats["kv_tokens_read"], stats["kv_tokens_stock"]
    ours_ms = batch.seconds_per_token * 1e3
    print(f"\n{'':34}{'PREFIX_SHARE':>14}{'stock vLLM':>14}{'gain':>8}")
    gain = f"{alone / max(1, read):.2f}x"
    print(f"{'KV tokens read in each layer':34}{read:14,.0f}{alone:14,.0f}{gain:>8}")
    if stock is None:
        print(f"{'milliseconds per output token':34}{ours_ms:14.1f}{'-':>14}{'-':>8}")
    else:
        stock_ms = stock.seconds_per_token * 1e3
        gain = f"{stock_ms / ours_ms:.2f}x"
        print(f"{'milliseconds per output token':34}{ours_ms:14.1f}{stock_ms:14.1f}{gain:>8}")
    print(
        f"\n{stats['decode_steps']:.0f} decode steps, {stats['shared_steps']:.0f} of them shared; "
        f"{stats['plans']:.0f} plans, {stats['plan_seconds'] * 1e3:.1f} ms in all; "
        f"{min(a.num_cached_tokens for a in batch.answers)} tokens of each prompt from the cache"
    )
    if stock is None:
        print("--compare also times stock vLLM, and compares its tokens")


def same_tokens(ours: Batch, stock: Batch, dtype: str) -> bool:
    """Print where the answers part, and whether only ties decide there."""
    parted = divergences(ours, stock)
    for d in parted:
        kind = "a tie" if d.gap <= MAX_GAP[dtype] else "WRONG"
        print(f"answer {d.answer + 1} parts at token {d.position}: {kind}, gap {d.gap:.3f} nats")
    wrong = any(d.gap > MAX_GAP[dtype] for d in parted)
    same = len(ours.answers) - len(parted)
    print(
        f"{same} of {len(ours.answers)} answers have the same tokens; "
        f"tokens {'differ' if wrong else 'agree'} (ties below {MAX_GAP[dtype]} nats aside)"
    )
    return not wrong


def main() -> int:
    """Answer the questions; 0, or 1 if the tokens of the two backends differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--document", type=Path, default=DEFAULT_DOCUMENT)
    parser.add_argument("--questions", type=Path, help="one question a line")
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: embedded model)")
    parser.add_argument("--max-tokens", type=int, default=32, help="length of an answer")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--compare", action="store_true", help="run stock vLLM too")
    parser.add_argument(
        "--share",
        choices=("auto", "always", "never"),
        default="always",
        help="auto lets the cost model decide whether sharing pays",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="default: bfloat16; float32 with --compare, because bfloat16 logits come in steps "
        "of an eighth and make other tokens of a tie look like a fault",
    )
    parser.add_argument("--verbose", action="store_true", help="show what vLLM prints")
    args = parser.parse_args()
    dtype = args.dtype or ("float32" if args.compare else "bfloat16")
    try:
        if args.max_tokens < 1:
            raise PrefixShareError(f"--max-tokens must be at least 1, got {args.max_tokens}.")
        if args.model is not None and not (args.model / "config.json").is_file():
            raise PrefixShareError(f"model {args.model} is not a checkpoint folder.")
        document = read_text(args.document, "document")
        questions = read_questions(args.questions)
        model = args.model or embedded_model_path()
        check_length(document, questions, model, args.max_tokens, args.max_model_len)
        prompts = [prompt(document, question) for question in questions]
        stock = answer(STOCK, model, prompts, dtype, args) if args.compare else None
        ours = answer(PREFIX_SHARE, model, prompts, dtype, args)
    except PrefixShareError as e:
        print(f"document_qa: error: {e}", file=sys.stderr)
        return 2
    show_answers(questions, ours)
    show_gain(ours, stock)
    return 0 if stock is None or same_tokens(ours, stock, dtype) else 1


if __name__ == "__main__":
    sys.exit(main())
