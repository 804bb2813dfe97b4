"""docs/design.md and docs/cli.md list the dividers and the cost tables of the code."""

import dataclasses
import re

from benchmarks.kernel.cost_tables import profiled
from tests.support.documentation import ROOT
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.catalog import CATALOG, Gpu
from vllm_prefixshare.kernels.cpu.torch_executor import TorchExecutor
from vllm_prefixshare.planning.costs.lookup import SHIPPED, fingerprint
from vllm_prefixshare.planning.costs.table import CostTable, Fingerprint
from vllm_prefixshare.planning.dividers.registry import DIVIDERS

DIVIDERS_PAGE = (ROOT / "docs" / "design.md").read_text()
TABLES_PAGE = (ROOT / "docs" / "cli.md").read_text().partition("## `profile`")[2]


def test_every_divider_is_described():
    listed = re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", DIVIDERS_PAGE, re.M)
    assert sorted(listed) == sorted(DIVIDERS)


def test_defaults_are_those_of_the_code():
    attention = AttentionConfig(32, 8, 128, 16)
    (on_cpu,) = re.findall(r"^\| CPU \| `(\w+)` \|$", DIVIDERS_PAGE, re.M)
    assert TorchExecutor(attention, 1).planner_config(None, "always").divider == on_cpu
    (on_gpu,) = re.findall(r"^\| GPU, either kernel \| `(\w+)` \|$", DIVIDERS_PAGE, re.M)
    h200 = Gpu((9, 0), 132, 227 << 10)
    limits = [CATALOG[name].limits(attention, 1, h200) for name in ("hopper", "portable")]
    assert {limit.divider for limit in limits} == {on_gpu}


def test_fields_of_a_table_are_explained():
    assert (
        "| H200, head_dim 64, 128 and 256 | a shipped table: of either kernel, for 16-bit and fp8 "
        "KV caches |" in TABLES_PAGE
    )
    wanted = {
        fingerprint(of.attention, of.kernel, "NVIDIA H200 x132").file_name() for of in profiled()
    }
    paths = list(SHIPPED.glob("*.json"))
    assert {path.name for path in paths} == wanted
    (fields,) = {frozenset(CostTable.load(path).to_json()) - {"format"} for path in paths}
    named = set(re.findall(r"`(\w+)`", TABLES_PAGE))
    assert fields | {field.name for field in dataclasses.fields(Fingerprint)} <= named
