"""CPU time of the queue that orders waiting requests, compared with vLLM's own queue.

Random requests on 1, 100 and as many documents as requests; the simulated cache holds the blocks of
the last 8 requests that started.

With ``--scheduler``: what the order adds to vLLM's own scheduler, without a model, in a run of
``benchmarks.engine.order`` with a KV cache that holds everything.

    python -m benchmarks.engine.waiting_queue
    python -m benchmarks.engine.waiting_queue --scheduler
"""

import random
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any

from vllm.v1.core.sched.request_queue import FCFSRequestQueue

from benchmarks.support.program import make_parser
from vllm_prefixshare.vllm_plugin.scheduling.prefix_queue import PrefixQueue

PROGRAM = "benchmarks.engine.waiting_queue"


class Waiting:
    """The fields of a request that a queue reads."""

    def __init__(self, block_hashes: list[bytes]) -> None:
        self.block_hashes = block_hashes


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


def measure_schedulers(repeats: int) -> None:
    """Print the CPU time of a whole run: 192 shuffled questions about 24 documents of 16k tokens,
    64 tokens each.
    """
    from vllm.config import ModelConfig
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from tests.support.dummy_model import write_llama_8b
    from tests.unit.vllm_plugin.scheduling.test_order import (
        answer_step,
        make_config,
        make_scheduler,
        prompts_about,
    )
    from vllm_prefixshare.vllm_plugin.scheduling.order import OfflinePrefixOrderScheduler

    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)
    prompts = prompts_about(documents=24, questions=8, tokens=16384)
    random.Random(0).shuffle(prompts)
    with tempfile.TemporaryDirectory() as folder:
        model = write_llama_8b(Path(folder))
        options = {"skip_tokenizer_init": True, "max_model_len": 32768, "dtype": "float16"}
        config = make_config(ModelConfig(str(model), **options), num_blocks=36865)
    config.scheduler_config.max_num_seqs = 256
    config.scheduler_config.max_num_batched_tokens = 8192

    def run(make: Any) -> tuple[float, float, int]:
        """Milliseconds to add all requests, and of all steps; the number of steps."""
        scheduler = make_scheduler(make, config)
        params = SamplingParams(max_tokens=64, ignore_eos=True)
        requests = [
            Request(str(i), prompt, params, None, block_hasher=hasher)
            for i, prompt in enumerate(prompts)
        ]
        began = time.process_time()
        for request in requests:
            scheduler.add_request(request)
        adding, scheduling, steps = time.process_time() - began, 0.0, 0
        while scheduler.requests:
            began = time.process_time()
            step = scheduler.schedule()
            scheduling += time.process_time() - began
            steps += 1
            answer_step(scheduler, step)
        return 1e3 * adding, 1e3 * scheduling, steps

    runs: dict[Any, list[tuple[float, float, int]]] = {
        Scheduler: [],
        OfflinePrefixOrderScheduler: [],
    }
    for _ in range(repeats):
        for make, found in runs.items():
            found.append(run(make))
    print("scheduler                      add, ms   steps, ms (of all runs)  steps")
    for make, found in runs.items():
        adding, scheduling, steps = zip(*found, strict=True)
        spread = f"{median(scheduling):6.1f} ({min(scheduling):.1f} to {max(scheduling):.1f})"
        print(f"{make.__name__:28} {median(adding):9.1f}   {spread:24} {steps[0]}")


def main() -> int:
    parser = make_parser(PROGRAM, __doc__)
    parser.add_argument("--waiting", type=int, default=10_000, help="waiting requests")
    parser.add_argument("--blocks", type=int, default=1024, help="blocks of each request")
    parser.add_argument("--scheduler", action="store_true", help="a run of vLLM's scheduler")
    args = parser.parse_args()
    if args.scheduler:
        measure_schedulers(repeats=9)
        return 0
    if args.waiting < 1 or args.blocks < 1:
        parser.error("--waiting and --blocks must be 1 or more")
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
