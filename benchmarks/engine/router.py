"""What a router over replicas gains if it knows which prefixes are being decoded: a simulation.

Replicas decode in batches, read a KV token that requests share once a step, and evict the prefix
that was used least recently. No engine runs: a step takes the time that ``docs/performance.md`` and
``docs/ordering.md`` have for Llama-3.1-8B on an H200. The routers:

random        the less loaded of two random replicas, as Ray's own
affine        the less loaded of the replicas that were sent the longest prefix, as Ray's
              ``PrefixCacheAffinityRouter``; the same as ``random`` where the loads of the replicas
              differ by more than a threshold
bounded       the replica that has cached the longest prefix, else the one that was sent it; those
              are left out whose load is above the least by more than a threshold
share-aware   the same, but first the replica where the longest prefix is being decoded, or waits

Every threshold is tried. At once: all requests arrive at the beginning, and each router has the
threshold of its highest throughput. With a load: Poisson arrivals at this part of the affine
router's throughput, and the threshold of the shortest mean time of a request.

    python -m benchmarks.engine.router --mooncake TRACE.jsonl
"""

import json
import math
import random
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.support.option_types import count, positive
from benchmarks.support.program import make_parser, one_sentence
from vllm_prefixshare import PrefixShareError

PROGRAM = "benchmarks.engine.router"

#: Milliseconds of a step: for the weights, for each request that decodes, for each prompt token,
#: and for each KV token that is read (131072 bytes at 4.35 TB/s). The first two from the rows "one
#: request, 8k" and "128 requests on one 4k document" of the engine's table, the third from the
#: seconds and prompt tokens of the table of orders.
STEP_MS, REQUEST_MS, PREFILL_MS, READ_MS = 4.75, 0.009, 0.033, 131072 / 4.35e9
BLOCK = 512  # tokens of a hash id in a Mooncake trace
CACHE_BLOCKS = 376_000 // BLOCK
MAX_REQUESTS, MAX_PREFILL = 256, 8192  # of a step
MIN_MATCH = 0.1  # part of a prompt; a shorter match is none, as in Ray
THRESHOLDS = (2, 4, 8, 16, 32, 64, math.inf)


@dataclass(slots=True)
class Request:
    """A request. blocks: ids of the whole blocks of its prompt; equal ids have equal prefixes.

    own: prompt tokens behind the blocks. arrival: ms. missing: prompt tokens still to compute.
    """

    blocks: tuple[int, ...]
    own: int
    answer: int
    arrival: float = 0.0
    missing: int = 0
    done: int = 0

    def match(self, known: Container[int]) -> int:
        """How many leading blocks are ``known``; 0 if these are too few to count."""
        found = next((i for i, b in enumerate(self.blocks) if b not in known), len(self.blocks))
        return found if found >= MIN_MATCH * len(self.blocks) else 0


@dataclass
class Replica:
    """One engine.

    present: how many requests that wait or run have a block. used: the same of those that run.
    cache: blocks, the least recently used first. sent: all blocks that were ever routed here.
    """

    now: float = 0.0
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    present: Counter[int] = field(default_factory=Counter)
    used: Counter[int] = field(default_factory=Counter)
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    sent: set[int] = field(default_factory=set)
    read: int = 0
    computed: int = 0

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)

    def take(self, request: Request) -> None:
        self.now = max(self.now, request.arrival) if not self.load else self.now
        self.waiting.append(request)
        self.present.update(request.blocks)
        self.sent.update(request.blocks)

    def start_waiting(self) -> None:
        """Start requests, the oldest first, while there is room for their KV."""
        private = sum(r.own + r.answer for r in self.running) // BLOCK
        while self.waiting and len(self.running) < MAX_REQUESTS:
            request = self.waiting[0]
            new = sum(b not in self.used for b in request.blocks)
            private += (request.own + request.answer) // BLOCK
            if self.running and len(self.used) + new + private > CACHE_BLOCKS:
                return
            found = next(
                (i for i, b in enumerate(request.blocks) if b not in self.cache),
                len(request.blocks),
            )
            request.missing = (len(request.blocks) - found) * BLOCK + request.own
            for block in reversed(request.blocks):  # the end of a prompt is evicted first
                self.used[block] += 1
                self.cache[block] = None
                self.cache.move_to_end(block)
            self.running.append(self.waiting.pop(0))
            excess = max(0, len(self.cache) + private - CACHE_BLOCKS)
            for block in [b for b in self.cache if b not in self.used][:excess]:
                del self.cache[block]

    def step(self) -> list[float]:
        """One step; the ms from arrival to end of the requests that it ends."""
        self.start_waiting()
        decoding = [r for r in self.running if not r.missing]
        shared = {block for r in decoding for block in r.blocks}
        tokens = len(shared) * BLOCK + sum(r.own + r.done for r in decoding)
        left = MAX_PREFILL - len(decoding)
        for request in self.running:
            if request.missing and left:
                part = min(request.missing, left)
                request.missing -= part
                left -= part
                request.done += not request.missing  # the end of prefill gives a token
        for request in decoding:
            request.done += 1
        filled = MAX_PREFILL - len(decoding) - left
        self.read += tokens
        self.computed += filled
        self.now += STEP_MS + REQUEST_MS * len(decoding) + PREFILL_MS * filled + READ_MS * tokens
        ended = [r for r in self.running if r.done >= r.answer]
        if ended:
            self.running = [r for r in self.running if r.done < r.answer]
            for counter in (self.used, self.present):
                counter.subtract(block for r in ended for block in r.blocks)
                for block in {block for r in ended for block in r.blocks}:
                    if not counter[block]:
                        del counter[block]
        return [self.now - r.arrival for r in ended]


