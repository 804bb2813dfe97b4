"""A search through a tree of thoughts: branch, check, prune, continue with the best.

The task is a chain of small sums. At each level every remaining chain gets ``--branch`` samples of
its next step. A checker gives each sample a value, the best ``--keep`` chains continue, and the
others are pruned. Chains share all steps up to where they part, so each level makes the tree
deeper.

    python examples/tree_of_thoughts.py
    python examples/tree_of_thoughts.py --model MODEL --branch 16 --keep 8
"""

import argparse
import re
from dataclasses import dataclass
from typing import Any

import common  # in this folder

WORKED = """\
Chains of sums. Each line adds to the result of the line before.

Start with 4, add 3, add 5, add 2, add 1.
4 + 3 = 7
7 + 5 = 12
12 + 2 = 14
14 + 1 = 15

Start with 9, add 6, add 2, add 4, add 3.
9 + 6 = 15
15 + 2 = 17
17 + 4 = 21
21 + 3 = 24

Start with 6, add 6, add 5, add 8, add 2.
6 + 6 = 12
12 + 5 = 17
17 + 8 = 25
25 + 2 = 27
"""
START, STEPS = 3, (4, 5, 6, 2)


@dataclass(frozen=True)
class Thought:
    """A chain of steps.

    value: value of the last step; larger is better. above: the thought that this thought continues.
    kept: whether the search continued it.
    """

    steps: tuple[str, ...]
    value: float
    right: bool
    kept: bool = False


def work(llm: Any, args: argparse.Namespace) -> tuple[list[Any], list[list[Thought]]]:
    """Search; return all thoughts, by level."""
    from vllm import SamplingParams

    task = f"{WORKED}\nStart with {START}, " + ", ".join(f"add {n}" for n in STEPS) + ".\n"
    chains: list[tuple[str, ...]] = [()]
    levels, samples = [], []
    for level in range(args.depth):
        sampling = SamplingParams(
            n=args.branch * args.keep if level == 0 else args.branch,
            temperature=1.0,
            seed=11 + level,
            max_tokens=args.max_tokens,
            stop=["\n"],
            logprobs=0,
        )
        prompts = [task + "".join(f"{step}\n" for step in chain) for chain in chains]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        thoughts: dict[tuple[str, ...], Thought] = {}
        for chain, output in zip(chains, outputs, strict=True):
            for sample in output.outputs:
                samples.append(sample)
                steps = (*chain, sample.text.strip())
                right = check(steps)
                # of equally right steps, prefer the one with the larger log-probability
                value = right + sample.cumulative_logprob / max(1, len(sample.token_ids)) / 100
                if steps not in thoughts or value > thoughts[steps].value:
                    thoughts[steps] = Thought(steps, value, right)
        ranked = sorted(thoughts.values(), key=lambda t: -t.value)
        best = [t.steps for t in ranked[: args.keep]]
        levels.append([Thought(t.steps, t.value, t.right, t.steps in best) for t in ranked])
        chains = best
    return samples, levels


def check(steps: tuple[str, ...]) -> bool:
    """Whether every step takes the last result, adds what the task says and gets the sum right."""
    result = START
    for step, number in zip(steps, STEPS, strict=False):
        if not re.fullmatch(rf"{result} \+ {number} = {result + number}", step):
            return False
        result += number
    return True


def show_search(levels: list[list[Thought]]) -> None:
    """Print the tree, pruned branches with a cross, and whether the best chain is right."""

    def draw(chain: tuple[str, ...], indent: str) -> None:
        level = len(chain)
        if level == len(levels):
            return
        thoughts = [t for t in levels[level] if t.steps[:-1] == chain]
        shown = thoughts[:3]
        for i, thought in enumerate(shown):
            last = i == len(shown) - 1 and len(thoughts) <= len(shown)
            mark = "" if thought.kept else "   x pruned" + ("" if thought.right else ", wrong")
            print(f"{indent}{'└─ ' if last else '├─ '}{thought.steps[-1]}{mark}")
            if thought.kept:
                draw(thought.steps, indent + ("   " if last else "│  "))
        if more := len(thoughts) - len(shown):
            wrong = sum(not t.right for t in thoughts[len(shown) :])
            print(f"{indent}└─ {more} more pruned, {wrong} of them wrong")

    print(f"\nstart with {START}, " + ", ".join(f"add {n}" for n in STEPS[: len(levels)]))
    draw((), "")
    best = levels[-1][0]
    says = "right" if best.right else "wrong"
    print(f"best chain: {'; '.join(best.steps)}: {says}")


def main() -> int:
    """Run the example; the exit status."""
    parser = common.options(__doc__, max_model_len=2048, block_size=32, pairs=3)
    parser.add_argument("--branch", type=int, default=4, help="samples of each chain's next step")
    parser.add_argument("--keep", type=int, default=4, help="chains kept at each level")
    parser.add_argument("--depth", type=int, default=3, choices=range(1, len(STEPS) + 1))
    parser.add_argument("--max-tokens", type=int, default=12, help="length of a step")
    args = parser.parse_args()
    common.at_least(args, 1, "branch", "keep", "max_tokens")
    common.check_options(args)
    args.max_num_seqs = args.branch * args.keep
    args.trace = common.new_trace()
    found = common.compare(args, work)
    show_search(found.first[common.OURS].shown)
    common.print_tree(args.trace)
    return common.show_gain(found)


if __name__ == "__main__":
    common.run_example(main)
