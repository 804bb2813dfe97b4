"""Run every kernel under NVIDIA's compute-sanitizer: memory errors, races in shared memory, misuse
of barriers.

    python -m benchmarks.quality.sanitize --out sanitizer.json

A first run without it compiles, compares with float64 and keeps the output. Then each tool has
processes of its own that launch the same again: the tool must find nothing, and the output must
have the same bits. The exit status is 1 if anything was found.

Two kinds of reports of racecheck are counted apart. In the machine code of both, barriers order
what it takes for a race:

- Of a kernel with ``warp_specialize``: the bytes by which Triton tells warps what to run and hands
  values over, "read" where the kernel begins, "written" there or at the call. Each write is before,
  and each later one behind, a barrier of all warps.
- Of the kernel for latent KV caches: the running maxima and the sums that its two warpgroups hand
  over through shared memory. The writer's threads meet at a barrier, one of them arrives at an
  mbarrier, and all that read wait for it. The reader's meet likewise before one of them arrives,
  and the writer waits for that, or for the producer warp, which has waited for it. Only such a
  pair counts: a write at ``name.index(HALF).store`` with reads at ``name.index(OTHER).load``. And
  it is wrong nevertheless, unless racecheck reports the same of the control.

Kernels that do nothing else (``sanitize_control.py``) are launched, too.
"""

import argparse
import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.support.program import (
    add_out,
    environment,
    make_parser,
    module_command,
    recorded_command,
)
from benchmarks.support.results import versions, write
from benchmarks.support.trees import tree
from tests.gpu import test_gpu_extras as extra_cases
from tests.gpu.test_gpu_mla import LatentLayer
from tests.support.gpu_layer import FP16, KERNELS, Layer, poison, random_trees
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.cache_write import CacheWrite
from vllm_prefixshare.kernels.extras import PLAIN
from vllm_prefixshare.planning.costs.lookup import gpu

PROGRAM = "benchmarks.quality.sanitize"

TOOLS = ("memcheck", "racecheck", "synccheck")
BATCH = "1,2,8_256,64,40"  # with partial results on every kernel
PLACES = "/usr/local/cuda/bin"
#: a layer, by the arguments of ``Layer`` beside the batch
LAYERS: dict[str, dict[str, Any]] = {
    "head_dim 64": {"heads": (4, 4), "head_dim": 64, "dtype": FP16},
    "head_dim 80, HND": {"heads": (8, 2), "head_dim": 80, "layout": "HND interleaved"},
    "head_dim 128": {"heads": (32, 8), "head_dim": 128},
    "head_dim 256": {"heads": (8, 2), "head_dim": 256},
    "head_dim 512": {"heads": (16, 2), "head_dim": 512},
    "several queries": {"heads": (8, 2), "counts": [4, 1, 3, 2] * 2},
    "more rows than a tile": {"heads": (64, 2), "counts": [5] * 8},
    "token trees": {"heads": (8, 2), "counts": [6] * 8, "parents": random_trees([6] * 8)},
}
CONTROL = "Triton's warps alone"
HANDOVER = "a handover alone"
CACHE_WRITE = "the KV cache write"
PROGRAMS = 512  # of either: racecheck reports some thread blocks, not each
PORTABLE_ONLY = extra_cases.PORTABLE_ONLY | {"head_dim 512"}
Started = tuple[subprocess.Popen[bytes], Path]
EXTRAS = ("fp8", "fp8, sinks, soft_cap", "sinks", "soft_cap", "alibi")


def specialised() -> list[Any]:
    """Every kernel with ``warp_specialize``; first those that do nothing else."""
    from benchmarks.quality.sanitize_control import handover, nothing_else
    from vllm_prefixshare.kernels.hopper import kernel as hopper
    from vllm_prefixshare.kernels.mla_hopper import kernel as mla_hopper

    return [nothing_else, handover, hopper.partial_attention, mla_hopper.partial_attention]


def dispatches() -> set[str]:
    """Where racecheck places what Triton reads and writes to tell warps what to run."""
    found = set()
    for kernel in specialised():
        lines, first = inspect.getsourcelines(kernel.fn)
        for i, line in enumerate(lines):
            if line.startswith("def ") or "gl.warp_specialize(" in line:
                found.add(f"{Path(inspect.getfile(kernel.fn)).name}:{first + i}")
    return found


