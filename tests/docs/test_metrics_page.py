"""The query and the log line in docs/metrics.md match the code."""

import ast
import re

from tests.docs.pages import ROOT, blocks_of
from tests.docs.source import modules, text_of

PATH = ROOT / "docs" / "metrics.md"


def test_the_query_names_metrics_of_the_table():
    listed = set(re.findall(r"^\| `(\w+)` \|", PATH.read_text(), re.M))
    (query,) = (b.code for b in blocks_of(PATH) if b.language == "promql")
    named = set(re.findall(r"vllm_prefixshare_\w+", query))
    assert named and named <= listed


def test_the_line_of_the_log_has_the_form_of_the_code():
    (shown,) = (b.code.strip() for b in blocks_of(PATH) if b.language == "text")
    assigned = [
        n for n in ast.walk(modules()["integration/metrics.py"]) if isinstance(n, ast.Assign)
    ]
    (form,) = (text_of(n.value) for n in assigned if text_of(n.value).startswith("PREFIX_SHARE: "))
    pattern = ".+".join(map(re.escape, form.split("...")))
    assert re.fullmatch(pattern + r"\.", shown)
