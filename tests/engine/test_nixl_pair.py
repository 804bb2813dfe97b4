"""A prefill and a decode instance that NIXL connects, on a CPU: only the decode instance has
PREFIX_SHARE, and the handshake is checked as by default.

    pip install nixl
    python -m pytest tests/engine/test_nixl_pair.py
"""

import importlib.util
import json
import os
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.dummy_model import write_small_llama
from tests.support.engine import DEFAULT_ENVIRONMENT
from tests.support.serving import NAME, free_port, metrics, serving, stats

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs nixl"),
]

BLOCK = 32
#: A document of whole blocks, and questions that are shorter than a block.
DOCUMENT = [3 + i % 97 for i in range(10 * BLOCK)]
PROMPTS = [[*DOCUMENT, *range(5 + i, 9 + 2 * i)] for i in range(6)]
TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
BACKENDS = {"prefill": "CPU_ATTN", "decode": "PREFIX_SHARE"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The addresses of both instances."""
    folder = tmp_path_factory.mktemp("pair")
    model = write_small_llama(folder / "model", num_layers=2)
    options = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "1024"]
    options += ["--max-num-seqs", "8", "--block-size", str(BLOCK)]
    options += ["--kv-transfer-config", json.dumps(TRANSFER)]
    with ExitStack() as stack:
        # a server ends with the thread that started it
        pool = stack.enter_context(ThreadPoolExecutor(2))

        def start(role: str) -> str:
            environment = {
                **os.environ,
                **DEFAULT_ENVIRONMENT,
                "VLLM_PREFIXSHARE_SHARE": "always",
                "VLLM_PREFIXSHARE_ORDER": "prefix",
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                "VLLM_SERVER_DEV_MODE": "1",  # enables /collective_rpc
            }
            backend = ["--attention-backend", BACKENDS[role]]
            server = serving(model, folder / role, environment, *options, *backend, patience=500)
            return stack.enter_context(server)

        started = {role: pool.submit(start, role) for role in BACKENDS}
        yield {role: future.result() for role, future in started.items()}


def ask(url: str, prompt: list[int], tokens: int, **transfer: Any) -> dict[str, Any]:
    body = {
        "model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    if transfer:
        body["kv_transfer_params"] = transfer
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=200) as answer:
        return json.load(answer)


def through_both(pair: dict[str, str], prompt: list[int]) -> list[int]:
    """An answer that the prefill instance begins and the decode instance gives."""
    wanted = {"do_remote_decode": True, "do_remote_prefill": False}
    first = ask(pair["prefill"], prompt, 1, **wanted)
    where = {**first["kv_transfer_params"], "do_remote_decode": False, "do_remote_prefill": True}
    second = ask(pair["decode"], prompt, 24, **where)
    return second["choices"][0]["token_ids"]


def test_the_decode_instance_alone_has_prefix_share(pair):
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = list(pool.map(lambda prompt: through_both(pair, prompt), PROMPTS))
    expected = [ask(pair["prefill"], prompt, 24)["choices"][0]["token_ids"] for prompt in PROMPTS]
    assert found == expected
    shown = {s.name: s.value for s in metrics(pair["decode"])}
    assert shown["vllm:nixl_num_failed_transfers_total"] == 0
    assert shown["vllm:nixl_xfer_time_seconds_count"] > 0
    assert shown["vllm:external_prefix_cache_hits_total"] > len(DOCUMENT)
    counted = stats(pair["decode"])
    assert counted["decode_steps"] >= 23
    # in the order by prefix one request loads the document, and those that wait for it share it
    assert counted["shared_steps"] > 0
