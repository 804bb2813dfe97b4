"""The effect of share policies and dividers, compared with vLLM's default backend.

Every setting has its own engine, because an engine reads settings once. The engine takes turns with
the
baseline engine on a tree of prompts: all prompts share a document, and each group shares a further
part.

    python examples/ablation.py
    python examples/ablation.py --settings never auto always depth_first deft_node
"""

import argparse
import contextlib
import statistics
from pathlib import Path
from typing import Any

import common  # in this folder

from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.planning.dividers.registry import DIVIDERS

DOCUMENT = Path(__file__).resolve().parent / "document.md"
POLICIES = ("never", "auto", "always")


def work(llm: Any, args: argparse.Namespace) -> tuple[list[Any], None]:
    """A tree of prompts: the document, one further part per group, and one end per request."""
    from vllm import SamplingParams

    tokens = llm.get_tokenizer().encode(DOCUMENT.read_text(encoding="utf-8"))
    document, group, own = args.tree_tokens
    prompts = []
    for i in range(args.requests):
        g = i // -(-args.requests // args.groups)
        start = document + g * group
        end = (start + group + 7 * (i + 1)) % (len(tokens) - own)
        prompts.append(tokens[:document] + tokens[start : start + group] + tokens[end : end + own])
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(
            temperature=0, max_tokens=args.max_tokens, ignore_eos=True, logprobs=args.logprobs
        ),
        use_tqdm=False,
    )
    return [output.outputs[0] for output in outputs], None


def environment(setting: str) -> dict[str, str]:
    """Variables of an engine with this setting: a share policy, or a divider that always shares."""
    if setting in POLICIES:
        return {"VLLM_PREFIXSHARE_SHARE": setting}
    return {"VLLM_PREFIXSHARE_SHARE": "always", "VLLM_PREFIXSHARE_DIVIDER": setting}


def row(setting: str, found: common.Comparison) -> tuple[str, int]:
    """The setting's row of the table, and the exit status."""
    stats = found.ours.stats
    read, alone = stats["kv_tokens_read"], stats["kv_tokens_stock"]
    values, ratios = common.medians(found, lambda result: result.ms_per_token)
    ms = f"{values[common.OURS]:.1f}" if values else "-"
    gain = f"{statistics.median(ratios):.2f}x" if ratios else "-"
    says, status = common.same_tokens(found)
    plan_ms = stats["plan_seconds"] / max(1, stats["plans"]) * 1e3
    return (
        f"{setting:16}{read:11,}{alone / max(1, read):7.2f}{stats['plans']:7}{plan_ms:9.2f}"
        f"{ms:>10}{gain:>8}   {says}"
    ), status


def main() -> int:
    """Run the example; the exit status is 1 if tokens differ under one of the settings."""
    parser = common.options(__doc__, max_model_len=2048, block_size=32, pairs=3)
    parser.add_argument(
        "--settings",
        nargs="+",
        default=[*POLICIES, "flashforge", "deft_flatten"],
        help="share policies and dividers",
    )
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument(
        "--tree-tokens",
        type=int,
        nargs=3,
        default=(768, 128, 24),
        metavar=("DOCUMENT", "GROUP", "OWN"),
        help="tokens of the document, of each group's part and of each request's end",
    )
    parser.add_argument("--max-tokens", type=int, default=12)
    args = parser.parse_args()
    common.at_least(args, 1, "requests", "groups", "max_tokens")
    if unknown := [s for s in args.settings if s not in (*POLICIES, *DIVIDERS)]:
        names = ", ".join((*POLICIES, *DIVIDERS))
        raise PrefixShareError(f"--settings {unknown[0]!r} is unknown: use {names}.")
    if min(args.tree_tokens) < 1 or sum(args.tree_tokens) + args.max_tokens > args.max_model_len:
        raise PrefixShareError("--tree-tokens must be 1 or more each and fit --max-model-len.")
    common.check_options(args)
    args.max_num_seqs = args.requests
    print(f"settings: {', '.join(args.settings)}; what vLLM prints goes to {args.log}", flush=True)
    lines, status = [], 0
    steps = len(args.settings) * (args.pairs + 1) * (1 + args.compare) + len(args.settings)
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(common.Progress(steps + args.compare))
        baseline = common.started(args, common.BASELINE, stack, progress) if args.compare else None
        first: common.Pass | None = None
        for setting in args.settings:
            with contextlib.ExitStack() as inner:
                ours = common.started(args, common.OURS, inner, progress, environment(setting))
                runners = {common.OURS: ours} | ({common.BASELINE: baseline} if baseline else {})
                found = common.take_turns(runners, args, work, progress)
            if baseline is None:  # compare the tokens with those of the first setting
                first = first or found.first[common.OURS]
                found.first[common.BASELINE] = first
            line, differs = row(setting, found)
            lines.append(line)
            status = max(status, differs)
    beside = common.BASELINE if args.compare else f"'{args.settings[0]}'"
    print(
        f"\n{'setting':16}{'KV read':>11}{'share':>7}{'plans':>7}{'plan ms':>9}{'ms/token':>10}"
        f"{'gain':>8}   same tokens as {beside}"
    )
    print("\n".join(lines))
    if args.pairs and args.compare:
        print(
            f"\nms/token: medians of {args.pairs} passes; gain: over {common.BASELINE}, median of "
            f"the ratios of {args.pairs} pairs that took turns"
        )
    return status


if __name__ == "__main__":
    common.run_example(main)