# ---- routers: a request, the replicas, a threshold, a generator; the replica that is chosen

Router = Callable[[Request, list[Replica], float, random.Random], Replica]


def less_loaded(replicas: Sequence[Replica], draw: random.Random) -> Replica:
    return min(draw.sample(replicas, min(2, len(replicas))), key=lambda r: r.load)


def anywhere(_: Request, replicas: list[Replica], most: float, draw: random.Random) -> Replica:
    return less_loaded(replicas, draw)


def affine(request: Request, replicas: list[Replica], most: float, draw: random.Random) -> Replica:
    loads = [r.load for r in replicas]
    if max(loads) - min(loads) > most:
        return less_loaded(replicas, draw)
    lengths = [request.match(r.sent) for r in replicas]
    if not any(lengths):
        return min(replicas, key=lambda r: len(r.sent))
    best = [r for r, n in zip(replicas, lengths, strict=True) if n == max(lengths)]
    return less_loaded(best, draw)


def within(replicas: list[Replica], most: float) -> list[Replica]:
    least = min(r.load for r in replicas)
    return [r for r in replicas if r.load - least <= most]


def bounded(request: Request, replicas: list[Replica], most: float, draw: random.Random) -> Replica:
    return max(
        within(replicas, most),
        key=lambda r: (request.match(r.cache), request.match(r.sent), -len(r.sent)),
    )


def share_aware(
    request: Request, replicas: list[Replica], most: float, draw: random.Random
) -> Replica:
    def rank(r: Replica) -> tuple[int, ...]:
        return *map(request.match, (r.present, r.cache, r.sent)), -len(r.sent)

    return max(within(replicas, most), key=rank)


ROUTERS: dict[str, tuple[Router, tuple[float, ...]]] = {
    "random": (anywhere, (math.inf,)),
    "affine": (affine, THRESHOLDS),
    "bounded": (bounded, THRESHOLDS),
    "share-aware": (share_aware, THRESHOLDS),
}


def replay(
    requests: Sequence[Request], arrivals: Sequence[float], router: Router, most: float, count: int
) -> dict[str, float]:
    """Figures of ``count`` replicas: tokens, seconds, tokens per second."""
    draw = random.Random(0)
    replicas = [Replica() for _ in range(count)]
    times: list[float] = []
    for template, arrival in zip(requests, arrivals, strict=True):
        request = Request(template.blocks, template.own, template.answer, arrival)
        for replica in replicas:
            while replica.load and replica.now < arrival:
                times += replica.step()
        router(request, replicas, most, draw).take(request)
    for replica in replicas:
        while replica.load:
            times += replica.step()
    if len(times) != len(requests):
        raise AssertionError("a request was lost")
    return {
        "threshold": most,
        "tokens_per_second": 1000 * sum(r.answer for r in requests) / max(r.now for r in replicas),
        "read": sum(r.read for r in replicas),
        "computed": sum(r.computed for r in replicas),
        "mean": float(np.mean(times)) / 1000,
        "p99": float(np.percentile(times, 99)) / 1000,
    }


# ---- workloads


