"""Batches whose requests verify a token tree."""

import json
from pathlib import Path

import numpy as np

from benchmarks.support.trees import Workload, forest
from benchmarks.support.workload_sets import token_tree_parents
from vllm_prefixshare.core import IntArray


def recorded_tree(size: int, recordings: Path | None) -> Path | None:
    """The file of Medusa's token tree of that size, if it was recorded."""
    file = recordings / f"tree_size{size}.json" if recordings else None
    return file if file and file.exists() else None


def kind_of_tree(size: int, recordings: Path | None) -> str:
    """Whose token tree ``tree_parents`` takes."""
    return "Medusa's" if recorded_tree(size, recordings) else "quaternary"


def tree_parents(size: int, recordings: Path | None) -> IntArray:
    """Parents of a token tree: Medusa's where it was recorded, else a quaternary one."""
    if file := recorded_tree(size, recordings):
        return token_tree_parents(json.loads(file.read_text())["Tree_Structure"])
    return np.array([-1, *((i - 1) // 4 for i in range(1, size))], np.int32)


def token_tree(size: int, batch: int, context: int, recordings: Path | None) -> Workload:
    """Requests that each verify a token tree over a context of their own."""
    lengths = [context + size] * batch
    name = f"{size} tokens x {batch}, context {context}"
    return forest(
        name, [-1] * batch, lengths, query_len=size, query_parents=tree_parents(size, recordings)
    )
