"""README's script and the minimal examples run as pasted into a file, with the embedded model.

The name of the embedded model on the Hugging Face Hub is found in a hub cache that holds it, so
that no line of a script changes.
"""

import os
import re
import sys
import urllib.request
from pathlib import Path

import pytest

from examples.embedded_model import embedded_model_path
from tests.support.documentation import ROOT, blocks_of
from tests.support.engine import DEFAULT_ENVIRONMENT, ONE_PROCESS
from tests.support.processes import run
from tests.support.serving import serving

MINIMAL = ROOT / "examples" / "minimal"
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
#: README's script compiles the model, as vLLM does by default, for a minute. The others differ in
#: what they ask and not in the model: PyTorch runs it as it is written.
NOT_COMPILED = {"TORCH_COMPILE_DISABLE": "1"}
(README_SCRIPT,) = (b.code for b in blocks_of(ROOT / "README.md") if b.language == "python")


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    hub = tmp_path_factory.mktemp("hub")
    model = hub / f"models--{NAME.replace('/', '--')}"
    for folder in ("refs", "snapshots"):
        (model / folder).mkdir(parents=True)
    (model / "refs" / "main").write_text("embedded")
    (model / "snapshots" / "embedded").symlink_to(embedded_model_path())
    return {**os.environ, **DEFAULT_ENVIRONMENT, "HF_HUB_CACHE": str(hub)}


def run_pasted(code: str, folder: Path, environment: dict[str, str]) -> str:
    """Run a script from a new file; return what it prints itself."""
    script = folder / "pasted.py"
    script.write_text(code)
    printed = run([sys.executable, script], cwd=folder, env=environment).stdout
    print(printed)
    return printed


def share_factor(printed: str) -> float:
    return float(re.findall(r"^share factor: ([\d.]+)$", printed, re.M)[0])


def test_readme_shows_a_minimal_example():
    _, _, code = (MINIMAL / "document_qa.py").read_text().partition("\n\n")
    assert code == README_SCRIPT


@pytest.mark.parametrize("path", sorted(MINIMAL.glob("*.py")), ids=lambda p: p.stem)
def test_a_minimal_example_needs_vllm_alone(path):
    """No helper module, and a screenful at most."""
    code = path.read_text()
    modules = set(re.findall(r"^(?:from|import) (\w+)", code, re.M))
    assert modules <= {"vllm", "openai", "concurrent"}
    _, _, body = code.partition('"""\n\n')
    assert len([line for line in body.splitlines() if line]) <= 20


def test_examples_import_nothing_from_tests_or_benchmarks():
    for path in (ROOT / "examples").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) (tests|benchmarks)\b", path.read_text(), re.M), (
            path
        )


@pytest.mark.engine
def test_readmes_script_runs_as_pasted(environment, tmp_path):
    printed = run_pasted(README_SCRIPT, tmp_path, environment)
    (output,) = (b.code for b in blocks_of(ROOT / "README.md") if b.language == "text")
    assert "1874" in printed and "1874" in output
    assert share_factor(printed) > 2
    assert share_factor(output) > 2


@pytest.mark.engine
def test_samples_share_their_prompt(environment, tmp_path):
    code = (MINIMAL / "samples.py").read_text()
    printed = run_pasted(code, tmp_path, {**environment, **ONE_PROCESS, **NOT_COMPILED})
    assert len(re.findall(r"^16 samples, the first: ", printed, re.M)) == 2
    assert share_factor(printed) > 2


@pytest.mark.engine
def test_beams_are_printed_best_first(environment, tmp_path):
    code = (MINIMAL / "beam_search.py").read_text()
    printed = run_pasted(code, tmp_path, {**environment, **ONE_PROCESS, **NOT_COMPILED})
    scores = [float(score) for score in re.findall(r"^(-\d+\.\d\d) ", printed, re.M)]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)


@pytest.mark.engine
def test_a_client_asks_the_server_of_its_docstring(environment, tmp_path):
    code = (MINIMAL / "client.py").read_text()
    ((model, options),) = re.findall(r"^    vllm serve (\S+) (.+)$", code, re.M)
    log = tmp_path / "log"
    started = serving(model, log, {**environment, **NOT_COMPILED}, *options.split(), patience=600)
    with started as url:
        printed = run_pasted(code.replace("http://localhost:8000", url), tmp_path, environment)
        saved = counter(url, "vllm_prefixshare_kv_tokens_saved_total")
    assert re.search(r"^When was the lighthouse built\? \S", printed, re.M)
    assert saved > 0


def counter(url: str, name: str) -> float:
    """The sum of a counter over the processes of a server."""
    metrics = urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode()
    return sum(float(v) for v in re.findall(rf"^{name}\S* (\S+)$", metrics, re.M))
