"""Times of one layer's attention, by the harness of ``benchmarks.kernel``: every output is compared
with float32 attention before its time counts.
"""

import argparse
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from benchmarks.kernel.bench import machine, parse, run_cell
from benchmarks.papers.experiment import Figures, Setting
from benchmarks.papers.methods import Method, Planned
from benchmarks.peers import Options, Peer, UnavailableError, make
from benchmarks.support.program import CHECKOUTS
from benchmarks.support.trees import Workload


@cache
def _peer(
    name: str, device: str, checkouts: tuple[tuple[str, Path], ...]
) -> Peer | UnavailableError:
    folders = {**dict.fromkeys(CHECKOUTS), **dict(checkouts)}
    try:
        return make(name, Options(torch.device(device), dtype_on(device), folders))
    except UnavailableError as e:
        return e


def dtype_on(device: str) -> torch.dtype:
    """The dtype that is timed: a GPU's kernels have no float32, a CPU is slow without."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def time_methods(
    setting: Setting, w: Workload, heads: tuple[int, int], methods: Sequence[Method]
) -> Figures:
    """One cell of ``benchmarks.kernel``: each method, then the setting's further peers.

    Returns:
        what ``run_cell`` does; under ``peers`` the milliseconds and the error of each.
    """
    timer, rates = machine(setting.device)
    options = Options(torch.device(setting.device), dtype_on(setting.device), {})
    peers: dict[str, Peer | UnavailableError] = {m.title: Planned(m, options) for m in methods}
    peers |= {n: _peer(n, setting.device, setting.checkouts) for n in setting.peers}
    layer = layer_options(setting.device, setting.repeats)
    return run_cell(w, heads, peers, timer, rates, layer)


def layer_options(device: str, repeats: int) -> argparse.Namespace:
    """The options of ``benchmarks.kernel`` for a plain layer."""
    dtype = str(dtype_on(device)).removeprefix("torch.")
    return parse(["--device", device, "--dtype", dtype, "--repeats", str(repeats)])
