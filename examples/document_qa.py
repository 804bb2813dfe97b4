"""Questions about one document, answered by a real vLLM engine through PREFIX_SHARE.

All questions share the document's KV blocks. Every decode step reads them once for all
questions instead of once for each; the table at the end says how much that saved.

    python examples/document_qa.py                       this project's documentation
    python examples/document_qa.py --document F --questions F    your own, one question a line
    python examples/document_qa.py --compare             stock vLLM beside it, same tokens?
"""

import argparse
import sys
import textwrap
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

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_DOCUMENT = ROOT / "docs" / "design.md"
DEFAULT_QUESTIONS = (
    "What does the prefix tree hold?",
    "Which environment variable chooses the backend?",
    "What is a work tile?",
    "Why does a plan stay valid while sequences grow?",
    "What does the cost table measure?",
    "How are partial results merged?",
    "Which dividers can be chosen by name?",
    "What happens to rows that share nothing?",
)
#: Tokens may differ where stock's two best are no further apart, in nats: below it rounding
#: decides. bfloat16 logits between 16 and 32 come in steps of 0.125; two steps are rounding.
MAX_GAP = {"float32": 0.05, "bfloat16": 0.26}


def read_text(path: Path, what: str) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise PrefixShareError(f"{what} {path} cannot be read ({reason}).") from None
    if not text.strip():
        raise PrefixShareError(f"{what} {path} is empty.")
    return text


def read_questions(path: Path | None) -> list[str]:
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
    return f"Document:\n\n{document}\n\nAnswer in one sentence from the document. {question}"


def show(questions: list[str], batch: Batch, stock: Batch | None) -> None:
    """The answers, then what they cost."""
    for i, (question, answer) in enumerate(zip(questions, batch.answers, strict=True)):
        print(f"\n{i + 1}. {question}  [{answer.num_cached_tokens} cached tokens]")
        print(textwrap.indent(textwrap.fill(" ".join(answer.text.split()), 96), "   "))
        if stock is not None:
            same = "the same" if stock.answers[i].token_ids == answer.token_ids else "other"
            print(f"   stock vLLM: {same} tokens")
    stats = batch.stats
    read, alone = stats["kv_tokens_read"], stats["kv_tokens_stock"]
    rows = [
        ("KV tokens read per layer", f"{read:,.0f}"),
        ("  stock attention reads", f"{alone:,.0f}"),
        ("  share factor", f"{alone / max(1, read):.2f}"),
        ("time per output token", f"{batch.seconds_per_token * 1e3:.1f} ms for all requests"),
        ("planning, in total", f"{stats['plan_seconds'] * 1e3:.2f} ms"),
        (
            "decode steps",
            f"{stats['decode_steps']:.0f}, {stats['shared_steps']:.0f} of them shared",
        ),
        ("steps that planned", f"{stats['plans']:.0f}"),
    ]
    if stock is not None:
        rows.insert(4, ("  stock vLLM", f"{stock.seconds_per_token * 1e3:.1f} ms"))
    print("\n" + "\n".join(f"{name:<26} {value}" for name, value in rows))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--document", type=Path, default=DEFAULT_DOCUMENT)
    parser.add_argument("--questions", type=Path, help="one question a line")
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: embedded model)")
    parser.add_argument("--max-tokens", type=int, default=48, help="length of an answer")
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
        results: dict[str, Batch] = {}
        for backend in (PREFIX_SHARE, STOCK) if args.compare else (PREFIX_SHARE,):
            print(f"starting vLLM with {backend} attention, {dtype} ...", flush=True)
            with EngineProcess(
                backend,
                model,
                environment={"VLLM_PREFIXSHARE_SHARE": args.share},
                dtype=dtype,
                max_model_len=args.max_model_len,
                max_num_seqs=max(8, len(prompts)),
            ) as engine:
                engine.generate(prompts[:1], 1, chat=True)  # the document into the prefix cache
                results[backend] = engine.generate(
                    prompts, args.max_tokens, chat=True, gaps=args.compare, progress=True
                )
    except PrefixShareError as e:
        print(f"document_qa: error: {e}", file=sys.stderr)
        return 2
    show(questions, results[PREFIX_SHARE], results.get(STOCK))
    if not args.compare:
        return 0
    parted = divergences(results[PREFIX_SHARE], results[STOCK])
    wrong = [d for d in parted if d.gap > MAX_GAP[dtype]]
    for d in parted:
        kind = "WRONG" if d in wrong else "tie"
        print(
            f"question {d.answer + 1} parts at token {d.position}: {kind}, stock's gap {d.gap:.3f}"
        )
    print(f"tokens {'differ' if wrong else 'agree'} (ties below {MAX_GAP[dtype]} nats aside)")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
