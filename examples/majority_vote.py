"""Many samples of each question, and the answer that most of them give.

All samples of a question share its whole prompt, and all questions share the worked examples
before them. A small model is often wrong once and seldom in the same way twice.

    python examples/majority_vote.py
    python examples/majority_vote.py --model MODEL --samples 64 --max-tokens 200
"""

import argparse
import re
from collections import Counter
from typing import Any

import common

WORKED = (
    ("Ann has 3 apples and buys 4 more. How many apples does she have?", "3 + 4 = 7", 7),
    ("A boat has 9 seats. 5 are taken. How many seats are free?", "9 - 5 = 4", 4),
    ("There are 2 boxes with 6 pens each. How many pens are there?", "2 * 6 = 12", 12),
    ("Tom walks 8 km on Monday and 2 km on Friday. How far does he walk?", "8 + 2 = 10", 10),
    ("A ticket costs 5 euros. What do 3 tickets cost?", "3 * 5 = 15", 15),
    ("A book has 20 pages. Eva has read 6. How many are left?", "20 - 6 = 14", 14),
)
#: With the right answers, for the table only.
QUESTIONS = (
    ("Ben has 5 coins and finds 4 more. How many coins does he have?", 9),
    ("A bus has 10 seats. 7 are taken. How many seats are free?", 3),
    ("There are 3 bags with 4 nuts each. How many nuts are there?", 12),
    ("Mia reads 6 pages on Monday and 6 on Friday. How many pages does she read?", 12),
)


def prompt(question: str) -> str:
    """The worked examples, then the question."""
    worked = "\n\n".join(
        f"Question: {asked}\nThought: {thought}.\nAnswer: {answer}"
        for asked, thought, answer in WORKED
    )
    return f"Short questions with numbers.\n\n{worked}\n\nQuestion: {question}\nThought:"


def work(llm: Any, args: argparse.Namespace) -> tuple[list[Any], list[list[int | None]]]:
    """Sample; the answers by question, None where a sample has none."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        n=args.samples, temperature=0.8, seed=1, max_tokens=args.max_tokens, stop=["\n\n"]
    )
    asked = [prompt(question) for question, _ in QUESTIONS[: args.questions]]
    outputs = llm.generate(asked, sampling, use_tqdm=False)
    answers = [[answer_of(sample.text) for sample in output.outputs] for output in outputs]
    return [sample for output in outputs for sample in output.outputs], answers


def answer_of(text: str) -> int | None:
    """The number after "Answer:"."""
    found = re.search(r"Answer: *(-?\d{1,9})\b", text)
    return int(found.group(1)) if found else None


def show_votes(answers: list[list[int | None]]) -> None:
    """A line for each question, and how often one sample and the majority are right."""
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
    """The exit status."""
    parser = common.options(__doc__, max_model_len=2048, block_size=32, pairs=3)
    parser.add_argument("--samples", type=int, default=16, help="of each question")
    parser.add_argument("--questions", type=int, default=2, choices=range(1, len(QUESTIONS) + 1))
    parser.add_argument("--max-tokens", type=int, default=16, help="length of a sample")
    args = parser.parse_args()
    common.at_least(args, 1, "samples", "max_tokens")
    common.check_options(args)
    args.max_num_seqs = args.samples * args.questions
    found = common.compare(args, work)
    show_votes(found.first[common.OURS].shown)
    return common.show_gain(found)


if __name__ == "__main__":
    common.run_example(main)
