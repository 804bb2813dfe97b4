"""DeFT's published recordings (github.com/LINs-lab/DeFT, ``dataset/generation``), read as its own
programs read them: the runs of its tasks, and the contexts of its token trees.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple

from vllm_prefixshare.core import PrefixShareError

#: runs of a task that the paper averages: the first complete ones of its file
AVERAGED_RUNS = 10
#: tokens of the published token-tree runs (``experiments/speculative_decoding/.../ref_data``):
#: of the prompt, and at most of prompt and answer
PROMPT_TOKENS, MAX_TOKENS = 1016, 6000


class StepRange(NamedTuple):
    """Consecutive decode steps in which the same branches grow, both ends included."""

    first: int
    last: int

    @property
    def num_steps(self) -> int:
        return self.last - self.first + 1


def complete_runs(file: Path) -> list[list[dict]]:
    """Nodes of the runs of a ``*ToT.json`` that DeFT averages. Its loader skips a run that is
    marked ``incompleted``.

    Raises:
        PrefixShareError: no run is complete.
    """
    runs = [run for run in json.loads(file.read_text()) if not run.get("incompleted")]
    nodes = [list(run["data"].values()) for run in runs if run["data"]]
    if not nodes:
        raise PrefixShareError(
            f"{file.name} has no complete run: copy the file from DeFT's dataset/generation folder."
        )
    return nodes[:AVERAGED_RUNS]


def step_ranges(nodes: list[dict]) -> Iterator[StepRange]:
    """Every decode step of a run in which a branch grows. Step 0 is the prompt's prefill."""
    edges = {node["start"] for node in nodes} | {node["end"] + 1 for node in nodes}
    steps = sorted({1} | {edge for edge in edges if edge > 1})
    for first, end in pairwise(steps):
        if any(node["start"] <= first <= node["end"] for node in nodes):
            yield StepRange(first, end - 1)


def token_tree_files(recordings: Path | None) -> dict[int, Path]:
    """Files of token trees with accepted lengths, ``APPS_tree_size*.json``, by tokens of a tree."""
    found = recordings.glob("APPS_tree_size*.json") if recordings else ()
    sizes = {int(file.stem.removeprefix("APPS_tree_size")): file for file in found}
    return dict(sorted(sizes.items()))


def contexts(accepted: list[int]) -> list[int]:
    """Tokens in the KV cache before the token tree, at each decode step of a published run.

    The run takes the recorded lengths as long as its answer has room, and then draws lengths
    between the smallest and the largest one from Python's generator, seeded with 0
    (``generate_accepted_len_list``). The first length belongs to the prefill and adds no tokens.

    Args:
        accepted: accepted tokens of each recorded step (``Records[0]["Accept_length"]``).
    """
    room, drawn, lengths = MAX_TOKENS - PROMPT_TOKENS, Random(0), []
    for length in accepted:
        if length > room:
            break
        lengths.append(length)
        room -= length
    while room:
        lengths.append(min(drawn.randint(min(accepted), max(accepted)), room))
        room -= lengths[-1]
    found = [PROMPT_TOKENS]
    for length in lengths[1:]:
        found.append(found[-1] + length)
    return found
