"""Agents with a long tool prompt, over ``vllm serve`` and its OpenAI API.

Every agent has its own task; all agents begin with the same description of the tools. An agent asks
the model for a tool call, runs the tool, adds the result to the conversation and asks for the
answer. The agents run at the same time, so every decode step has many requests with one prefix. The
server constrains calls to the form ``tool("argument")``.

    python examples/agent_loop.py
    python examples/agent_loop.py --base-url http://127.0.0.1:8000    a server that runs already

The KV tokens come from the server's ``/metrics``.
"""

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import common  # in this folder

from vllm_prefixshare import PrefixShareError

#: Seconds that a server may take to start.
PATIENCE = 900
KV_TOKENS = "vllm_prefixshare_kv_tokens"


class Tool(NamedTuple):
    """A function that agents can call. about: description in the prompt. example: an argument, and
    the result.
    """

    about: str
    call: Callable[[str], str]
    example: str


HOURS = {"monday": "closed", "thursday": "10 to 21"}
PRICES = {"adult": 12, "child": 5, "family": 28, "student": 8, "ferry": 3, "tour": 4}
HEIGHTS = {"lighthouse": "38 metres", "gallery": "34 metres", "main house": "17 metres"}
FOUNDED = {"museum": "1952", "lighthouse": "1874", "main house": "1880", "marigold": "1861"}


def look_up(table: dict[str, Any]) -> Callable[[str], str]:
    """A tool that looks up its argument in a table."""
    return lambda key: str(table.get(key.strip().lower(), "not known"))


TOOLS = {
    "opening_hours": Tool(
        "The hours at which the museum is open on a day of the week. The argument is the English "
        "name of the day. The result is two hours of the day from 0 to 24, or the word closed. "
        "Holidays are not known to it: on 24 December and 1 January the museum is closed whatever "
        "it says.",
        lambda day: HOURS.get(day.strip().lower(), "10 to 18"),
        "sunday",
    ),
    "price": Tool(
        "The price in euros of a ticket or an extra. The argument is one of adult, child, family, "
        "student, ferry, tour. The result is a whole number of euros for one person, or for two "
        "adults with up to four children if it is a family ticket. Children under six years of "
        "age pay nothing, which it does not say.",
        look_up(PRICES),
        "adult",
    ),
    "height": Tool(
        "The height of a building above the ground. The argument is one of lighthouse, gallery, "
        "main house. The result is in metres. The height of the lighthouse is that of its roof, "
        "and the gallery is four metres lower; visitors may go up to the gallery only.",
        look_up(HEIGHTS),
        "gallery",
    ),
    "year": Tool(
        "The year in which something was built or founded. The argument is one of museum, "
        "lighthouse, main house, marigold. The result is a year. For the Marigold, the oldest "
        "ship, it is the year in which she was launched, not that in which she was raised from "
        "the harbour.",
        look_up(FOUNDED),
        "museum",
    ),
    "next_bus": Tool(
        "The minutes until the next bus from the museum to the station. The argument is the "
        "minute of the hour, from 0 to 59. Buses leave every 15 minutes from the full hour on. "
        "The ride takes 12 minutes, which have to be added for the time of arrival.",
        lambda minute: str(-int(minute) % 15) if minute.strip().isdecimal() else "not known",
        "50",
    ),
}
TASKS = (
    ("How high is the lighthouse?", "38"),
    ("What does a ticket for an adult cost?", "12"),
    ("When was the museum founded?", "1952"),
    ("When is the museum open on thursday?", "21"),
    ("What does a ticket for a child cost?", "5"),
    ("When was the lighthouse built?", "1874"),
    ("Is the museum open on monday?", "closed"),
    ("What does the ferry cost?", "3"),
)


def tool_prompt() -> str:
    """The system prompt of all agents."""
    described = "\n\n".join(
        f'{name}("...")\n{tool.about}\nExample: {name}("{tool.example}") gives '
        f'"{tool.call(tool.example)}".'
        for name, tool in TOOLS.items()
    )
    return (
        "You answer questions of visitors of a museum. You know nothing by yourself: for each "
        "question call one of the tools below with one argument in quotation marks, wait for its "
        "result, then answer in one short sentence that has the result in it.\n\n"
        f"{described}"
    )


#: A call: the pattern to which the server constrains the output, and by which the call is read.
CALL = rf'({"|".join(TOOLS)})\("([a-z0-9 ]{{1,16}})"\)'


class Turn(NamedTuple):
    """One answer of the model."""

    token_ids: list[int]
    text: str


def run_agent(base_url: str, args: argparse.Namespace, task: str) -> list[Turn]:
    """Run both turns of an agent: the call and the answer."""
    import openai

    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", timeout=600, max_retries=0)
    model = client.models.list().data[0].id
    messages: list[Any] = [
        {"role": "system", "content": tool_prompt()},
        {"role": "user", "content": task},
    ]

    def ask(**options: Any) -> Turn:
        body = {"return_token_ids": True, **options}
        reply = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=args.max_tokens,
            temperature=0,
            extra_body=body,
        )
        choice = reply.choices[0]
        messages.append({"role": "assistant", "content": choice.message.content})
        return Turn(list(choice.token_ids or []), choice.message.content or "")

    call = ask(structured_outputs={"regex": CALL})
    found = re.fullmatch(CALL, call.text)
    result = TOOLS[found[1]].call(found[2]) if found else "not a call"
    messages.append({"role": "user", "content": f'The result is "{result}". {task}'})
    return [call, ask()]


