"""docs/whole-call.md lists the parts, rows, workloads and reasons of the code."""

import re

from benchmarks.whole_call import rows, workloads
from tests.support.documentation import ROOT
from tests.support.package_messages import mixed_graph_reasons
from vllm_prefixshare.settings import PROMPT_PARTS

PAGE = (ROOT / "docs" / "whole-call.md").read_text()


def names_in(header: str) -> list[str]:
    """The names in the first column of the table with this header."""
    lines = PAGE[PAGE.index(f"\n| {header} |") + 1 :].splitlines()[2:]
    rows = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [name for row in rows for name in re.findall(r"`(.+?)`", row.split(" | ")[0])]


def test_parts_are_those_of_the_code():
    assert names_in("part") == list(PROMPT_PARTS)


def test_reasons_for_piecewise_graphs_are_those_of_the_code():
    assert set(names_in("reason in the log")) == mixed_graph_reasons()


def test_rows_and_workloads_are_those_of_the_benchmark():
    assert names_in("row") == list(rows.ALL_ROWS)
    expected = [*workloads.OFFLINE, *workloads.HOST, workloads.SERVER]
    assert sorted(names_in("workload")) == sorted(expected)
