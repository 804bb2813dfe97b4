"""Many samples of each question, and the answer that most samples give.

All samples of a question share its whole prompt, and all questions share the worked examples before
them. A
small model is often wrong, but seldom in the same way: the right answer gets the most votes.

    python examples/majority_vote.py
    python examples/majority_vote.py --model MODEL --samples 64 --max-tokens 200
"""

import argparse
import re
from collections import Counter
from typing import Any

import common  # in this folder

WORKED = (
    ("Ann has 3 apples and buys 4 more.", "3 + 4 = 7"),
    ("Tom has 18 pens and finds 2 more.", "18 + 2 = 20"),
    ("Eva has 5 books and gets 16 more.", "5 + 16 = 21"),
    ("Max has 9 coins and finds 4 more.", "9 + 4 = 13"),
    ("Lea has 16 nuts and buys 13 more.", "16 + 13 = 29"),
    ("Jon has 7 cards and gets 7 more.", "7 + 7 = 14"),
    ("Pia has 21 shells and finds 8 more.", "21 + 8 = 29"),
    ("Sam has 4 keys and gets 9 more.", "4 + 9 = 13"),
)
#: Questions with the right answers, which the model does not see.
QUESTIONS = (
    ("Ben has 15 coins and finds 4 more.", 19),
    ("Kim has 8 eggs and buys 6 more.", 14),
    ("Ida has 12 stamps and gets 9 more.", 21),
    ("Ole has 16 fish and catches 5 more.", 21),
)


def prompt(question: str) -> str:
    """The worked examples, then the question."""
    worked = "\n\n".join(f"Question: {asked} How many?\nAnswer: {sum_}" for asked, sum_ in WORKED)
    return f"Sums in words.\n\n{worked}\n\nQuestion: {question} How many?\nAnswer:"


def work(llm: Any, args: argparse.Namespace) -> tuple[list[Any], list[list[int | None]]]:
    """Sample; return the answers by question, None where a sample has none."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        n=args.samples, temperature=1.0, seed=1, max_tokens=args.max_tokens, stop=["\n"]
    )
    asked = [prompt(question) for question, _ in QUESTIONS[: args.questions]]
    outputs = llm.generate(asked, sampling, use_tqdm=False)
    answers = [[answer_of(sample.text) for sample in output.outputs] for output in outputs]
    return [sample for output in outputs for sample in output.outputs], answers


def answer_of(text: str) -> int | None:
    """The number after the equals sign."""
    found = re.search(r"= *(-?\d{1,9})\b", text)
    return int(found.group(1)) if found else None


def show_votes(answers: list[list[int | None]]) -> None:
    """Print a line for each question, and how often one sample and the majority are right."""
    single = majority = 0.0
    for (question, right), given in zip(QUESTIONS, answers, strict=False):
        votes = Counter(answer for answer in given if answer is not None)
        ranked = sorted(votes.items(), key=lambda vote: (-vote[1], vote[0]))
        best = ranked[0][0] if ranked else None
        single += votes[right] / len(given)
        majority += best == right
        shares = ", ".join(f"{answer} ({count})" for answer, count in ranked[:4]) or "none"
        mark = "right" if best == right else f"wrong, it is {right}"
        print(f"\n{question}\n    votes: {shares}; majority: {best}, {mark}")
    print(
        f"\nright: {single / len(answers):.0%} of the samples, "
        f"{majority:.0f} of {len(answers)} majorities"
    )


def main() -> int:
    """Run the example; the exit status."""
    parser = common.options(__doc__, max_model_len=2048, block_size=32, pairs=3)
    parser.add_argument("--samples", type=int, default=16, help="samples of each question")
    parser.add_argument("--questions", type=int, default=2, choices=range(1, len(QUESTIONS) + 1))
    parser.add_argument("--max-tokens", type=int, default=12, help="length of a sample")
    args = parser.parse_args()
    common.at_least(args, 1, "samples", "max_tokens")
    common.check_options(args)
    args.max_num_seqs = args.samples * args.questions
    found = common.compare(args, work)
    show_votes(found.first[common.OURS].shown)
    return common.show_gain(found)


if __name__ == "__main__":
    common.run_example(main)