def work(base_url: str, args: argparse.Namespace) -> tuple[list[Turn], list[list[Turn]]]:
    """Run all agents at the same time."""
    tasks = [TASKS[i % len(TASKS)][0] for i in range(args.agents)]
    with ThreadPoolExecutor(args.agents) as pool:
        agents = list(pool.map(lambda task: run_agent(base_url, args, task), tasks))
    return [turn for agent in agents for turn in agent], agents


class Server:
    """A ``vllm serve`` that this example starts, or, with ``args.base_url``, a server that runs
    already.
    """

    def __init__(self, args: argparse.Namespace, backend: str) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._args, self._backend = args, backend
        if args.base_url:
            self._url = args.base_url.rstrip("/").removesuffix("/v1")
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        script = Path(sys.executable).with_name("vllm")
        vllm = [script] if script.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
        command = [
            *vllm, "serve", args.model, "--host", "127.0.0.1", "--port", port,
            "--max-model-len", args.max_model_len, "--max-num-seqs", args.agents,
            "--dtype", args.dtype,
        ]  # fmt: skip
        if args.block_size is not None:
            command += ["--block-size", args.block_size]
        if common.on_cpu():
            command += ["--enforce-eager", "--max-num-batched-tokens", 512]
        if backend == common.OURS:
            command += ["--attention-backend", "PREFIX_SHARE"]
        environment = {**common.ENVIRONMENT, **os.environ, "VLLM_PREFIXSHARE_SHARE": args.share}
        with args.log.open("ab") as log:
            self._process = subprocess.Popen(
                list(map(str, command)), env=environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        """Wait until the server answers.

        Raises:
            PrefixShareError: no server answers at ``args.base_url``, or the server has ended.
        """
        until = time.monotonic() + PATIENCE
        while True:
            try:
                urllib.request.urlopen(f"{self._url}/health", timeout=5).close()
                return
            except (OSError, ValueError) as e:
                reason = getattr(e, "reason", e)
            if self._process is None:
                raise PrefixShareError(f"no server answers at {self._url} ({reason}).")
            if self._process.poll() is not None or time.monotonic() > until:
                raise PrefixShareError(f"the server did not start; see {self._args.log}.")
            time.sleep(0.5)

    def run(self, work: Any, args: argparse.Namespace) -> common.Pass:
        """Run all agents once."""
        self._signal(signal.SIGCONT)
        before = self._settled()
        began = time.perf_counter()
        completions, shown = work(self._url, args)
        seconds = time.perf_counter() - began
        after = self._settled()
        grown = {name: after[name] - before.get(name, 0) for name in after}
        tokens = grown.get("vllm:inter_token_latency_seconds_count", 0)
        read, saved = (
            grown.get(f"vllm_prefixshare_kv_tokens_{x}_total") for x in ("read", "saved")
        )
        if self._backend == common.OURS and read is None:
            raise PrefixShareError(f"the server at {self._url} does not run with PREFIX_SHARE.")
        return common.Pass(
            tokens=[tuple(turn.token_ids) for turn in completions],
            gaps=[() for _ in completions],
            shown=shown,
            seconds=seconds,
            ms_per_token=(
                grown["vllm:inter_token_latency_seconds_sum"] / tokens * 1e3 if tokens else None
            ),
            stats={} if read is None else {"kv_tokens_read": read, "kv_tokens_stock": read + saved},
            dtype=args.dtype,
            note=common.note() if self._process else "",
        )

    def pause(self) -> None:
        """Stop the server until the next pass."""
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the server."""
        if self._process is None:
            return
        self._signal(signal.SIGCONT)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)  # the server leads a process group

    def _settled(self) -> dict[str, float]:
        """The counters of ``/metrics``, once they include the whole pass: the backend's counters
        are up to a second old.
        """
        found = self._metrics()
        for _ in range(20):
            time.sleep(1.2)
            before, found = found, self._metrics()
            if before == found:
                break
        return found

    def _metrics(self) -> dict[str, float]:
        from prometheus_client.parser import text_string_to_metric_families

        with urllib.request.urlopen(f"{self._url}/metrics", timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        found: dict[str, float] = {}
        for family in families:
            for sample in family.samples:
                if sample.name.endswith(("_total", "_sum", "_count")):
                    name = sample.name
                    if name.startswith((KV_TOKENS, "vllm:inter_token_latency")):
                        found[name] = found.get(name, 0) + sample.value
        return found


def show_agents(agents: list[list[Turn]]) -> None:
    """Print a line for each agent, and how many answers have the tool's result."""
    print()
    right = 0
    for i, (call, answer) in enumerate(agents):
        task, expected = TASKS[i % len(TASKS)]
        ok = expected in answer.text
        right += ok
        says = " ".join(answer.text.split())
        print(f"{task}\n    {call.text} -> {says}{'' if ok else '   (wrong)'}")
    print(f"\n{right} of {len(agents)} agents found the answer")


def main() -> int:
    """Run the example; the exit status."""
    parser = common.options(__doc__, max_model_len=2048, block_size=32, pairs=3)
    parser.add_argument("--agents", type=int, default=8, help="agents that run at the same time")
    parser.add_argument("--max-tokens", type=int, default=16, help="length of a turn")
    parser.add_argument("--base-url", help="address of a running server with PREFIX_SHARE")
    args = parser.parse_args()
    common.at_least(args, 1, "agents", "max_tokens")
    if args.base_url:
        if not re.match(r"https?://", args.base_url):
            raise PrefixShareError(
                f"--base-url {args.base_url} must begin with http:// or https://."
            )
        args.compare, args.dtype = False, args.dtype or "bfloat16"
    common.check_options(args)
    args.dtype = args.dtype or common.default_dtype()
    found = common.compare(args, work, Server)
    show_agents(found.first[common.OURS].shown)
    return common.show_gain(found)


if __name__ == "__main__":
    common.run_example(main)
