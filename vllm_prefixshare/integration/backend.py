"""``PrefixShareBackend``: the backend class of the platform that vLLM runs on.

A vLLM with ``patches/`` names it in its registry, which holds one path for all platforms.
"""

import importlib
from typing import Any

from vllm_prefixshare.integration import CPU_BACKEND, CUDA_BACKEND


def __getattr__(name: str) -> Any:
    if name != "PrefixShareBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.platforms import current_platform

    path = CPU_BACKEND if current_platform.is_cpu() else CUDA_BACKEND
    module, _, cls = path.rpartition(".")
    return getattr(importlib.import_module(module), cls)
