"""Whether the native executor can run here."""

import pytest

from vllm_prefixshare.kernels.cpu import native_executor
from vllm_prefixshare.kernels.cpu.native_executor import NativeUnavailableError


def missing() -> str | None:
    try:
        native_executor.load_library("bfloat16")
    except NativeUnavailableError as e:
        return str(e)
    return None


needs_native = pytest.mark.skipif(missing() is not None, reason=f"no native executor: {missing()}")
