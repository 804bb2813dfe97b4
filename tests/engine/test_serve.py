"""``vllm serve`` with VLLM_ATTENTION_BACKEND=PREFIX_SHARE, driven by HTTP clients."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import NAME, VLLM, client_of, free_port, serving, stats, stream
from tests.support.engine import DEFAULT_ENVIRONMENT

from .conftest import DOCUMENT

pytestmark = pytest.mark.engine

ENVIRONMENT = {
    **os.environ,
    **DEFAULT_ENVIRONMENT,
    "VLLM_ATTENTION_BACKEND": "PREFIX_SHARE",
    "VLLM_PREFIXSHARE_SHARE": "always",
    "VLLM_SERVER_DEV_MODE": "1",  # for /collective_rpc
}


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("serve") / "log"
    options = ["--max-model-len", "3072", "--max-num-seqs", "8", "--enforce-eager"]
    with serving(model, log, ENVIRONMENT, *options) as url:
        yield url


def test_streams_share_the_document_and_one_can_be_aborted(server):
    client = client_of(server)
    document = f"Document:\n\n{DOCUMENT}\n\nQuestion: "
    client.completions.create(model=NAME, prompt=document, max_tokens=1)
    stats(server, reset=True)
    prompts = [f"{document}{i}. What is a work tile?\nAnswer:" for i in range(5)]
    texts = stream(client, prompts, tokens=24, leave_after=6)
    assert all(len(text) > 20 for text in texts[1:])
    counted = stats(server)
    assert counted["shared_steps"] > 10
    assert counted["kv_tokens_stock"] > 2 * counted["kv_tokens_read"]
    assert counted["plans"] < counted["decode_steps"]

    # the server goes on, and answers as it did in the crowd
    again = client.completions.create(
        model=NAME, prompt=prompts[1], max_tokens=24, temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert again.choices[0].text[:10] == texts[1][:10]


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("VLLM_ATTENTION_BACKEND", "PREFIXSHARE", "'PREFIXSHARE' is not an attention backend"),
        ("VLLM_PREFIXSHARE_DIVIDER", "best", "divider 'best' is unknown: use one of flashforge"),
        ("VLLM_PREFIXSHARE_SPEED", "9", "VLLM_PREFIXSHARE_SPEED is not a known variable"),
        (
            "VLLM_PREFIXSHARE_COST_TABLE",
            "/nowhere.json",
            "/nowhere.json is not a usable cost table",
        ),
    ],
)
def test_a_wrong_setting_is_one_sentence_and_exit_status_2(model, variable, value, sentence):
    done = subprocess.run(
        [*VLLM, "serve", str(model), "--port", str(free_port()), "--enforce-eager"],
        env={**ENVIRONMENT, variable: value},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
