"""``vllm serve`` for tests: starts a server, sends requests as clients do, reads the backend's
counters.
"""

import ctypes
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.support.processes import alive, tree
from vllm_prefixshare.vllm_plugin.observability.metrics import PREFIX

_SCRIPT = Path(sys.executable).with_name("vllm")
#: The command ``vllm``, or the module behind it where no script is installed.
VLLM = [str(_SCRIPT)] if _SCRIPT.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
#: The model's name on the server.
NAME = "small"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def serving(
    model: Path, log: Path, environment: dict[str, str], *arguments: str, patience: int = 300
) -> Iterator[str]:
    """The address of a server of ``model``, which ends on leaving. Arguments as for
    ``server_process``.
    """
    with server_process(model, log, environment, *arguments, patience=patience) as (url, _):
        yield url


@contextmanager
def server_process(
    model: Path,
    log: Path,
    environment: dict[str, str],
    *arguments: str,
    patience: int = 300,
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address of a server of ``model``, and its process. The server and all that it has started
    end on leaving, and when this process is killed.

    Args:
        log: file for the server's output.
        environment: the server's whole environment.
        arguments: further arguments of ``vllm serve``.
        patience: seconds within which the server must start.
    """
    port = free_port()
    command = [
        *VLLM, "serve", str(model), "--host", "127.0.0.1", "--port", str(port),
        "--served-model-name", NAME, *arguments,
    ]  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, preexec_fn=_end_with_parent
        )
        url = f"http://127.0.0.1:{port}"
        started: list[psutil.Process] = []
        try:
            _wait_for(url, process, log, patience)
            started = tree(process.pid)
            yield url, process
        finally:
            started = started or tree(process.pid)
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for left in filter(alive, started):
                left.kill()


def _end_with_parent() -> None:
    """Runs in the child before it becomes a server: terminate the server when its parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _wait_for(url: str, process: subprocess.Popen, log: Path, patience: int) -> None:
    for _ in range(patience):
        if process.poll() is not None:
            text = log.read_text()
            # the cause comes long before the end, where each process reports the failure of another
            errors = [line for line in text.splitlines() if " ERROR " in line]
            cause = "\n".join(errors[:80])
            pytest.fail(f"the server ended:\n{cause}\n...\n{text[-3000:]}")
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return
        except OSError:
            time.sleep(1)
    pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}")


def stats(url: str, reset: bool = False) -> dict[str, float]:
    """``BackendStats`` of the server's first worker; it must run with VLLM_SERVER_DEV_MODE=1."""
    body = json.dumps({"method": "prefix_share_stats", "args": [reset]}).encode()
    request = urllib.request.Request(
        f"{url}/collective_rpc", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["results"][0]


def metrics(url: str) -> list[Sample]:
    """Every sample on the server's ``/metrics``."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return [sample for family in families for sample in family.samples]


def metrics_at(url: str) -> dict[str, float]:
    """The backend's metrics, by name without prefix and summed over labels. Waits until
    ``/metrics`` has every step that the worker counted; a reset of the worker's counts resets both.
    """
    for _ in range(50):
        found: dict[str, float] = {}
        for sample in metrics(url):
            if sample.name.startswith(PREFIX) and not sample.name.endswith("_bucket"):
                assert sample.labels["model_name"] == NAME
                assert sample.labels.get("engine", "0") == "0"
                name = sample.name.removeprefix(PREFIX)
                found[name] = found.get(name, 0) + sample.value
        if found.get("decode_steps_total") == stats(url)["decode_steps"]:
            return found
        time.sleep(0.2)
    pytest.fail(f"/metrics has {found}, the worker {stats(url)}")


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300)


def stream(
    client: openai.OpenAI, prompts: Sequence[str | list[int]], tokens: int, leave_after: int
) -> list[str]:
    """Greedy answers to all prompts at once, streamed, with one client per prompt. The first client
    disconnects after ``leave_after`` pieces of its answer.
    """
    texts = [""] * len(prompts)
    failures: list[Exception] = []

    def ask(i: int) -> None:
        try:
            pieces = client.completions.create(
                model=NAME,
                prompt=prompts[i],
                max_tokens=tokens,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for n, chunk in enumerate(pieces, 1):
                texts[i] += chunk.choices[0].text
                if i == 0 and n == leave_after:
                    pieces.close()
                    break
        except Exception as e:  # an exception in a thread would be lost
            failures.append(e)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return texts
