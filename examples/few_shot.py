"""Classification with few examples: many words to label behind one prompt of labelled words.

Every request shares the labelled words and adds a word of its own. A label is short, so there are
few decode
steps: most of the time of such a batch is prefill, which PREFIX_SHARE does not change.

    python examples/few_shot.py
    python examples/few_shot.py --model MODEL --shots 24
"""

import argparse
from typing import Any

import common  # in this folder

#: Words with their labels, for the prompt.
SHOTS = (
    ("salmon", "animal, fish"),
    ("sparrow", "animal, bird"),
    ("oak", "plant, tree"),
    ("apple", "plant, fruit"),
    ("hammer", "thing, tool"),
    ("bus", "thing, vehicle"),
    ("herring", "animal, fish"),
    ("eagle", "animal, bird"),
    ("birch", "plant, tree"),
    ("cherry", "plant, fruit"),
    ("saw", "thing, tool"),
    ("bicycle", "thing, vehicle"),
    ("trout", "animal, fish"),
    ("swan", "animal, bird"),
    ("pine", "plant, tree"),
    ("plum", "plant, fruit"),
    ("chisel", "thing, tool"),
    ("train", "thing, vehicle"),
    ("cod", "animal, fish"),
    ("gull", "animal, bird"),
    ("willow", "plant, tree"),
    ("pear", "plant, fruit"),
    ("drill", "thing, tool"),
    ("ship", "thing, vehicle"),
)
#: Words with their correct labels, which the model does not see.
WORDS = (
    ("eel", "animal, fish"),
    ("owl", "animal, bird"),
    ("elm", "plant, tree"),
    ("lemon", "plant, fruit"),
    ("axe", "thing, tool"),
    ("lorry", "thing, vehicle"),
    ("pike", "animal, fish"),
    ("crow", "animal, bird"),
    ("beech", "plant, tree"),
    ("grape", "plant, fruit"),
    ("pliers", "thing, tool"),
    ("ferry", "thing, vehicle"),
    ("tuna", "animal, fish"),
    ("robin", "animal, bird"),
    ("maple", "plant, tree"),
    ("peach", "plant, fruit"),
)


def work(llm: Any, args: argparse.Namespace) -> tuple[list[Any], list[str]]:
    """Classify; return the labels."""
    from vllm import SamplingParams

    shots = "".join(f"Word: {word}\nLabel: {label}\n\n" for word, label in SHOTS[: args.shots])
    start = f"Each word has a label: what it names, and of which kind it is.\n\n{shots}"
    outputs = llm.generate(
        [f"{start}Word: {word}\nLabel:" for word, _ in WORDS[: args.words]],
        SamplingParams(temperature=0, max_tokens=6, stop=["\n"], logprobs=args.logprobs),
        use_tqdm=False,
    )
    return [o.outputs[0] for o in outputs], [o.outputs[0].text.strip() for o in outputs]


def show_labels(labels: list[str]) -> None:
    """Print a line for each word, and how many labels are right."""
    print()
    right = 0
    for (word, expected), label in zip(WORDS, labels, strict=False):
        right += label == expected
        mark = "" if label == expected else f"   (wrong: {expected})"
        print(f"{word:12} {label}{mark}")
    print(f"\n{right} of {len(labels)} labels are right")


def main() -> int:
    """Run the example; the exit status."""
    parser = common.options(__doc__, max_model_len=2048, block_size=32, pairs=5)
    parser.add_argument("--shots", type=int, default=24, choices=range(1, len(SHOTS) + 1))
    parser.add_argument("--words", type=int, default=16, choices=range(1, len(WORDS) + 1))
    args = parser.parse_args()
    common.check_options(args)
    args.max_num_seqs = args.words
    found = common.compare(args, work)
    show_labels(found.first[common.OURS].shown)
    return common.show_gain(found)


if __name__ == "__main__":
    common.run_example(main)
