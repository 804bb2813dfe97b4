"""Compiling while vLLM starts, so that a fresh machine does not wait for it.

Both processes end by themselves, touch no GPU and only fill caches: if one fails, the worker
compiles what is missing and says what is wrong.
"""

import subprocess
import sys
import threading
from typing import Any

from vllm_prefixshare import envs
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.integration.compat import decode_query_len


def start(attention: AttentionConfig, config: Any) -> None:
    """Compile kernels and planning for the layers of a ``VllmConfig`` in the background.

    Args:
        attention: shape of the full-attention layers on one rank.
    """
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    if capability is None:
        return
    options = {
        "capability": f"{capability.major}.{capability.minor}",
        "num-qo-heads": attention.num_qo_heads,
        "num-kv-heads": attention.num_kv_heads,
        "head-dim": attention.head_dim,
        "block-size": attention.block_size,
        "dtype": attention.dtype,
        "query-len": decode_query_len(config),
        "kernel": envs.get("VLLM_PREFIXSHARE_KERNEL"),
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    for what in ("kernels", "planning"):
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm_prefixshare.kernels.precompile", what, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        threading.Thread(target=process.wait, daemon=True).start()  # leaves no zombie
