"""Compiling while vLLM starts, so that a fresh machine does not wait for it.

The processes end by themselves, touch no GPU and only fill caches: if one fails or is killed, the
worker compiles what is missing and logs what is wrong.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_prefixshare.config import FP8, FP8_CACHES, AttentionConfig
from vllm_prefixshare.settings import settings
from vllm_prefixshare.utils.trusted_files import own_folder
from vllm_prefixshare.vllm_plugin.compat import decode_query_len
from vllm_prefixshare.vllm_plugin.eligibility.layer import FP8_LATENT_BLOCK
from vllm_prefixshare.vllm_plugin.observability.log import logger

if TYPE_CHECKING:
    from vllm_prefixshare.kernels.interface import Kernel

LIBRARIES = ("triton", "numba")


def start_planning() -> None:
    """Compile planning in the background, unless an earlier start on this machine has.

    It is the same for every model, so it need not wait until vLLM has read the model's
    configuration, and takes about as long as what vLLM does before its first plan.
    """
    with best_effort():
        _start("planning", {})


def start_kernels(attention: AttentionConfig, config: Any) -> None:
    """Compile the kernels for the layers of a ``VllmConfig`` in the background, unless an earlier
    start on this machine has, or layers with such a KV cache are not served.

    Args:
        attention: shape of the full-attention layers on one rank.
    """
    cache, latent = config.cache_config.cache_dtype, attention.kv_lora_rank is not None
    quantised = cache in FP8_CACHES
    if cache not in (None, "auto", attention.dtype) and not quantised:
        return
    shape: dict[str, Any] = {
        "num-qo-heads": attention.num_qo_heads,
        "num-kv-heads": attention.num_kv_heads,
        "head-dim": attention.head_dim,
        "block-size": attention.block_size,
        "dtype": attention.dtype,
        "query-len": decode_query_len(config),
    }
    if latent:
        shape["kv-lora-rank"] = attention.kv_lora_rank
    if quantised:
        shape["kv-dtype"] = FP8
        if latent:
            shape["block-size"] = FP8_LATENT_BLOCK  # which vLLM sets later
    _start("kernels", shape)


@contextlib.contextmanager
def best_effort() -> Iterator[None]:
    """Go on without compiling ahead, whatever has failed: a worker that meets it, too, reports
    it.
    """
    try:
        yield
    except Exception:
        logger().debug("Nothing is compiled ahead.", exc_info=True)


def _start(what: str, shape: dict[str, Any]) -> None:
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    if capability is None:
        return
    gpu = {
        "capability": f"{capability.major}.{capability.minor}",
        "kernel": settings().kernel,
    }
    arguments = [f"--{name}={value}" for name, value in (gpu | shape).items()]
    done = done_file(what, arguments)
    folder = own_folder(done.parent)
    # where nothing can be kept, an engine would wait for what it compiles anew
    if folder is None or done.exists() or not os.access(folder, os.W_OK):
        return
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "vllm_prefixshare.kernels.aot.fill_caches", what, *arguments),
            f"--done={done}",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    threading.Thread(target=process.wait, daemon=True).start()  # leaves no zombie


def load_planning(kernel: "Kernel", attention: AttentionConfig) -> None:
    """Load or compile the planning code in a thread while weights load; the first plan would
    otherwise wait a second for it.
    """

    def load() -> None:
        from vllm_prefixshare.kernels.aot.fill_caches import warm_up_planning

        # the planner meets the same error when it warms up, and reports it
        with contextlib.suppress(Exception):
            warm_up_planning(kernel, attention)

    threading.Thread(target=load, daemon=True).start()


def done_file(what: str, arguments: list[str]) -> Path:
    """The file that marks ``what`` as compiled for these arguments, by these sources."""
    package = Path(__file__).parents[1]
    sources = [f"{path} {path.stat().st_mtime_ns}" for path in sorted(package.rglob("*.py"))]
    versions = [sys.version, *map(version, LIBRARIES), os.environ.get("NUMBA_CACHE_DIR", "")]
    key = hashlib.sha256("\0".join([what, *arguments, *versions, *sources]).encode()).hexdigest()
    return settings().cache / "compiled" / f"{what}-{key[:16]}.done"