def handovers() -> set[tuple[str, str]]:
    """Where warpgroups write what they hand over to each other, and where they read it."""
    found = set()
    for path in {Path(inspect.getfile(kernel.fn)) for kernel in specialised()}:
        lines = path.read_text().splitlines()
        places: dict[str, dict[str, str]] = {}
        for i, line in enumerate(lines, 1):
            for name, what in re.findall(r"(\w+)\.index\((HALF\)\.store|OTHER\)\.load)\(", line):
                places.setdefault(name, {})[what] = f"{path.name}:{i}"
        found |= {(p["HALF).store"], p["OTHER).load"]) for p in places.values() if len(p) == 2}
    return found


def reports(text: str) -> list[tuple[list[str], set[tuple[str, str]]]]:
    """Lines of each of racecheck's reports, and what it names: kind of access and place."""
    found: list[tuple[list[str], set[tuple[str, str]]]] = []
    for line in text.splitlines():
        if "Race reported between" in line:
            found.append(([], set()))
        elif not re.match(r"=+ +and (?:Read|Write) access", line):
            continue
        if found:
            found[-1][0].append(line)
            found[-1][1].update(re.findall(r"(Read|Write) access at .*? in (\S+)", line))
    return found


def variants() -> list[tuple[str, str]]:
    """Kernel and name of everything that is launched."""
    found = [(kernel, name) for kernel in KERNELS for name in (*LAYERS, *EXTRAS)]
    found = [x for x in found if x[0] == "portable" or x[1] not in PORTABLE_ONLY]
    if "hopper" in KERNELS:
        found += [("mla_hopper", "latent KV cache"), ("hopper", CONTROL)]
        found += [("mla_hopper", HANDOVER)]
    return [*found, ("cache_write", CACHE_WRITE)]


def launched(kernel: str, name: str, checks: bool) -> torch.Tensor:
    """The output of one variant.

    Args:
        checks: compare with float64.
    """
    if name == CONTROL:
        written = torch.zeros(2, dtype=torch.int16, device="cuda")
        specialised()[0][(PROGRAMS,)](written, num_warps=4)
        return written
    if name == HANDOVER:
        swapped = torch.zeros(2, 64, device="cuda")
        specialised()[1][(PROGRAMS,)](swapped, TURNS=8, num_warps=4)
        sums = (2 * torch.arange(64, device="cuda") + 64) * 2.0**7
        assert not checks or torch.equal(swapped, sums.expand(2, 64))
        return swapped
    if name == CACHE_WRITE:
        return cache_written(checks)
    if kernel == "mla_hopper":
        latent = LatentLayer(tree(BATCH, 64))
        out, lse = latent.run(latent.planned())
        if checks:
            latent.check(out, lse)
        return out
    options, extras = extra_cases.extras_of(name) if name in EXTRAS else ({}, PLAIN)
    layer = Layer(tree(BATCH), **LAYERS.get(name, {"heads": extra_cases.HEADS}))
    extra_cases.prepared(layer, options)
    wrapper = layer.planned(kernel, **options)
    poison(wrapper._executor)
    out, lse = wrapper.run(**layer.tensors, extras=extras, return_lse=True)
    if checks and name in LAYERS:
        layer.check(out)
    elif checks:
        extra_cases.check(layer, out, lse, extras)
    return out


def cache_written(checks: bool) -> torch.Tensor:
    """A KV cache after 40 tokens, each tenth without a slot, were written to it."""
    heads, dim, block_size, blocks = 8, 128, 16, 4
    torch.manual_seed(0)
    key, value = torch.randn(2, 40, heads, dim, device="cuda", dtype=torch.bfloat16)
    value[:, :, ::3] = torch.tensor([torch.nan, torch.inf], device="cuda").repeat(20)[:, None, None]
    slots = torch.randperm(blocks * block_size, device="cuda")[: len(key)]
    slots[::10] = -1
    cache = torch.zeros(blocks, block_size, heads, 2 * dim, device="cuda", dtype=key.dtype)
    write = CacheWrite.of(AttentionConfig(heads, heads, dim, block_size))
    assert write.write(key, value, *cache.split(dim, -1), slots)
    if checks:
        kept = slots >= 0
        rows = torch.cat([key, torch.nan_to_num(value)], -1)[kept]
        assert torch.equal(cache.flatten(0, 1)[slots[kept]], rows)
        assert int(cache.any(-1).any(-1).sum()) == int(kept.sum())
    return cache


def launch(path: Path, part: int, parts: int) -> int:
    """Launch a part of all: keep the output in ``path``, or compare it with what is there."""
    first = not path.exists()
    before = {} if first else dict(np.load(path))
    found = {}
    for kernel, name in variants()[part::parts]:
        key = f"{kernel}, {name}"
        found[key] = launched(kernel, name, first).cpu().view(torch.int16).numpy()
        print(f"launched {key}", flush=True)
        if not first and not np.array_equal(found[key], before[key]):
            print(f"other bits: {key}", flush=True)
    if first:
        np.savez(path, **found)
    return 0


