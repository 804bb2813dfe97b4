"""A load generator with a closed loop of clients, in its own process.

    python benchmarks/whole_call/client.py LOAD.json

reads a ``Load`` from the file and prints a JSON list with one object per request. It imports
neither vLLM nor torch, encodes all bodies in advance and parses an answer once it is complete, so
that it does not limit a server of 100 requests per second with bodies of 150 KB.
"""

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to send.

    url: address of the endpoint.
    clients: number of requests in flight.
    bodies: JSON bodies, sent in this order; they ask for streams with usage.
    """

    url: str
    clients: int
    bodies: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Served:
    """One answer. Times are in seconds.

    sent: when the request was sent, since the start of the load.
    first: from there to the first token; total: to the end of the answer.
    between: times between successive messages with tokens.
    """

    sent: float
    first: float
    total: float
    between: list[float]
    text: str
    num_prompt_tokens: int
    num_tokens: int
    num_cached_tokens: int


def parsed(sent: float, pieces: list[tuple[float, bytes]]) -> Served:
    """An answer from the pieces of its stream and their times.

    Raises:
        ValueError: the stream has no usage, or an error instead of tokens.
    """
    times: list[float] = []
    texts: list[str] = []
    usage: dict[str, Any] = {}
    rest = b""
    for at, piece in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if not event.startswith(b"data: {"):
                continue
            message = json.loads(event.removeprefix(b"data: "))
            if "error" in message:
                raise ValueError(str(message["error"]))
            usage = message.get("usage") or usage
            for choice in message.get("choices", ()):
                times.append(at)
                texts.append(choice["text"])
    if not usage or not times:
        raise ValueError(f"an incomplete stream: {rest[:200]!r}")
    details = usage.get("prompt_tokens_details") or {}
    return Served(
        sent=sent,
        first=times[0] - sent,
        total=pieces[-1][0] - sent,
        between=[b - a for a, b in pairwise(times)],
        text="".join(texts),
        num_prompt_tokens=usage["prompt_tokens"],
        num_tokens=usage["completion_tokens"],
        num_cached_tokens=details.get("cached_tokens") or 0,
    )


async def send(load: Load) -> list[Served]:
    """Send all requests; the answers are in the order of the bodies."""
    bodies = [json.dumps(body).encode() for body in load.bodies]
    answers: list[Served | None] = [None] * len(bodies)
    waiting = iter(range(len(bodies)))
    headers = {"Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=load.clients)
    timeout = aiohttp.ClientTimeout(None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        began = time.perf_counter()

        async def client() -> None:
            for number in waiting:  # shared by all clients
                sent = time.perf_counter() - began
                pieces = []
                request = session.post(load.url, data=bodies[number], headers=headers)
                async with request as answer:
                    async for piece in answer.content.iter_any():
                        pieces.append((time.perf_counter() - began, piece))
                if answer.status != 200:
                    raise ValueError(f"status {answer.status}: {pieces[0][1][:200]!r}")
                answers[number] = parsed(sent, pieces)

        await asyncio.gather(*(client() for _ in range(load.clients)))
    return [answer for answer in answers if answer is not None]


def main() -> int:
    load = Load(**json.loads(Path(sys.argv[1]).read_text()))
    try:
        answers = asyncio.run(send(load))
    except (ValueError, aiohttp.ClientError) as e:
        print(f"client: error: {type(e).__name__}: {e}", file=sys.stderr)
        return 1
    json.dump([asdict(answer) for answer in answers], sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
