"""Models, settings and start of the engines that benchmarks compare."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks.engine.workloads import kv_bytes_per_token
from examples.embedded_model import embedded_model_path
from tests.support.dummy_model import write_llama_8b

#: engine argument: the benchmarks' worker extension
WORKER = {"worker_extension_cls": "benchmarks.engine.worker.BenchWorker"}
#: engine arguments of a model without a checkpoint
RANDOM_WEIGHTS = {"load_format": "dummy", "skip_tokenizer_init": True, **WORKER}
#: engine argument: CUDA graphs without torch.compile, which halves the start
NOT_COMPILED = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}


class Closable(Protocol):
    def close(self) -> None: ...


Engine = TypeVar("Engine", bound=Closable)


@contextmanager
def started(
    starts: Mapping[str, Callable[[], Engine]], at_once: bool = True
) -> Iterator[dict[str, Engine]]:
    """Engines by name, which are closed at the end, also if one of them does not start.

    Args:
        starts: start one engine each.
        at_once: start them side by side instead of one after the other.
    """
    with ExitStack() as stack, ThreadPoolExecutor(len(starts) if at_once else 1) as pool:
        starting = {name: pool.submit(start) for name, start in starts.items()}
        wait(starting.values(), return_when=FIRST_EXCEPTION)
        for future in starting.values():
            if not future.cancel() and not future.exception():
                stack.callback(future.result().close)
        yield {name: future.result() for name, future in starting.items()}


@contextmanager
def llama_8b_or_embedded(gpu: bool, num_layers: int) -> Iterator[Path]:
    """On a GPU the shape of Llama-3.1-8B with fewer layers, else the embedded model."""
    if not gpu:
        yield embedded_model_path()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield write_llama_8b(Path(folder), num_hidden_layers=num_layers)


def sized_cache(model: Path, gpu: bool, longest: int, tokens: float) -> dict[str, Any]:
    """Arguments of an engine with a KV cache of a set size, which compiles nothing.

    Args:
        longest: tokens of the longest request, with its answer.
        tokens: of the cache; it has room for the longest request in any case.
    """
    block = 16 if gpu else 128
    blocks = -(-int(max(tokens, longest + block)) // block) + 1
    settings = {
        "max_model_len": -(-longest // block) * block,
        "block_size": block,
        "num_gpu_blocks_override": blocks,
    }
    if not gpu:
        return {**settings, "max_num_seqs": 4, "enforce_eager": True}
    kv_bytes = kv_bytes_per_token(json.loads((model / "config.json").read_text()))
    return {
        **settings,
        **RANDOM_WEIGHTS,
        **NOT_COMPILED,
        "max_num_seqs": 256,
        "gpu_memory_utilization": 0.3,  # must be free when an engine starts
        # not measured: engines that start together would count each other's memory
        "kv_cache_memory_bytes": blocks * block * kv_bytes,
    }