def started(folder: Path, label: str, prefix: list[str], parts: int) -> list[Started]:
    """Start processes that launch everything together."""
    variables = {**environment(), "PYTHONUNBUFFERED": "1"}
    if label == "memcheck":
        # each tensor is an allocation of its own, so that a step past its end is seen
        variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    found = []
    for part in range(parts):
        bits, log = folder / f"{part}.npz", folder / f"{label}-{part}.log"
        own = ["--launch", str(bits), "--part", str(part), "--parts", str(parts)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*prefix, *module_command(PROGRAM, *own)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,  # so that what the tool starts can be ended with it
            )
        found.append((process, log))
    return found


def ended(running: list[Started], deadline: float) -> tuple[str, list[int | None]]:
    """What processes wrote, and their statuses: None where their time was up."""
    statuses: list[int | None] = []
    for process, _ in running:
        try:
            statuses.append(process.wait(max(1.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            statuses.append(None)
    return "\n".join(log.read_text(errors="replace") for _, log in running), statuses


def judge(
    tool: str, text: str, statuses: list[int | None], seconds: float, expected: int
) -> dict[str, Any]:
    """What a tool said."""
    launches = len(re.findall(r"^launched ", text, re.MULTILINE))
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text)
    said = [int(n) for line in summary for n in re.findall(r"\d+(?= (?:errors?|hazards?))", line)]
    found = [line for line in text.splitlines() if line.startswith("other bits")]
    races, known = reports(text), {"dispatch": 0, "handover": 0}
    pairs = [{("Write", written), ("Read", read)} for written, read in handovers()]
    control = any(p in pairs and "sanitize_control" in str(p) for _, p in races)
    for lines, places in races:
        if {place for _, place in places} <= dispatches():
            known["dispatch"] += 1
        elif places in pairs and control:
            known["handover"] += 1
        else:
            found += lines
    if (tool != "racecheck" and any(said)) or len(summary) != len(statuses):
        found += [line for line in text.splitlines() if line.startswith("=========")][:40]
    if len(summary) != len(statuses):
        found.append(f"{len(summary)} summaries of {len(statuses)} processes")
    shown = re.findall(r"RACECHECK SUMMARY: (\d+) hazards? displayed", text)
    if sum(map(int, shown)) != len(races):
        found.append(f"{len(races)} reports were read, of {shown} that racecheck displayed")
    if launches != expected or any(s != 0 for s in statuses):
        found.append(f"{launches} of {expected} launches, statuses {statuses} (None: time was up)")
    return {
        "tool": tool,
        "launches": launches,
        "seconds": round(seconds, 1),
        "summary": sorted(set(summary)),
        "of_dispatch": known["dispatch"],
        "of_handovers": known["handover"],
        "wrong": found,
    }


def main() -> int:
    parser = make_parser(PROGRAM, __doc__)
    parser.add_argument("--tools", nargs="+", choices=[*TOOLS, "initcheck"], default=list(TOOLS))
    parser.add_argument("--seconds", type=float, default=120, help="for all tools, which share it")
    parser.add_argument("--parts", type=int, default=8, help="processes for each tool")
    add_out(parser)
    parser.add_argument("--launch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.launch:
        return launch(args.launch, args.part, args.parts)
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:{PLACES}")
    if sanitizer is None or not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU and compute-sanitizer, of the CUDA toolkit")
    expected = len(variants())
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), time.monotonic()
        text, statuses = ended(started(folder, "first", [], args.parts), began + 240)
        if any(s != 0 for s in statuses):
            print(text)
            return 1
        print(f"{expected} launches, {time.monotonic() - began:.0f} s without a tool", flush=True)
        began = time.monotonic()
        running = {
            tool: started(folder, tool, [sanitizer, "--tool", tool], args.parts)
            for tool in args.tools
        }
        rows = []
        for tool, processes in running.items():
            text, statuses = ended(processes, began + args.seconds)
            row = judge(tool, text, statuses, time.monotonic() - began, expected)
            rows.append(row)
            print(f"{tool}: {row['launches']} launches, {row['seconds']:.0f} s, {row['summary']}")
            print(*row["wrong"], sep="\n", flush=True)
    command = recorded_command(PROGRAM)
    write(args.out, {"command": command, "device": gpu(), "versions": versions(), "rows": rows})
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
