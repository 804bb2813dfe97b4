"""The workloads that kernels are compared on, in named sets."""

import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.prompt_trees import flashforge_trees
from benchmarks.support.trees import Workload, forest, tree
from vllm_prefixshare.core import IntArray, PrefixShareError

#: Trees of the FastTree, PAT and vLLM cascade papers and benchmarks, a forest, a long document.
ANCHORS = (
    "1,10_4096,416",
    "1,256_256,32",
    "1,1024_2048,32",
    "1,2,64_1024,256,256",
    "1,4,256_32,256,32",
    "1,8,512_32,2048,256",
    "1,8,512_512,512,256",
    "1,4,16,512_1024,256,128,32",
    "1,4,16,64,256,1024_256,32,256,64,32,256",
    "1,16,32,64,128,1024_256,128,64,32,32,32",
    "8,16,32,256_512,512,256,32",
    "256_1024",
    "1,64_32768,64",
    "1,32_122880,256",
)

#: The 15 trees of FastTree's kernel benchmark (figure 9), as its artifact has them in
#: ``kernel_bench/run_benchmark.sh``; its children are distributed like those of ``tree``.
FASTTREE = (
    "1,2,64_8,256,32",
    "1,4,256_8,256,32",
    "1,4,8,256_8,256,256,32",
    "1,256_256,32",
    "1,1024_2048,32",
    "1,16,64_1024,256,32",
    "1,4,16,512_1024,256,128,32",
    "1,4,16,64,256,1024_256,8,256,64,32,256",
    "1,10_4000,400",
    "1,2,4,8,16,32,64,128,1024_16,16,16,16,16,16,16,16,16",
    "1,2,4,8,16,32,64,128,1024_256,128,64,16,16,16,16,16,16",
    "1,8,16,32,64,128,1024_256,128,64,16,16,16,16",
    "1,8,16,32,64,256,1024_256,128,64,16,16,16,16",
    "1,16,32,64,128,1024_256,128,64,16,16,16",
    "1,16,32,64,256,1024_256,128,64,16,16,16",
)

#: FlashForge's context length, "120k" (section 6.1)
LONG = 122880


def anchors(block_size: int) -> Iterator[Workload]:
    """The trees of ``ANCHORS``."""
    for spec in ANCHORS:
        yield tree(spec, block_size)


def fasttree(block_size: int) -> Iterator[Workload]:
    """The trees of ``FASTTREE``. Nodes of 8 tokens are no whole block: each child holds a copy."""
    for spec in FASTTREE:
        yield tree(spec, block_size)


def flashforge(block_size: int) -> Iterator[Workload]:
    """FlashForge's sweeps (section 6.1)."""
    for nodes in flashforge_trees(LONG).values():
        for name, parents, tokens in nodes:
            yield forest(name, parents, tokens, block_size)


def grpo(block_size: int) -> Iterator[Workload]:
    """Rollouts of 64 prompts, as reinforcement learning with GRPO samples them: prompts of 128
    to 1024 tokens, answers of very unequal lengths.
    """
    for low, high in ((8, 8), (16, 16), (32, 32), (8, 32)):
        rng = np.random.default_rng(high + low)
        samples = rng.integers(low, high + 1, 64)
        parents = [-1] * 64 + np.repeat(np.arange(64), samples).tolist()
        answers = np.clip(rng.lognormal(5.5, 0.9, samples.sum()), 16, 4096).astype(int)
        tokens = [*rng.integers(128, 1025, 64).tolist(), *answers.tolist()]
        name = f"grpo 64 x {low}" + (f" to {high}" if high > low else "")
        yield forest(name, parents, tokens, block_size)


def unshared(block_size: int) -> Iterator[Workload]:
    """Batches without sharing: equal lengths, then very unequal ones."""
    for spec in ("1_16384", "8_8192", "64_4096", "256_512", "256_1024"):
        yield tree(spec, block_size)
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.5, 1.2, 256), 16, 65536).astype(int).tolist()
    yield forest("256 unequal (log-normal)", [-1] * 256, lengths, block_size)
    yield forest("1 of 65536, 63 of 512", [-1] * 64, [65536] + [512] * 63, block_size)
    yield forest("4 of 32768, 252 of 128", [-1] * 256, [32768] * 4 + [128] * 252, block_size)


def batches(block_size: int) -> Iterator[Workload]:
    """Batches of any size on one document: as a rule they do not fill the tiles of a kernel."""
    for batch, document, private in product((20, 30, 50, 100), (4096, 8192, 32768), (64, 400)):
        yield tree(f"1,{batch}_{document},{private}", block_size)