def mooncake(path: Path, count: int, longest: int) -> list[Request]:
    """The first ``count`` requests of a Mooncake trace with at most ``longest`` prompt tokens.

    Raises:
        PrefixShareError: the file cannot be read or has another format.
    """
    found: list[Request] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                record = json.loads(line)
                length, answer = record["input_length"], max(1, record["output_length"])
                if length <= longest and len(found) < count:
                    whole = (length - 1) // BLOCK  # the last token is always computed
                    blocks = tuple(record["hash_ids"][:whole])
                    found.append(Request(blocks, length - whole * BLOCK, answer))
    except OSError as e:
        raise PrefixShareError(f"the trace {path} cannot be read: {e.strerror}.") from None
    except (KeyError, TypeError, ValueError) as e:
        raise PrefixShareError(f"{path} is not a Mooncake trace: {e!r}.") from None
    return found


def questions(count: int, documents: int, tokens: int, answer: int) -> list[Request]:
    """Questions of 64 tokens about documents; the n-th document is asked about 1 / n as often."""
    weights = 1 / np.arange(1, documents + 1)
    chosen = np.random.default_rng(1).choice(documents, count, p=weights / weights.sum())
    blocks = tokens // BLOCK
    return [
        Request(tuple(range(d * blocks, (d + 1) * blocks)), 64, answer) for d in chosen.tolist()
    ]


def poisson(count: int, rate: float) -> list[float]:
    """Milliseconds at which requests arrive at ``rate`` a second."""
    gaps = np.random.default_rng(2).exponential(1000 / rate, count)
    found: list[float] = np.cumsum(gaps).tolist()
    return found


def best_of(figures: Iterable[dict[str, float]], name: str, sign: int) -> dict[str, float]:
    return min(figures, key=lambda f: sign * f[name])


def compare(title: str, requests: Sequence[Request], replicas: int, load: float) -> None:
    """Print a row with all requests at once, and one with Poisson arrivals."""

    def run(arrivals: list[float], name: str, sign: int) -> dict[str, dict[str, float]]:
        return {
            router: best_of(
                (replay(requests, arrivals, route, most, replicas) for most in thresholds),
                name,
                sign,
            )
            for router, (route, thresholds) in ROUTERS.items()
        }

    at_once = run([0.0] * len(requests), "tokens_per_second", -1)
    answer = sum(r.answer for r in requests) / len(requests)
    rate = load * at_once["affine"]["tokens_per_second"] / answer
    loaded = run(poisson(len(requests), rate), "mean", 1)
    for when, best in (("at once", at_once), (f"load {load}", loaded)):
        print(
            f"{title:33} {replicas:2} {when:8}",
            *(f"{f['tokens_per_second']:7.0f}" for f in best.values()), " ",
            *(f"{f['read'] / 1e6:6.0f}" for f in best.values()), " ",
            *(f"{f['mean']:6.2f}" for f in best.values()), " ",
            *(f"{f['threshold']:4.0f}" for f in best.values()), flush=True,
        )  # fmt: skip


@one_sentence(PROGRAM)
def main(argv: list[str] | None = None) -> int:
    """Run the simulation; 2 with one sentence on standard error for a trace it cannot read."""
    parser = make_parser(PROGRAM, __doc__)
    parser.add_argument("--mooncake", type=Path, help="Mooncake trace, JSON lines")
    parser.add_argument("--requests", type=count, default=400, help="for each replica")
    parser.add_argument("--replicas", type=count, nargs="+", default=[4, 8])
    parser.add_argument("--load", type=positive, default=0.8, help="part of affine routing's rate")
    args = parser.parse_args(argv)
    print(f"{', '.join(ROUTERS)}: tokens/s, million KV tokens read, mean seconds, threshold")
    for replicas in args.replicas:
        num_reqs = args.requests * replicas
        works = {
            "24 documents of 16k, 64 tokens": questions(num_reqs, 24, 16384, 64),
            "64 documents of 16k, 256 tokens": questions(num_reqs, 64, 16384, 256),
            "4 documents of 32k, 256 tokens": questions(num_reqs, 4, 32768, 256),
        }
        if args.mooncake:
            works["Mooncake trace"] = mooncake(args.mooncake, num_reqs, 32768)
        for title, requests in works.items():
            compare(title, requests, replicas, args.load)
    return 0


if __name__ == "__main__":
    sys.exit(main())
