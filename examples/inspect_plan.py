"""The plan of a batch as text and as a picture, with the package's own command line.

Without ``--tree``, an engine answers questions about a document, and records its plans
(``VLLM_PREFIXSHARE_TRACE``). Then ``vllm-prefixshare inspect`` shows the plan of the largest batch
as the engine ran it, next to attention without sharing, and draws forest and schedule. The last
table has what the engine gained compared with the baseline.

    python examples/inspect_plan.py --svg plan.svg
    python examples/inspect_plan.py --tree 1,4,16_1024,256,64 --svg plan.svg    without an engine
"""

import argparse
from pathlib import Path
from typing import Any

import common  # in this folder

from vllm_prefixshare.cli.main import main as command_line

DOCUMENT = Path(__file__).resolve().parent / "document.md"
QUESTIONS = ("When was it founded?", "How high is the lighthouse?", "What does a ticket cost?")


def work(llm: Any, args: argparse.Namespace) -> tuple[list[Any], None]:
    """Sample answers to each question about the start of the document."""
    from vllm import SamplingParams

    tokens = llm.get_tokenizer().encode(DOCUMENT.read_text(encoding="utf-8"))
    text = llm.get_tokenizer().decode(tokens[: args.document_tokens])
    sampling = SamplingParams(n=args.samples, seed=3, max_tokens=args.max_tokens, ignore_eos=True)
    prompts = [f"{text}\n\nThink step by step. {question}\n" for question in QUESTIONS]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return [sample for output in outputs for sample in output.outputs], None


def main() -> int:
    """Run the example; the exit status."""
    parser = common.options(__doc__, max_model_len=4096, block_size=32)
    parser.add_argument("--tree", help="nodes_tokens of each level; no engine is started")
    parser.add_argument("--samples", type=int, default=4, help="samples for each question")
    parser.add_argument("--document-tokens", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--gpu", default="H200", help="with --tree: plan as on this GPU")
    parser.add_argument("--svg", type=Path, default=Path("plan.svg"), help="file for the picture")
    args = parser.parse_args()
    common.at_least(args, 1, "samples", "document_tokens")
    common.at_least(args, 2, "max_tokens")
    common.check_writable(args.svg, "--svg")
    show = ["inspect", "--svg", str(args.svg)]
    if args.tree:
        return said(command_line([*show, "--gpu", args.gpu, "--tree", args.tree]), args.svg)
    common.check_options(args)
    args.trace = common.new_trace()
    args.max_num_seqs = args.samples * len(QUESTIONS)
    found = common.compare(args, work)
    status = said(command_line([*show, str(args.trace)]), args.svg)
    args.trace.unlink()
    return status or common.show_gain(found)


def said(status: int, picture: Path) -> int:
    """Print the name of the picture, if there is one, and return ``status``."""
    if status == 0:
        print(f"picture of the forest and the schedule: {picture}")
    return status


if __name__ == "__main__":
    common.run_example(main)
