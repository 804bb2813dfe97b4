"""The rollouts of GRPO: groups of samples with rewards and advantages, without training.

All groups share the instructions, and the samples of a group share its whole prompt. Rewards come
from a rule that can be checked. The advantage of a sample is its reward minus the mean of its
group, divided by the group's standard deviation. ``--out`` writes the input of a trainer: token
ids, log-probabilities of the sampled tokens, rewards and advantages, one sample per line.

    python examples/grpo_rollouts.py --out rollouts.jsonl
    python examples/grpo_rollouts.py --model MODEL --groups 8 --samples 64 --max-tokens 256
"""

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

import common  # in this folder

INSTRUCTIONS = """\
You add numbers. Write the sum, an equals sign and the result, then stop. Do not explain it.
A right result in this form is worth 1 point, a wrong result in this form 0.2, all else nothing.

Add 3 and 4.
3 + 4 = 7

Add 18 and 2.
18 + 2 = 20

Add 5 and 16.
5 + 16 = 21

Add 9 and 4.
9 + 4 = 13

Add 16 and 13.
16 + 13 = 29

Add 7 and 7.
7 + 7 = 14
"""
TASKS = ((15, 4), (8, 6), (12, 9), (16, 5), (24, 7), (11, 13), (35, 8), (27, 16))


def work(llm: Any, args: argparse.Namespace) -> tuple[list[Any], list[dict[str, Any]]]:
    """Sample all groups at once; return a record for each sample."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        n=args.samples,
        temperature=1.0,
        seed=7,
        max_tokens=args.max_tokens,
        stop=["\n"],
        logprobs=0,  # only of the sampled tokens: the policy that sampled them
    )
    tasks = TASKS[: args.groups]
    prompts = [f"{INSTRUCTIONS}\nAdd {a} and {b}.\n" for a, b in tasks]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    records = []
    for group, (task, output) in enumerate(zip(tasks, outputs, strict=True)):
        rewards = [reward(sample.text, *task) for sample in output.outputs]
        gains = advantages(rewards)
        for sample, given, gain in zip(output.outputs, rewards, gains, strict=True):
            drawn = zip(sample.token_ids, sample.logprobs, strict=True)
            records.append(
                {
                    "group": group,
                    "text": sample.text,
                    "token_ids": list(sample.token_ids),
                    "logprobs": [step[token].logprob for token, step in drawn],
                    "reward": given,
                    "advantage": gain,
                }
            )
    return [sample for output in outputs for sample in output.outputs], records


def reward(text: str, a: int, b: int) -> float:
    """1 for the right sum in the right form, 0.2 for the form alone, else 0."""
    found = re.fullmatch(rf" *{a} \+ {b} = (\d{{1,6}})\.? *", text)
    return 0.0 if found is None else 1.0 if int(found.group(1)) == a + b else 0.2


def advantages(rewards: list[float]) -> list[float]:
    """Rewards minus their mean, divided by their standard deviation; 0 where all are equal."""
    mean, deviation = statistics.mean(rewards), statistics.pstdev(rewards)
    return [(r - mean) / deviation if deviation else 0.0 for r in rewards]


def show_groups(records: list[dict[str, Any]]) -> None:
    """Print a line for each group, with its best and its worst sample."""
    print(f"\n{'group':12}{'mean reward':>12}{'deviation':>11}   advantages   best, worst sample")
    for group, (a, b) in enumerate(TASKS):
        samples = [r for r in records if r["group"] == group]
        if not samples:
            break
        rewards = [r["reward"] for r in samples]
        samples.sort(key=lambda r: -r["advantage"])
        best, worst = samples[0], samples[-1]
        print(
            f"{f'{a} + {b}':12}{statistics.mean(rewards):12.2f}{statistics.pstdev(rewards):11.2f}"
            f"   {worst['advantage']:5.2f} {best['advantage']:5.2f}"
            f"   {best['text'].strip()!r}, {worst['text'].strip()!r}"
        )


def main() -> int:
    """Run the example; the exit status."""
    parser = common.options(__doc__, max_model_len=2048, block_size=32, pairs=3)
    parser.add_argument("--groups", type=int, default=4, choices=range(1, len(TASKS) + 1))
    parser.add_argument("--samples", type=int, default=8, help="samples of each group")
    parser.add_argument("--max-tokens", type=int, default=12, help="length of a sample")
    parser.add_argument("--out", type=Path, help="write the rollouts here, as JSON lines")
    args = parser.parse_args()
    common.at_least(args, 1, "samples", "max_tokens")
    common.check_options(args)
    args.max_num_seqs = args.samples * args.groups
    if args.out:
        common.check_writable(args.out, "--out")
    found = common.compare(args, work)
    records = found.first[common.OURS].shown
    if args.out:
        args.out.write_text("".join(json.dumps(record) + "\n" for record in records))
    show_groups(records)
    return common.show_gain(found)


if __name__ == "__main__":
    common.run_example(main)
