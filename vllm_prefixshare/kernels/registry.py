"""Choice of the kernel that serves a layer on a GPU."""

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch

from vllm_prefixshare.config import AttentionConfig, require_launchable
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.kernels.aot.compilation import CompileError, compile_launches
from vllm_prefixshare.kernels.hopper.layout import MAX_HEAD_DIM, MIN_PIECE, hopper_serves
from vllm_prefixshare.kernels.interface import Gpu, Kernel


class Choice(NamedTuple):
    """The kernel that serves a layer.

    passed_over: why a kernel that comes before it under "auto" does not serve; else None.
    """

    kernel: Kernel
    passed_over: str | None


#: where each kernel lives, in the order in which "auto" takes them. Imported one at a time: with
#: a Triton whose Gluon does not suit the Hopper kernel, the portable one serves.
KERNEL_CLASSES = {
    "hopper": "HopperKernel",
    "portable": "PortableKernel",
    "mla_hopper": "LatentHopperKernel",
}

#: layouts store the rows of a tile that read a part in 16 bits, one of them a sign
MAX_ENCODABLE_ROWS = 32767


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
    if kernel != "auto" or chosen.name != "hopper":
        return [chosen]
    return [chosen, make_kernel("portable", attention, query_len, Gpu.of(device))]


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
    kernel: Kernel = getattr(import_kernel(name), KERNEL_CLASSES[name])(attention, query_len, gpu)
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


def candidates(
    attention: AttentionConfig, gpu: Gpu, kernel: str = "auto", query_len: int = 1
) -> list[str]:
    """Kernels that serve this shape on this GPU, best first; if one is named, only that.

    Raises:
        PrefixShareError: there is none.
    """
    require_launchable(kernel, query_len)
    if attention.dtype not in ("bfloat16", "float16"):
        raise PrefixShareError(
            f"dtype must be bfloat16 or float16 on a GPU, got {attention.dtype}."
        )
    major, minor = gpu.capability
    if major < 8:
        raise PrefixShareError(
            f"This GPU has compute capability {major}.{minor}, 8.0 is the minimum: choose another "
            "attention backend."
        )
    if attention.kv_lora_rank is not None:
        return _latent_candidates(attention, gpu, kernel, query_len)
    hopper = hopper_serves(attention, gpu.capability)
    if kernel == "hopper" and not hopper:
        raise PrefixShareError(
            "kernel 'hopper' needs compute capability 9.0 and blocks of a multiple of "
            f"{MIN_PIECE} tokens, got {major}.{minor} and {attention.block_size}, and has no "
            f"ALiBi, no head_dim above {MAX_HEAD_DIM} and no quantised KV cache with other "
            "queries: use kernel='auto'."
        )
    if kernel != "auto":
        return [kernel]
    return ["hopper", "portable"] if hopper else ["portable"]


def _latent_candidates(
    attention: AttentionConfig, gpu: Gpu, kernel: str, query_len: int
) -> list[str]:
    rows = query_len * attention.num_qo_heads
    if rows > MAX_ENCODABLE_ROWS:
        raise PrefixShareError(
            "the kernel for a latent KV cache (kv_lora_rank) takes at most "
            f"{MAX_ENCODABLE_ROWS} rows of a request, its heads times max_query_len, got {rows}."
        )
    if kernel == "portable" or gpu.capability != (9, 0):
        raise PrefixShareError(
            "a latent KV cache (kv_lora_rank) has a kernel for compute capability 9.0 only, got "
            f"{gpu.capability[0]}.{gpu.capability[1]} and kernel={kernel!r}."
        )
    if attention.block_size % 8:  # rows of a swizzled box
        raise PrefixShareError(
            "the kernel for a latent KV cache (kv_lora_rank) takes blocks of a multiple of 8 "
            f"tokens, got {attention.block_size}."
        )
    return ["mla_hopper"]