def first_step(block_size: int) -> Iterator[Workload]:
    """The first step after a prefix hit: short questions on one cached document, whose tokens are
    all queries of this step.
    """
    for document, batch, new in product((32768, 4096), (8, 32, 128), (2, 4, 8, 16, 32)):
        yield forest(
            f"{batch} x {new} new on {document}",
            [-1] + [0] * batch,
            [document] + [new] * batch,
            block_size,
            query_len=new,
        )


def deft(block_size: int, folder: Path, trees: int = 2, steps: int = 4) -> Iterator[Workload]:
    """Steps of recorded tree-of-thoughts runs (DeFT, table 4): the largest runs of each file,
    at evenly spaced steps. A branch is a request only while it grows.
    """
    for path in sorted(folder.glob("*ToT.json")):
        runs = [list(run["data"].values()) for run in json.loads(path.read_text())]
        for i in sorted(range(len(runs)), key=lambda i: -len(runs[i]))[:trees]:
            final = max((node["end"] for node in runs[i]), default=0)
            for n in range(1, steps + 1):
                step = final * n // (steps + 1)
                if step:  # a few recordings are empty
                    yield recorded_step(f"{path.stem} {i} step {step}", runs[i], step, block_size)


def recorded_step(name: str, nodes: list[dict[str, Any]], step: int, block_size: int) -> Workload:
    """The tree at one step. Each node grows by one token a step from ``start`` to ``end``."""
    return forest(name, *recorded_tree(nodes, step), block_size)


def recorded_tree(nodes: list[dict[str, Any]], step: int) -> tuple[list[int], list[int]]:
    """Parents and tokens of the nodes above the branches that grow at one step."""
    parent_of = {child: node["id"] for node in nodes for child in node["children"]}
    growing = [node["id"] for node in nodes if node["start"] <= step <= node["end"]]
    kept: set[int] = set()
    for node in growing:
        at: int | None = node
        while at is not None and at not in kept:
            kept.add(at)
            at = parent_of.get(at)
    # sorted by start, parents come first: a child starts after its parent has ended
    alive = sorted((n for n in nodes if n["id"] in kept), key=lambda n: n["start"])
    index = {node["id"]: i for i, node in enumerate(alive)}
    parents = [index[parent_of[n["id"]]] if n["id"] in parent_of else -1 for n in alive]
    return parents, [min(step, n["end"]) - n["start"] + 1 for n in alive]


def medusa(block_size: int, folder: Path) -> Iterator[Workload]:
    """Medusa's token trees as DeFT recorded them (section 4): each request verifies the same
    tree of draft tokens over a context of its own, half-way through its recorded answer.
    """
    for path in sorted(folder.glob("tree_size*.json"), key=lambda p: (len(p.name), p.name)):
        recorded = json.loads(path.read_text())
        parents = token_tree_parents(recorded["Tree_Structure"])
        for batch in (1, 8, 32):
            lengths = []
            for record in recorded["Records"][:batch]:
                accepted = record["Accept_length"]
                # about four characters a token
                prompt = len(" ".join(record["prompt"])) // 4
                lengths.append(prompt + sum(accepted[: len(accepted) // 2]) + len(parents))
            yield forest(
                f"medusa {len(parents)} tokens x {batch}",
                [-1] * batch,
                lengths,
                block_size,
                query_len=len(parents),
                query_parents=parents,
            )


def token_tree_parents(paths: list[list[int]]) -> IntArray:
    """Parents of a Medusa tree, whose nodes are given as paths of child numbers from the last
    accepted token; that token comes first and is the root.
    """
    index = {(): 0} | {tuple(path): i + 1 for i, path in enumerate(paths)}
    return np.array([-1] + [index[tuple(path[:-1])] for path in paths], np.int32)


WORKLOAD_SETS: dict[str, Callable[..., Iterator[Workload]]] = {
    "anchors": anchors,
    "fasttree": fasttree,
    "flashforge": flashforge,
    "deft": deft,
    "medusa": medusa,
    "grpo": grpo,
    "unshared": unshared,
    "batches": batches,
    "first_step": first_step,
}
RECORDED = ("deft", "medusa")


def workload_set(
    name: str, block_size: int = 16, recordings: Path | None = None, quick: bool = False
) -> Iterator[Workload]:
    """The workloads of a set.

    Args:
        name: in ``WORKLOAD_SETS``.
        recordings: folder with DeFT's ``*ToT.json`` and ``tree_size*.json``.
        quick: every third workload only.

    Raises:
        PrefixShareError: the set needs recordings and there are none.
    """
    if name not in RECORDED:
        found = WORKLOAD_SETS[name](block_size)
    elif recordings is None or not list(recordings.glob("*.json")):
        raise PrefixShareError(
            f"the workloads {name!r} are recorded ones: name the folder of DeFT's JSON files "
            "with --deft-data."
        )
    else:
        found = WORKLOAD_SETS[name](block_size, recordings)
    yield from (w for i, w in enumerate(found) if not quick or i % 3 == 0)
