"""Every kernel compiles, and fits, under every Triton that vLLM brings, without a GPU.

``make test`` takes a share of it: the installed Triton on the commonest variants, and the
others on so much that a changed name shows. ``make kernels`` takes all, and keeps what each
binary uses in ``benchmarks/published/kernel_resources.json``, from which
``docs/kernel-resources.md`` is written.
"""

import json
import os
from pathlib import Path

import pytest
import triton

from tests.support import tritons

from .compile_matrix import CAPABILITIES

ALL = bool(os.environ.get("PREFIXSHARE_ALL_KERNELS"))
RESULTS = Path(__file__).parents[2] / "benchmarks" / "published" / "kernel_resources.json"
INSTALLED = triton.__version__
#: Triton -> where to compile what, beside all of it
SHARE = {version: [("few", ("9.0",))] for version in tritons.RELEASES}
SHARE[INSTALLED] = [("few", ("8.0", "9.0", "12.0"))]


def compiled(version: str, variants: str, *options: str) -> list[dict]:
    done = tritons.run(
        version, "-m", "tests.kernels.compile_matrix", "--variants", variants, *options,
        timeout=6 * 3600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


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


@pytest.mark.skipif(not ALL, reason="hours of compiling: make kernels")
@pytest.mark.parametrize("version", tritons.RELEASES)
def test_every_variant_compiles_and_fits(version):
    rows = compiled(version, "all")
    assert {row["capability"] for row in rows} == set(CAPABILITIES)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    kept = [row for row in kept if row["triton"] != version] + rows
    lines = ",\n".join(json.dumps(row) for row in sorted(kept, key=lambda row: row["triton"]))
    RESULTS.write_text(f"[\n{lines}\n]\n")


@pytest.mark.parametrize("version", [v for v in tritons.RELEASES if v != INSTALLED])
def test_the_interpreter_of_another_triton(version):
    tests = ["tests/kernels/test_merge_states.py", "tests/kernels/test_partial_attention.py"]
    some = [] if ALL else ["-k", "test_matches_float64 and not 420 or every_head_shape and 96"]
    done = tritons.run(version, "-m", "pytest", "-q", *some, *tests, timeout=3600)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]
