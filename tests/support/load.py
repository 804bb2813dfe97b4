"""A closed loop of clients for ``vllm serve``: some read their answers to the end, some disconnect,
some send invalid requests, some send prompts that are too long.
"""

import asyncio
import contextlib
import json
import math
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

from tests.support.processes import Held, alive, held_by, tree
from vllm_prefixshare.vllm_plugin.observability.metrics import PREFIX

#: Seconds within which an answer must be complete; far more than a working server needs.
PATIENCE = 180


@dataclass(frozen=True, slots=True)
class Nonsense:
    """A request that no server can serve.

    body: bytes are sent unchanged, other values as JSON.
    """

    path: str
    body: bytes | dict[str, Any] | list[Any]
    method: str = "POST"


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def nonsense(model: str, max_len: int) -> dict[str, Nonsense]:
    """Invalid requests by name: malformed bodies, wrong values, prompts longer than ``max_len``
    tokens.
    """
    good = {"model": model, "prompt": [5, 6, 7], "max_tokens": 4}

    def bad(**changed: Any) -> Nonsense:
        return Nonsense(COMPLETIONS, {**good, **changed})

    def said(*messages: Any) -> Nonsense:
        return Nonsense(CHAT, {"model": model, "messages": list(messages), "max_tokens": 4})

    return {
        "no body": Nonsense(COMPLETIONS, b""),
        "half a body": Nonsense(COMPLETIONS, json.dumps(good).encode()[:-9]),
        "no text": Nonsense(COMPLETIONS, b"\xff\xfe\x00\x80" * 50),
        "a list": Nonsense(COMPLETIONS, [1, 2]),
        "deep": Nonsense(COMPLETIONS, b"[" * 50_000),
        "a number as prompt": bad(prompt=7),
        "no prompt": Nonsense(COMPLETIONS, {"model": model}),
        "an empty prompt": bad(prompt=[]),
        "empty prompts": bad(prompt=[[]]),
        "no such token": bad(prompt=[10**9]),
        "a negative token": bad(prompt=[-1]),
        "no such model": bad(model="nobody's"),
        "negative tokens": bad(max_tokens=-1),
        "no tokens": bad(max_tokens=0),
        "a huge answer": bad(max_tokens=10**6),
        "hot": bad(temperature="hot"),
        "too hot": bad(temperature=1e9, top_p=7),
        "too many samples": bad(n=10**7),
        "too many scores": bad(logprobs=10**6),
        "a bad pattern": bad(structured_outputs={"regex": "(("}),
        "bias of no token": bad(logit_bias={"999999999": 1}),
        "an odd stop": bad(stop=[[]]),
        "a prompt one too long": bad(prompt=[5] * max_len),
        "a prompt far too long": bad(prompt=[5] * 40 * max_len),
        "a text too long": bad(prompt="word " * 20 * max_len),
        "messages too long": said({"role": "user", "content": "word " * 20 * max_len}),
        "no messages": said(),
        "nobody's message": said({"role": "nobody", "content": "x"}),
        "no such path": Nonsense("/v1/nothing", good),
        "the wrong method": Nonsense(COMPLETIONS, b"", "GET"),
    }


@dataclass
class Report:
    """Everything tried so far, with the results.

    asked: number of requests of each kind. statuses: HTTP statuses of each kind of invalid request.
    tokens: number of tokens of complete answers. wrong: the faults, in words.
    held: resources of the server's processes, with seconds since the start.
    counters: the backend's counters at the end, by their name on ``/metrics``; none for stock.
    """

    asked: Counter[str] = field(default_factory=Counter)
    statuses: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    held: list[tuple[float, Held]] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)


