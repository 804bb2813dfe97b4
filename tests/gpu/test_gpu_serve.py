"""``vllm serve --attention-backend PREFIX_SHARE`` on a GPU, driven over HTTP by the
``openai`` package and by ``vllm bench serve``.

    python -m pytest -m gpu tests/gpu/test_gpu_serve.py
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine import DEFAULT_ENVIRONMENT
from tests.support.gpu_engines import ENVIRONMENT, SETTINGS
from tests.support.gpu_layer import missing, on_gpu_with
from tests.support.processes import run

PACKAGES = ("vllm", "openai")
pytestmark = on_gpu_with(*PACKAGES)
if not missing(*PACKAGES):
    from tests.support.serving import NAME, VLLM, client_of, metrics_at, serving, stats, stream

#: Tokens. A step of so small a model takes less than a millisecond, and the clients start one after
#: the other: the document is long, and there are many requests, so that enough run together.
DOCUMENT = 2400
SERVER = {
    **os.environ,
    **DEFAULT_ENVIRONMENT,
    **ENVIRONMENT,
    "VLLM_SERVER_DEV_MODE": "1",  # enables /collective_rpc
}


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("serve") / "log"
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    options += ["--attention-backend", "PREFIX_SHARE"]
    with serving(model, log, SERVER, *options) as url:
        yield url


def test_streams_share_the_document_and_one_can_be_aborted(server, text):
    client = client_of(server)
    prompts = text.asking(DOCUMENT, [30, 7, 18, 44, 12, 25] * 4)
    client.completions.create(model=NAME, prompt=prompts[0][:DOCUMENT], max_tokens=1)
    stats(server, reset=True)
    texts = stream(client, prompts, tokens=600, leave_after=6)
    assert all(len(text) > 2 * len(texts[0]) > 0 for text in texts[1:])
    counted = stats(server)
    assert counted["shared_steps"] > 20, counted
    assert counted["kv_tokens_stock"] > 2 * counted["kv_tokens_read"], counted
    assert counted["plans"] < counted["decode_steps"] / 2, counted
    shown = metrics_at(server)
    for name in ("plans", "kv_tokens_read", "kv_tokens_saved", "shared_steps"):
        assert shown[f"{name}_total"] == counted[name], (name, shown, counted)

    # the server continues; the answer begins as before, later tokens may part at a tie
    again = client.completions.create(
        model=NAME, prompt=prompts[1], max_tokens=64, temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert again.choices[0].text[:10] == texts[1][:10]


def test_vllm_bench_serve_reports_no_failure(server, model, tmp_path):
    stats(server, reset=True)
    command = [
        *VLLM, "bench", "serve", "--backend", "openai", "--base-url", server,
        "--model", NAME, "--tokenizer", str(model), "--dataset-name", "prefix_repetition",
        "--prefix-repetition-prefix-len", "1024", "--prefix-repetition-suffix-len", "64",
        "--prefix-repetition-num-prefixes", "2", "--prefix-repetition-output-len", "48",
        "--num-prompts", "24", "--ignore-eos", "--temperature", "0", "--disable-tqdm",
        "--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json",
    ]  # fmt: skip
    run(command, env=SERVER, timeout=300)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == 24
    assert result["failed"] == 0
    assert result["total_output_tokens"] == 24 * 48
    assert result["mean_tpot_ms"] > 0
    counted = stats(server)
    assert counted["shared_steps"] > 20
    assert counted["kv_tokens_stock"] > 2 * counted["kv_tokens_read"]
