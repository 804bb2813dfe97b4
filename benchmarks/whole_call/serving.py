"""``vllm serve`` under a closed loop of clients."""

import json
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.support import program
from benchmarks.whole_call.client import Load, Served
from benchmarks.whole_call.measuring import Outcome, digest
from tests.support.engine import DEFAULT_ENVIRONMENT
from tests.support.serving import NAME, server_process
from vllm_prefixshare import PrefixShareError

COMPLETIONS = "/v1/completions"
#: Requests that are answered one by one, to compare rows in batches of the same composition.
NUM_ALONE = 4
#: Seconds within which a server must start and one request must be answered.
START_SECONDS, ANSWER_SECONDS = 600, 300


@contextmanager
def server(
    model: Path,
    backend: str,
    environment: Mapping[str, str],
    settings: Mapping[str, Any],
    log: Path,
) -> Iterator[str]:
    """The address of a running server.

    Args:
        settings: engine arguments under their Python names.

    Raises:
        PrefixShareError: the server did not start.
    """
    variables = {
        **DEFAULT_ENVIRONMENT,
        **program.environment(),
        "VLLM_SERVER_DEV_MODE": "1",  # enables /collective_rpc
        **environment,
    }
    options = ["--attention-backend", backend, "--enable-prompt-tokens-details"]
    options += flags(settings)
    try:
        with server_process(model, log, variables, *options, patience=START_SECONDS) as (url, _):
            yield url
    except pytest.fail.Exception as e:
        raise PrefixShareError(f"the server did not start: {str(e)[-2000:]}") from None


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Options of ``vllm serve`` for engine arguments."""
    found = []
    for name, value in settings.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            found.append(option if value else option.replace("--", "--no-", 1))
        elif value is not None:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            found += [option, text]
    return found


def post(url: str, body: Mapping[str, Any]) -> Any:
    """The JSON answer to a request.

    Raises:
        OSError: no answer in time, or a status other than 200.
    """
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
        return json.load(answer)


def body_of(document: str, question: str, tokens: int) -> dict[str, Any]:
    """A request about a document, not streamed."""
    return {
        "model": NAME,
        "prompt": f"{document}\n\n{question}\nAnswer:",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def alone(url: str, bodies: Sequence[Mapping[str, Any]]) -> Outcome:
    """Answers to requests that are sent one after the other, with token ids."""
    began = time.perf_counter()
    answers = [post(url + COMPLETIONS, {**body, "return_token_ids": True}) for body in bodies]
    seconds = time.perf_counter() - began
    choices = [answer["choices"][0] for answer in answers]
    prompts = [choice["prompt_token_ids"] for choice in choices]
    details = [answer["usage"].get("prompt_tokens_details") or {} for answer in answers]
    return Outcome(
        seconds=seconds,
        prompt_digests=tuple(map(digest, prompts)),
        token_ids=tuple(tuple(choice["token_ids"]) for choice in choices),
        texts=tuple(choice["text"] for choice in choices),
        num_prompt_tokens=tuple(map(len, prompts)),
        num_cached_tokens=tuple(d.get("cached_tokens") or 0 for d in details),
    )


def under_load(url: str, bodies: Sequence[Mapping[str, Any]], clients: int) -> list[Served]:
    """Answers to requests that ``clients`` clients send, in the order of ``bodies``.

    Raises:
        PrefixShareError: a request failed.
    """
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    load = Load(url + COMPLETIONS, clients, [{**body, **streamed} for body in bodies])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "load.json")
        file.write_text(
            json.dumps({"url": load.url, "clients": load.clients, "bodies": load.bodies})
        )
        command = program.module_command("benchmarks.whole_call.client", str(file))
        ended = subprocess.run(command, capture_output=True, text=True, env=program.environment())
    if ended.returncode:
        raise PrefixShareError(f"the load failed: {ended.stderr.strip()[-500:]}")
    return [Served(**answer) for answer in json.loads(ended.stdout)]


def figures(answers: Sequence[Served]) -> dict[str, float]:
    """Figures of a load, in seconds, requests and tokens."""
    seconds = max(a.sent + a.total for a in answers)

    def percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
        p50, p99 = np.percentile(values or [0.0], [50, 99]).tolist()
        return {f"{name}_p50": p50, f"{name}_p99": p99}

    return {
        "seconds": seconds,
        "requests_per_second": len(answers) / seconds,
        **percentiles("latency", [a.total for a in answers]),
        **percentiles("first_token", [a.first for a in answers]),
        **percentiles("between_tokens", [gap for a in answers for gap in a.between]),
        "prompt_tokens": sum(a.num_prompt_tokens for a in answers),
        "cached_tokens": sum(a.num_cached_tokens for a in answers),
        "output_tokens": sum(a.num_tokens for a in answers),
    }
