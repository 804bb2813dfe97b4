"""The worker extension of the tests under context parallelism, which also lets vLLM use an NCCL
that is older than it asks for.

vLLM 0.33 asks NCCL for two functions of 2.29.7, which it calls only to suspend communicators; torch
2.11 brings 2.28. Where a function is missing, vLLM switches its wrapper of NCCL off without a word,
and its reduce-scatter then leaves the output unwritten, stock's as ours.
"""

import ctypes

from vllm.distributed.device_communicators import pynccl_wrapper

from tests.support.gpu_engines import LayerCounter

_wrapper = pynccl_wrapper.NCCLLibrary
_library = ctypes.CDLL(pynccl_wrapper.find_nccl_library())
_wrapper.exported_functions = [f for f in _wrapper.exported_functions if hasattr(_library, f.name)]


class ShardedWorker(LayerCounter):
    """A worker whose reduce-scatter writes its output."""
