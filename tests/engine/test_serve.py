"""``vllm serve`` with VLLM_ATTENTION_BACKEND=PREFIX_SHARE, driven by HTTP clients."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from vllm_prefixshare.testing.engine import DEFAULT_ENVIRONMENT

from .conftest import DOCUMENT

pytestmark = pytest.mark.engine

VLLM = Path(sys.executable).with_name("vllm")
ENVIRONMENT = {
    **os.environ,
    **DEFAULT_ENVIRONMENT,
    "VLLM_ATTENTION_BACKEND": "PREFIX_SHARE",
    "VLLM_PREFIXSHARE_SHARE": "always",
    "VLLM_SERVER_DEV_MODE": "1",  # for /collective_rpc
}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [
        str(VLLM), "serve", str(model), "--host", "127.0.0.1", "--port", str(port),
        "--served-model-name", "smol", "--max-model-len", "3072", "--max-num-seqs", "8",
        "--enforce-eager",
    ]  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=out, stderr=out)
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(300):
                if process.poll() is not None:
                    pytest.fail(f"the server ended:\n{log.read_text()[-3000:]}")
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=2).close()
                    break
                except OSError:
                    time.sleep(1)
            else:
                pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}")
            yield url
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def stats(url: str, reset: bool = False) -> dict[str, float]:
    body = json.dumps({"method": "prefix_share_stats", "args": [reset]}).encode()
    request = urllib.request.Request(
        f"{url}/collective_rpc", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["results"][0]


def test_streams_share_the_document_and_one_can_be_aborted(server):
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", timeout=300)
    prompt = f"Document:\n\n{DOCUMENT}\n\nQuestion: "
    client.completions.create(model="smol", prompt=prompt, max_tokens=1)
    stats(server, reset=True)
    texts: dict[int, str] = {}

    def ask(i: int) -> None:
        stream = client.completions.create(
            model="smol",
            prompt=f"{prompt}{i}. What is a work tile?\nAnswer:",
            max_tokens=24,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        parts = []
        for n, chunk in enumerate(stream):
            parts.append(chunk.choices[0].text)
            if i == 0 and n == 5:
                stream.close()  # the client goes away in the middle of its answer
                break
        texts[i] = "".join(parts)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 5
    assert all(len(text) > 20 for i, text in texts.items() if i)
    counted = stats(server)
    assert counted["shared_steps"] > 10
    assert counted["kv_tokens_stock"] > 2 * counted["kv_tokens_read"]
    assert counted["plans"] < counted["decode_steps"]

    # the server goes on, and answers as it did in the crowd
    again = client.completions.create(
        model="smol", prompt=f"{prompt}1. What is a work tile?\nAnswer:", max_tokens=24,
        temperature=0, extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert again.choices[0].text[:10] == texts[1][:10]


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("VLLM_ATTENTION_BACKEND", "FASTEST", "'FASTEST' is not an attention backend"),
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
        [str(VLLM), "serve", str(model), "--port", str(free_port()), "--enforce-eager"],
        env={**ENVIRONMENT, variable: value},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