class Load:
    """Clients of one server.

    Args:
        url: address of the server.
        model: the model's name on the server.
        max_len: the server's ``--max-model-len``.
        text: token ids to build prompts from, longer than ``document``.
        document: number of tokens that many prompts share.
        seed: seed of all random choices.
    """

    def __init__(
        self,
        url: str,
        model: str,
        max_len: int,
        text: Sequence[int],
        document: int,
        seed: int = 0,
    ) -> None:
        self.report = Report()
        self._document = document
        self._url, self._model, self._max_len = url, model, max_len
        self._text, self._random = list(text), Random(seed)
        self._nonsense = nonsense(model, max_len)

    async def run(
        self, clients: int, pid: int, *, seconds: float = math.inf, requests: float = math.inf
    ) -> Report:
        """Keep ``clients`` requests in flight until ``requests`` were sent or ``seconds`` have
        passed. Then send every invalid request once more.

        Args:
            pid: process id of the server, whose memory is recorded every second.
        """
        began, asked = time.monotonic(), self.report.asked
        async with self._session() as session:
            watch = asyncio.create_task(self._watch(pid, began))

            async def client() -> None:
                while time.monotonic() - began < seconds and asked.total() < requests:
                    await self._one(session)

            try:
                await asyncio.gather(*(client() for _ in range(clients)))
                for name in self._nonsense:
                    await self._talk_nonsense(session, name)
                await self._comes_to_rest(session)
            finally:
                watch.cancel()
        return self.report

    async def talk_nonsense(self) -> Report:
        """Send every invalid request once."""
        async with self._session() as session:
            for name in self._nonsense:
                await self._talk_nonsense(session, name)
        return self.report

    async def in_flight(self, count: int) -> list[asyncio.Task[str]]:
        """Start answers and return their tasks. Each task ends when its connection does, with the
        reason. vLLM lets running answers finish before it ends.
        """

        async def ask(begun: asyncio.Event) -> str:
            body = {**self._prompt(), "max_tokens": 100, "stream": True}
            body["ignore_eos"] = True
            try:
                forever = aiohttp.ClientTimeout(None)  # so that endless waiting shows
                async with (
                    aiohttp.ClientSession(timeout=forever) as session,
                    session.post(self._url + COMPLETIONS, json=body) as answer,
                ):
                    async for _ in answer.content:
                        begun.set()
                return "closed"
            except aiohttp.ClientError as e:
                return type(e).__name__
            finally:
                begun.set()

        events = [asyncio.Event() for _ in range(count)]
        tasks = [asyncio.create_task(ask(event)) for event in events]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in events)), PATIENCE)
        return tasks

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE))

    def _prompt(self) -> dict[str, Any]:
        """A shared document of random length, and some tokens of the request's own."""
        shared = self._random.choice((1, self._document // 2, self._document))
        at = self._random.randrange(len(self._text) - 64)
        own = self._text[at : at + self._random.randint(1, 64)]
        return {"model": self._model, "prompt": self._text[:shared] + own, "temperature": 0}

    async def _one(self, session: aiohttp.ClientSession) -> None:
        kinds = {
            self._whole: 3,
            self._streamed: 4,
            self._chat: 1,
            self._leaves: 3,
            self._leaves_at_once: 1,
            self._any_nonsense: 2,
        }
        (kind,) = self._random.choices(list(kinds), list(kinds.values()))
        name = kind.__name__.lstrip("_").replace("_", " ")
        self.report.asked[name] += 1
        try:
            await kind(session)
        except asyncio.TimeoutError:
            self.report.wrong.append(f"{name}: no end after {PATIENCE} s")
        except aiohttp.ClientError as e:
            self.report.wrong.append(f"{name}: {type(e).__name__}: {e}")

    async def _whole(self, session: aiohttp.ClientSession) -> None:
        samples, tokens = self._random.choice((1, 1, 3)), self._random.choice((1, 8, 24))
        body = {**self._prompt(), "max_tokens": tokens, "n": samples, "ignore_eos": True}
        if samples > 1:
            body["temperature"] = 0.8
        async with session.post(self._url + COMPLETIONS, json=body) as answer:
            self._check(answer.status, await answer.json(), samples * tokens, body)

    async def _chat(self, session: aiohttp.ClientSession) -> None:
        words = " ".join(self._random.choices(("what", "is", "a", "tree", "of", "blocks"), k=9))
        body = {"model": self._model, "messages": [{"role": "user", "content": words}]}
        body |= {"max_tokens": 8, "ignore_eos": True, "temperature": 1.0}
        async with session.post(self._url + CHAT, json=body) as answer:
            self._check(answer.status, await answer.json(), 8, body)

    async def _streamed(self, session: aiohttp.ClientSession) -> None:
        tokens = self._random.choice((1, 16, 40))
        body = {**self._prompt(), "max_tokens": tokens, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        last: dict[str, Any] = {}
        async with session.post(self._url + COMPLETIONS, json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    last = json.loads(line.removeprefix(b"data: "))
            self._check(answer.status, last, tokens, body)

    async def _leaves(self, session: aiohttp.ClientSession) -> None:
        """A client that disconnects in the middle of its answer."""
        body = {**self._prompt(), "max_tokens": 100, "ignore_eos": True, "stream": True}
        left = self._random.randint(1, 12)
        async with session.post(self._url + COMPLETIONS, json=body) as answer:
            if answer.status != 200:
                self.report.wrong.append(f"status {answer.status} for {str(body)[:200]}")
            async for line in answer.content:
                left -= line.startswith(b"data: ")
                if not left:
                    return  # leaving the block closes the connection

    async def _leaves_at_once(self, session: aiohttp.ClientSession) -> None:
        """A client that disconnects before its answer is complete."""
        body = {**self._prompt(), "max_tokens": 100, "ignore_eos": True, "n": 2}
        body["temperature"] = 0.8
        answer = session.post(self._url + COMPLETIONS, json=body)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(answer, self._random.random())

    async def _any_nonsense(self, session: aiohttp.ClientSession) -> None:
        await self._talk_nonsense(session, self._random.choice(list(self._nonsense)))

    async def _talk_nonsense(self, session: aiohttp.ClientSession, name: str) -> None:
        n = self._nonsense[name]
        body = n.body if isinstance(n.body, bytes) else json.dumps(n.body).encode()
        headers = {"Content-Type": "application/json"}
        request = session.request(n.method, self._url + n.path, data=body, headers=headers)
        async with request as answer:
            await answer.read()
            self.report.statuses[name][answer.status] += 1

    def _check(self, status: int, answer: Any, tokens: int, body: dict[str, Any]) -> None:
        found = answer.get("usage", {}).get("completion_tokens")
        if status != 200 or found != tokens:
            said = str(answer)[:200]
            self.report.wrong.append(
                f"status {status}, {found} of {tokens} tokens for {str(body)[:200]}: {said}"
            )
        else:
            self.report.tokens += tokens

    async def _watch(self, pid: int, began: float) -> None:
        while True:
            held = await asyncio.to_thread(held_by, pid)
            self.report.held.append((time.monotonic() - began, held))
            await asyncio.sleep(1)

    async def _comes_to_rest(self, session: aiohttp.ClientSession) -> None:
        """Check that without clients no request runs or waits, and no block is in use. Then read
        the backend's counters, which are at most a second old.
        """
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        deadline = time.monotonic() + PATIENCE
        while True:
            async with session.get(f"{self._url}/metrics") as answer:
                lines = (await answer.text()).splitlines()
            busy = [
                line
                for line in lines
                if line.startswith(tuple(f"vllm:{name}{{" for name in names))
                and float(line.rsplit(" ", 1)[1])
            ]
            if not busy:
                for line in lines:
                    name = line.partition("{")[0]
                    if name.startswith(PREFIX) and name.endswith("_total"):
                        self.report.counters[name] += int(float(line.rsplit(" ", 1)[1]))
                return
            if time.monotonic() > deadline:
                self.report.wrong.append(f"busy without clients: {busy}")
                return
            await asyncio.sleep(0.5)


async def ends_cleanly(
    load: Load, process: "subprocess.Popen[bytes]", clients: int = 4
) -> tuple[int, list[str]]:
    """Terminate a server while it answers ``clients``.

    Returns:
        exit status, and the faults: a client that waits for ever, a process that stays.
    """
    started = tree(process.pid)
    tasks = await load.in_flight(clients)
    process.terminate()
    wrong = []
    try:
        status = await asyncio.to_thread(process.wait, PATIENCE)
    except subprocess.TimeoutExpired:
        return -1, [f"the server does not end within {PATIENCE} s of SIGTERM"]
    _, waiting = await asyncio.wait(tasks, timeout=30)
    for task in waiting:
        task.cancel()
    if waiting:
        wrong.append(f"{len(waiting)} clients still wait for a server that has ended")
    wrong += await all_gone(started)
    return status, wrong


async def all_gone(started: Sequence[Any], seconds: float = 30) -> list[str]:
    """The processes that still run after ``seconds`` seconds, in words."""
    deadline = time.monotonic() + seconds
    while (left := [p for p in started if alive(p)]) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return [f"left behind: {process}" for process in left]


def server_faults(ours: Report, stock: Report | None) -> list[str]:
    """Invalid requests with a status of 500 or more, except where ``stock`` answers the same."""
    found = []
    for name, statuses in ours.statuses.items():
        allowed = set(stock.statuses[name]) if stock else set()
        bad = {status for status in statuses if status >= 500} - allowed
        found += [f"{name}: status {status}" for status in sorted(bad)]
    return found
