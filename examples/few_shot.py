"""Classification with few examples: many short texts behind one long prompt.

The labelled comments come first, so every request shares them and reads a comment of its own.

    python examples/few_shot.py
    python examples/few_shot.py --model MODEL --shots 24
"""

import argparse
from typing import Any

import common  # beside this file

SHOTS = (
    ("The staff at the desk were kind and helped us at once.", "staff, good"),
    ("We waited an hour for a bowl of cold soup.", "food, bad"),
    ("The stair of the lighthouse was closed and nobody told us.", "lighthouse, bad"),
    ("From the top of the lighthouse the view is wonderful.", "lighthouse, good"),
    ("The guide was rude to the children.", "staff, bad"),
    ("The fish soup in the café was the best of our holiday.", "food, good"),
    ("Our guide knew a story about every ship.", "staff, good"),
    ("The bread was old and the coffee was weak.", "food, bad"),
    ("The lighthouse was the high point of our visit, in every way.", "lighthouse, good"),
    ("The woman at the desk did not even look up.", "staff, bad"),
    ("The apple cake is worth the journey.", "food, good"),
    ("The lamp room of the lighthouse smelled of paint and we left.", "lighthouse, bad"),
    ("A volunteer carried my mother's bag up to the gallery.", "staff, good"),
    ("Nine euros for a sandwich with nothing on it.", "food, bad"),
    ("The children counted every step of the lighthouse and loved it.", "lighthouse, good"),
    ("The man who sold the tickets shouted at a family.", "staff, bad"),
    ("Fresh fish, friendly prices, large plates.", "food, good"),
    ("We queued for the lighthouse and were sent away at the door.", "lighthouse, bad"),
    ("Everybody who works here smiles.", "staff, good"),
    ("The soup was salty and the tea was cold.", "food, bad"),
    ("You can see the whole coast from the lighthouse.", "lighthouse, good"),
    ("Our guide was late, tired and bored.", "staff, bad"),
    ("The chocolate cake was excellent.", "food, good"),
    ("The lighthouse is too dark and its stair is dangerous.", "lighthouse, bad"),
)
#: With their labels, for the count at the end.
COMMENTS = (
    ("The cake was dry and far too expensive.", "food, bad"),
    ("A friendly volunteer explained every knot to us.", "staff, good"),
    ("The best coffee in town!", "food, good"),
    ("The woman at the desk shouted at us.", "staff, bad"),
    ("Climbing the lighthouse was the best part of the day.", "lighthouse, good"),
    ("The lighthouse was cold, wet and dirty.", "lighthouse, bad"),
    ("Our guide made the children laugh.", "staff, good"),
    ("The fish was raw and the potatoes were burnt.", "food, bad"),
    ("A beautiful view from the lighthouse at sunset.", "lighthouse, good"),
    ("The guide did not answer a single question.", "staff, bad"),
    ("Delicious soup and fresh bread.", "food, good"),
    ("The lighthouse was closed for the third time this year.", "lighthouse, bad"),
    ("The staff found my lost camera and sent it home.", "staff, good"),
    ("The café had run out of everything by noon.", "food, bad"),
    ("I could stay in the lighthouse for hours.", "lighthouse, good"),
    ("Nobody at the desk spoke to us.", "staff, bad"),
)


def work(llm: Any, args: argparse.Namespace) -> tuple[list[Any], list[str]]:
    """Classify; the labels."""
    from vllm import SamplingParams

    shots = "\n\n".join(
        f"Comment: {comment}\nLabel: {label}" for comment, label in SHOTS[: args.shots]
    )
    start = f"Comments of visitors: what each is about, and whether it is good or bad.\n\n{shots}"
    outputs = llm.generate(
        [f"{start}\n\nComment: {comment}\nLabel:" for comment, _ in COMMENTS[: args.comments]],
        SamplingParams(temperature=0, max_tokens=6, stop=["\n"], logprobs=args.logprobs),
        use_tqdm=False,
    )
    return [o.outputs[0] for o in outputs], [o.outputs[0].text.strip() for o in outputs]


def show_labels(labels: list[str]) -> None:
    """A line for each comment, and how many labels are right."""
    print()
    right = 0
    for (comment, expected), label in zip(COMMENTS, labels, strict=False):
        right += label == expected
        mark = "" if label == expected else f"   (wrong: {expected})"
        print(f"{comment:58} {label}{mark}")
    print(f"\n{right} of {len(labels)} labels are right")


def main() -> int:
    """The exit status."""
    parser = common.options(__doc__, max_model_len=2048, block_size=32, pairs=5)
    parser.add_argument("--shots", type=int, default=24, choices=range(1, len(SHOTS) + 1))
    parser.add_argument("--comments", type=int, default=16, choices=range(1, len(COMMENTS) + 1))
    args = parser.parse_args()
    common.check_options(args)
    args.max_num_seqs = args.comments
    found = common.compare(args, work)
    show_labels(found.first[common.OURS].shown)
    return common.show_gain(found)


if __name__ == "__main__":
    common.run_example(main)
