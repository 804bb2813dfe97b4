"""The size of each test: CI's share by default, the full run of ``make fuzz`` by variables."""

import hashlib
import os

#: random event sequences over all paths; random forests for each kernel; how often the largest
#: batch is planned again
SEQUENCES = int(os.environ.get("FUZZ_SEQUENCES", "300"))
FORESTS = int(os.environ.get("FUZZ_FORESTS", "24"))
#: cases of each shared part of the host work on prompts
PROMPTS = int(os.environ.get("FUZZ_PROMPTS", "400"))
#: texts tokenized by pieces, over all kinds of tokenizers
TEXTS = int(os.environ.get("FUZZ_TEXTS", "300"))
#: with another seed the event sequences are others in every mode: several processes can share the
#: full run
SEED = int(os.environ.get("FUZZ_SEED", "0"))
PLANS_AGAIN = 1 if FORESTS < 100 else 5

#: what was tried, shown at the end: figures for ``docs/fidelity.md``
REPORT: list[str] = []


def seed_of(*what: str | int) -> int:
    """The seed of one part of a test: the same in every process, and its own for each FUZZ_SEED
    and each part, which sums of small numbers would not be.
    """
    text = "\0".join(map(str, (SEED, *what)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def progress(line: str) -> None:
    """Write the progress of a long test to the file that FUZZ_PROGRESS names."""
    if path := os.environ.get("FUZZ_PROGRESS"):
        with open(path, "a") as file:
            print(line, file=file)


def report(line: str) -> None:
    REPORT.append(line)
