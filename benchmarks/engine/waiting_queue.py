"""CPU time of the queue that orders waiting requests, compared with vLLM's own queue.

Random requests on 1, 100 and as many documents as requests; the simulated cache holds the blocks of
the last 8 requests that started.

    python -m benchmarks.engine.waiting_queue
"""

import random
import sys
import time
from collections import deque
from typing import Any

from vllm.v1.core.sched.request_queue import FCFSRequestQueue

from benchmarks.support.option_types import count
from benchmarks.support.program import make_parser
from vllm_prefixshare.vllm_plugin.scheduling.prefix_queue import PrefixQueue

PROGRAM = "benchmarks.engine.waiting_queue"


class Waiting:
    """What a queue reads of a request. All of its prompt is computed as soon as it has started."""

    num_computed_tokens = num_prompt_tokens = 0

    def __init__(self, block_hashes: list[bytes]) -> None:
        self.block_hashes = block_hashes

    def is_finished(self) -> bool:
        return True


def requests_about(documents: int, waiting: int, blocks: int) -> list[Waiting]:
    """``waiting`` requests in random order. All blocks of a request except one belong to a
    document.
    """
    rng = random.Random(0)
    texts = [[rng.randbytes(32) for _ in range(blocks - 1)] for _ in range(documents)]
    found = [Waiting([*texts[i % documents], rng.randbytes(32)]) for i in range(waiting)]
    rng.shuffle(found)
    return found


def measure(queue: Any, requests: list[Waiting], cache: set[bytes]) -> tuple[float, float]:
    """Microseconds to add a request, and to look at and take one; each is the mean over all
    requests.
    """
    began = time.process_time()
    for request in requests:
        queue.add_request(request)
    adding = time.process_time() - began
    taking, recent = 0.0, deque[Waiting]()
    begin_step = getattr(queue, "begin_step", lambda: None)  # vLLM's own has none
    for _ in requests:
        began = time.process_time()
        begin_step()
        queue.peek_request()
        request = queue.pop_request()
        taking += time.process_time() - began
        recent.append(request)
        if len(recent) > 8:
            cache.difference_update(recent.popleft().block_hashes)
        cache.update(request.block_hashes)
    return adding * 1e6 / len(requests), taking * 1e6 / len(requests)


def main() -> int:
    parser = make_parser(PROGRAM, __doc__)
    parser.add_argument("--waiting", type=count, default=10_000, help="waiting requests")
    parser.add_argument("--blocks", type=count, default=1024, help="blocks of each request")
    args = parser.parse_args()
    print("          |   vLLM's, us   |   ordered, us\ndocuments |   add     take |   add     take")
    for documents in sorted({1, min(100, args.waiting), args.waiting}):
        requests = requests_about(documents, args.waiting, args.blocks)
        cache: set[bytes] = set()
        plain = measure(FCFSRequestQueue(), requests, set())
        ordered = measure(PrefixQueue(cache.__contains__, bound=2.0), requests, cache)
        times = " | ".join(f"{add:5.1f} {take:8.1f}" for add, take in (plain, ordered))
        print(f"{documents:9} | {times}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
