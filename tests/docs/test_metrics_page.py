"""The query, the table and the log lines in docs/metrics.md match the code."""

import ast
import re

from tests.support.documentation import ROOT, blocks_of
from tests.support.package_messages import modules, text_of
from vllm_prefixshare.vllm_plugin.observability import stats
from vllm_prefixshare.vllm_plugin.observability.metric_sources import DecodeSteps, PromptParts

PATH = ROOT / "docs" / "metrics.md"


def test_the_query_names_metrics_of_the_table():
    listed = set(re.findall(r"^\| `(\w+)` \|", PATH.read_text(), re.M))
    (query,) = (b.code for b in blocks_of(PATH) if b.language == "promql")
    named = set(re.findall(r"vllm_prefixshare_\w+", query))
    assert named and named <= listed


def test_the_lines_of_the_log_have_the_form_of_the_code():
    (shown,) = (b.code.strip().splitlines() for b in blocks_of(PATH) if b.language == "text")
    tree = modules()["vllm_plugin/observability/metric_sources.py"]
    texts = [text_of(n.value) for n in ast.walk(tree) if isinstance(n, ast.Assign)]
    for line, start in zip(shown, ("PREFIX_SHARE: ", "Shared host work, "), strict=True):
        (form,) = (text for text in texts if text.startswith(start))
        pattern = ".+".join(map(re.escape, form.split("...")))
        assert re.fullmatch(pattern + r"\.", line)


def test_every_metric_is_in_the_table(monkeypatch):
    monkeypatch.setattr(stats.STATS, "kernels", ["native"])
    listed = set(re.findall(r"^\| `vllm_prefixshare_(\w+)` \|", PATH.read_text(), re.M))
    sources = DecodeSteps(), PromptParts("api_server")
    samples = [sample for source in sources for sample in source.samples(True)]
    suffixes = {"counter": "_total"}
    assert listed == {s.metric + suffixes.get(s.kind, "") for s in samples}
