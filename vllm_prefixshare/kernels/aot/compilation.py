"""Compile the launches of a layer ahead of time, to find out whether this Triton and GPU can."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import triton
from triton.compiler import CompiledKernel

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.kernels.aot.dispatch import only_compile
from vllm_prefixshare.kernels.cache_write import CacheWrite
from vllm_prefixshare.kernels.catalog import Gpu
from vllm_prefixshare.kernels.extras import LayerExtras
from vllm_prefixshare.kernels.interface import Kernel, Tensors
from vllm_prefixshare.kernels.merge_states import merge_states
from vllm_prefixshare.settings import settings
from vllm_prefixshare.utils.trusted_files import own_folder

Result = TypeVar("Result")

#: query tokens below and above the size at which merge states changes its programs
FEW_TOKENS, MANY_TOKENS = 1, 4096


class CompileError(PrefixShareError):
    """A kernel that Triton cannot compile here, or that does not fit the GPU."""


def compile_launches(
    kernel: Kernel,
    attention: AttentionConfig,
    query_len: int,
    gpu: Gpu,
    *,
    tree: bool = False,
    layout: str = "NHD",
    lse: bool = False,
) -> list[CompiledKernel]:
    """Compile all that a ``GpuExecutor`` launches for a layer, without running it. Later launches
    in this process take the binaries from memory.

    Args:
        tree: with a mask of token trees, which engines do not pass.
        layout: of the KV cache in memory, NHD or HND.
        lse: with the log-sum-exp as a second result, which engines ask for under decode context
            parallelism alone, and compile as they warm up.

    Returns:
        Triton's ``CompiledKernel`` of each launch.

    Raises:
        CompileError: with Triton's reason in one line.
    """
    with _compile_errors(
        f"kernel '{kernel.name}' cannot be compiled by Triton {triton.__version__} for "
        f"compute capability {gpu.capability[0]}.{gpu.capability[1]}: {{reason}}."
    ):
        arguments = _arguments(attention, query_len, tree, layout, lse)
        binaries = _in_own_cache(lambda: _compiled(kernel, arguments, query_len))
    for binary in binaries:
        # Triton adds the fields of this record when it compiles
        shared = 0 if binary is None else binary.metadata.shared  # type: ignore[attr-defined]
        if shared > gpu.shared_memory:
            raise CompileError(
                f"kernel '{kernel.name}' needs {shared} bytes of shared memory "
                f"and a thread block of this GPU may have {gpu.shared_memory}."
            )
    return binaries


def load_cache_write(attention: AttentionConfig, device: torch.device) -> CacheWrite:
    """The cache write of a layer, compiled and loaded, so that a CUDA graph may capture it.

    Args:
        device: "meta" within ``only_compile``.

    Raises:
        CompileError: with Triton's reason in one line.
    """
    with _compile_errors(
        f"the cache write cannot be compiled by Triton {triton.__version__} "
        "({reason}): values are made finite in a launch of their own."
    ):
        write = CacheWrite.of(attention)
        _in_own_cache(lambda: write.write_nothing(device))
    return write


@contextmanager
def _compile_errors(message: str) -> Iterator[None]:
    """Raise what Triton cannot compile as ``CompileError``, with its reason in the message."""
    try:
        yield
    except Exception as e:  # Triton's exceptions differ between releases
        if _machine_is_at_fault(e):
            raise
        raise CompileError(message.replace("{reason}", _one_line(e))) from e


def _machine_is_at_fault(e: Exception) -> bool:
    """Whether every kernel would fail: out of memory, or a lost GPU. Triton reports the driver's
    out-of-memory error while loading a binary as ``RuntimeError``.
    """
    no_memory = MemoryError, torch.OutOfMemoryError, torch.AcceleratorError
    return isinstance(e, no_memory) or "Triton Error [CUDA]: out of memory" in str(e)


def _in_own_cache(compiling: Callable[[], Result]) -> Result:
    """The result of ``compiling``, with this package's cache folder for binaries if it can be used,
    else Triton's.
    """
    folder = own_folder(settings().cache / "compiled")
    if folder is None:
        return compiling()
    try:
        with triton.knobs.cache.scope():
            # vLLM gives Triton a cache folder for each model while it starts, without binaries
            # that were compiled earlier or in another process
            triton.knobs.cache.dir = str(folder)
            return compiling()
    except OSError:  # the folder is full, or may not be written to
        return compiling()


def _compiled(kernel: Kernel, t: Tensors, query_len: int) -> list[CompiledKernel]:
    """Compile a kernel and merge states."""
    with only_compile() as binaries:
        words = torch.empty(16, dtype=torch.int32, device="meta")
        kernel.launch(dict.fromkeys(kernel.capacity(1).sizes, words), t, 1.0)
        for tokens in (FEW_TOKENS, MANY_TOKENS):
            out = t.out.new_empty(tokens * query_len, *t.out.shape[1:])
            merge_states(
                words.new_empty(tokens + 1), t.partial_out, t.partial_lse, out, t.query_start_loc,
                query_len, t.out_lse, t.extras.sinks, dependent=kernel.starts_merging,
            )  # fmt: skip
    return binaries


def _arguments(
    attention: AttentionConfig, query_len: int, tree: bool, layout: str, lse: bool
) -> Tensors:
    """Tensors without memory that Triton cannot tell from an engine's."""
    num_heads, kv_heads, dim = attention.num_qo_heads, attention.num_kv_heads, attention.head_dim
    dtype = getattr(torch, attention.dtype)
    of_queries = getattr(torch, attention.of_queries)
    of_cache = getattr(torch, attention.of_cache)

    def words(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    def numbers(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        # not empty_like: on meta tensors that imports SymPy, which takes a second
        return torch.empty(shape, dtype=dtype, device="meta")

    q = numbers(64 * query_len, num_heads, dim, dtype=of_queries)
    # vLLM keeps K and V of a token's head side by side, MLA's compressed KV once for both
    width = dim if attention.kv_lora_rank else 2 * dim
    if layout == "HND":
        cache = numbers(8, kv_heads, attention.block_size, width, dtype=of_cache)
        cache = cache.transpose(1, 2)
    else:
        cache = numbers(8, attention.block_size, kv_heads, width, dtype=of_cache)
    first = 0 if attention.kv_lora_rank else dim
    k_cache, v_cache = cache[..., :dim], cache[..., first : first + attention.v_head_dim]
    partials = 16 * query_len
    lens = words(64)

    def scale(quantised: str | None) -> torch.Tensor | None:
        return numbers(1, dtype=torch.float32).expand(kv_heads) if quantised else None

    extras = LayerExtras(
        sinks=numbers(num_heads, dtype=torch.float32) if "sinks" in attention.features else None,
        soft_cap=50.0 if "soft_cap" in attention.features else 0.0,
        alibi_slopes=(
            numbers(num_heads, dtype=torch.float32) if "alibi" in attention.features else None
        ),
        q_scale=scale(attention.query_dtype),
        k_scale=scale(attention.kv_dtype),
        v_scale=scale(attention.kv_dtype),
    )
    return Tensors(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=words(64, 33),
        seq_lens=lens,
        query_start_loc=words(65) if query_len > 1 else lens,
        tree_mask=words(len(q), -(-query_len // 32)) if tree else None,
        partial_out=numbers(partials, num_heads, attention.v_head_dim, dtype=torch.float32),
        partial_lse=numbers(partials, num_heads, dtype=torch.float32),
        out=numbers(*q.shape[:2], attention.v_head_dim),
        extras=extras,
        out_lse=numbers(*q.shape[:2], dtype=torch.float32) if lse else None,
    )


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{': ' + lines[-1].strip() if lines else ''}".rstrip(".")
