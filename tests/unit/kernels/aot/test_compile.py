"""Every kernel compiles, and fits, under every Triton that vLLM installs, without a GPU.

``make test`` takes a share: the installed Triton on the commonest variants, and every other Triton
on enough variants to show a changed name. ``make kernels`` takes all, and writes the resources of
each binary to ``benchmarks/published/kernel_resources.json``, from which
``benchmarks/published/kernel_resources.md`` is written.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import triton

from tests.support import tritons
from tests.support.compile_matrix import CAPABILITIES

ALL = bool(os.environ.get("PREFIXSHARE_ALL_KERNELS"))
ROOT = Path(__file__).parents[4]
RESULTS = ROOT / "benchmarks" / "published" / "kernel_resources.json"
PAGE = ROOT / "docs" / "notes" / "portable-kernel.md"
INSTALLED = triton.__version__
#: Triton -> pairs of variants and compute capabilities to compile
SHARE = {version: [("few", ("9.0",))] for version in tritons.RELEASES}
SHARE[INSTALLED] = [("few", ("8.0", "9.0", "12.0"))]
#: Tritons and compute capabilities for layers with extras
EXTRAS = [*product(tritons.RELEASES, CAPABILITIES)] if ALL else [
    (INSTALLED, "8.0"), (INSTALLED, "9.0"), ("3.8.0", "9.0"),
]  # fmt: skip


def compiled(version: str, variants: str, *options: str) -> list[dict]:
    done = tritons.run(
        version, "-m", "tests.support.compile_matrix", "--variants", variants, *options,
        timeout=6 * 3600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def keep_resources(version: str, rows: list[dict]) -> list[dict]:
    """Replace the published resources of one Triton. Each binary is written once: processes that
    compile at the same time may compile the same binary.
    """
    uses = ("registers", "spilled", "shared")
    known = {tuple(v for k, v in row.items() if k not in uses): row for row in rows}
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    kept = [row for row in kept if row["triton"] != version] + list(known.values())
    lines = ",\n".join(json.dumps(row) for row in sorted(kept, key=lambda row: row["triton"]))
    RESULTS.write_text(f"[\n{lines}\n]\n")
    return rows


@pytest.mark.skipif(ALL, reason="make kernels compiles all of it")
@pytest.mark.parametrize("version", tritons.RELEASES)
def test_the_commonest_variants_compile_and_fit(version):
    for variants, capabilities in SHARE[version]:
        rows = compiled(version, variants, "--capability", *capabilities)
        assert {row["triton"] for row in rows} == {version}
        assert {(row["kernel"], row["capability"]) for row in rows} >= {
            ("hopper", "9.0"),
            *((kernel, c) for kernel in ("portable", "merge_states") for c in capabilities),
        }
        blackwell = [r for r in rows if (r["kernel"], r["capability"]) == ("portable", "12.0")]
        assert not any(row["spilled"] for row in blackwell), "see QTile.hoist"


def test_the_kernels_that_return_the_log_sum_exp_compile_and_fit():
    rows = compiled(INSTALLED, "few", "--capability", "9.0", "--lse")
    assert {row["kernel"] for row in rows} == {"hopper", "portable", "merge_states"}


@pytest.mark.parametrize("version", tritons.RELEASES if ALL else [INSTALLED])
def test_the_cache_write_compiles_and_moves_16_bytes_at_once(version):
    rows = compiled(version, "cache-write")
    assert {row["capability"] for row in rows} == set(CAPABILITIES)
    for row in rows:  # K and V are read and written; the slot is one number
        assert (row["wide"], row["accesses"], row["spilled"]) == (4, 5, 0), row
        assert row["starts_next"] == (float(row["capability"]) >= 9.0)


@pytest.mark.parametrize(("version", "capability"), EXTRAS)
def test_the_kernels_of_layers_with_extras_compile_and_fit(version, capability):
    rows = compiled(version, "extras" if ALL else "few-extras", "--capability", capability)
    kernels = {row["kernel"] for row in rows}
    on_hopper = {"hopper", "mla_hopper"} if capability == "9.0" else set()
    assert kernels == {"portable", "merge_states", *on_hopper}


@pytest.mark.skipif(not ALL, reason="hours of compiling: make kernels")
@pytest.mark.parametrize("version", tritons.RELEASES)
def test_every_variant_compiles_and_fits(version):
    parts = os.cpu_count() or 1
    with ThreadPoolExecutor(parts) as pool:
        found = pool.map(lambda i: compiled(version, "all", "--part", f"{i}/{parts}"), range(parts))
        rows = keep_resources(version, [row for part in found for row in part])
    assert {row["capability"] for row in rows} == set(CAPABILITIES)


def test_the_page_lists_every_token_tree_that_spills_more_than_under_the_first_triton():
    spilled: dict[tuple[str, str, int], dict[str, int]] = {}
    for row in json.loads(RESULTS.read_text()):
        if row["kernel"] == "portable" and row["tree"]:
            heads = "{}:{}".format(*row["heads"])
            of = spilled.setdefault((row["capability"], heads, row["head_dim"]), {})
            of[row["triton"]] = row["spilled"]
    first, *later = tritons.RELEASES
    more = {of: used for of, used in spilled.items() if any(used[v] > used[first] for v in later)}
    listed = {}
    rows = PAGE.read_text().split("| in the loop |")[1].split("\n\n")[0].splitlines()[2:]
    for row in rows:
        gpu, heads, dims, *bytes_, _ = (cell.strip() for cell in row.strip("|").split("|"))
        for dim in dims.split(", "):
            listed[gpu, heads, int(dim)] = [int(b) for b in bytes_]
    assert listed == {of: [used[v] for v in tritons.RELEASES] for of, used in more.items()}


@pytest.mark.parametrize("version", [v for v in tritons.RELEASES if v != INSTALLED])
def test_the_interpreter_of_another_triton(version):
    names = (
        "test_cache_write",
        "portable/test_portable_extras",
        "hopper/test_hopper_source",
        "test_merge_states",
        "test_mla_kernel",
        "portable/test_partial_attention",
        "portable/test_portable_windows",
    )
    tests = [f"tests/unit/kernels/{name}.py" for name in names]
    few = (
        "test_matches_float64 and not 420 or every_head_shape and 96 or two_steps and 80"
        " or sinks_beyond or 1_700 or of_the_hopper_kernel or window_with_extras"
    )
    some = [] if ALL else ["-k", few]
    done = tritons.run(version, "-m", "pytest", "-v", *some, *tests, timeout=3600)
    assert done.returncode == 0, done.stdout[-3000:]
    for test in tests:
        assert f"{test}::" in done.stdout, "some of each"
