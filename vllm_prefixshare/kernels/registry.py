"""Choice of the kernel that serves a layer on a GPU."""

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch

from vllm_prefixshare.config import AttentionConfig, require_launchable
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.kernels.aot.compilation import CompileError, compile_launches
from vllm_prefixshare.kernels.catalog import CATALOG, Gpu, candidates
from vllm_prefixshare.kernels.interface import Kernel


class Choice(NamedTuple):
    """The kernel that serves a layer.

    passed_over: why a kernel that comes before it under "auto" does not serve; else None.
    """

    kernel: Kernel
    passed_over: str | None


@cache
def choose_kernel(
    attention: AttentionConfig, device: torch.device, kernel: str, query_len: int
) -> Choice:
    """The first kernel that can serve and that Triton can compile here; its launches are then
    compiled. The choice is cached.

    Raises:
        PrefixShareError: no kernel can serve, or not the one that was named.
    """
    require_launchable(kernel, query_len)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise PrefixShareError(f"device {str(device)!r} is not an NVIDIA GPU that can be used.")
    with torch.cuda.device(device):
        return first_that_compiles(attention, Gpu.of(device), kernel, query_len)


def kernels_that_may_serve(
    attention: AttentionConfig, device: torch.device, kernel: str, query_len: int
) -> list[Kernel]:
    """The chosen kernel, and under "auto" also the portable one, which serves if padding makes the
    block stride not a multiple of the token stride; that is known once the KV cache is allocated.

    Raises:
        PrefixShareError: see ``choose_kernel``.
    """
    chosen = choose_kernel(attention, device, kernel, query_len).kernel
    gpu = Gpu.of(device)
    names = candidates(attention, gpu, kernel, query_len)
    after = names[names.index(chosen.name) + 1 :]
    return [chosen, *(make_kernel(name, attention, query_len, gpu) for name in after)]


def first_that_compiles(
    attention: AttentionConfig, gpu: Gpu, kernel: str, query_len: int
) -> Choice:
    """As ``choose_kernel``, for a GPU that need not be there (``gpu_target.stand_in``)."""
    failures: list[str] = []
    tried = candidates(attention, gpu, kernel, query_len)
    for name in tried:
        try:
            chosen = make_kernel(name, attention, query_len, gpu)
            compile_launches(chosen, attention, query_len, gpu)
            return Choice(chosen, failures[0] if failures else None)
        except CompileError as e:
            failures.append(str(e))
    reason = failures[0].removesuffix(".")
    if candidates(attention, gpu, "auto", query_len) != tried:
        raise PrefixShareError(
            f"kernel {kernel!r} does not serve this layer ({reason}): use kernel='auto', in an "
            "engine VLLM_PREFIXSHARE_KERNEL=auto."
        )
    raise PrefixShareError(
        f"no kernel serves this layer ({reason}): install the Triton that vLLM brings, or choose "
        "another attention backend."
    )


def make_kernel(name: str, attention: AttentionConfig, query_len: int, gpu: Gpu) -> Kernel:
    """A kernel by its name, made for one layer and GPU.

    Raises:
        CompileError: this Triton lacks what the kernel imports.
    """
    kernel_class = getattr(import_kernel(name), CATALOG[name].class_name)
    kernel: Kernel = kernel_class(attention, query_len, gpu)
    return kernel


def import_kernel(name: str) -> ModuleType:
    """The module with the launch of a kernel.

    Raises:
        CompileError: this Triton lacks what the kernel imports.
    """
    try:
        return import_module(f"vllm_prefixshare.kernels.{name}.launch")
    except (ImportError, AttributeError) as e:
        raise CompileError(f"kernel '{name}' cannot be imported with this Triton: {e}.") from e
