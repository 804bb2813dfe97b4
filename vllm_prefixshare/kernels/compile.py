"""Compile what an executor will launch, before it does: can the kernel serve here?"""

from typing import Any

import torch
import triton

from vllm_prefixshare import envs
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.contract import Gpu, Kernel, Tensors
from vllm_prefixshare.kernels.launching import only_compile
from vllm_prefixshare.kernels.merge_states import merge_states
from vllm_prefixshare.records import PrefixShareError

#: query tokens on both sides of where merge states takes wider programs
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
) -> list[Any]:
    """Compile all that a ``GpuExecutor`` launches for a layer; nothing runs. Launches that
    follow in this process find it in memory.

    Args:
        tree: with a mask of token trees, which engines do not pass.
        layout: of the KV cache in memory, NHD or HND.

    Returns:
        Triton's ``CompiledKernel`` of each launch.

    Raises:
        CompileError: with Triton's reason in one line.
    """
    try:
        with triton.knobs.cache.scope(), only_compile() as binaries:
            # Not where vLLM points Triton, half-way through its start, to a folder for each
            # model: what is compiled before that, or beside it, would be compiled again.
            triton.knobs.cache.dir = str(envs.get("VLLM_PREFIXSHARE_CACHE") / "compiled")
            arguments = _arguments(attention, query_len, tree, layout)
            words = torch.empty(16, dtype=torch.int32, device="meta")
            kernel.launch(dict.fromkeys(kernel.capacity(1).sizes, words), arguments, 1.0)
            for tokens in (FEW_TOKENS, MANY_TOKENS):
                out = arguments.out.new_empty(tokens * query_len, *arguments.out.shape[1:])
                merge_states(
                    words.new_empty(tokens + 1), arguments.partial_out, arguments.partial_lse,
                    out, arguments.query_start_loc, query_len,
                )  # fmt: skip
    except Exception as e:  # whatever a Triton that we do not know may raise
        raise CompileError(
            f"kernel '{kernel.name}' cannot be compiled by Triton {triton.__version__} for "
            f"compute capability {gpu.capability[0]}.{gpu.capability[1]}: {_one_line(e)}."
        ) from e
    for binary in binaries:
        if binary is not None and binary.metadata.shared > gpu.shared_memory:
            raise CompileError(
                f"kernel '{kernel.name}' needs {binary.metadata.shared} bytes of shared memory "
                f"and a thread block of this GPU may have {gpu.shared_memory}."
            )
    return binaries


def _arguments(attention: AttentionConfig, query_len: int, tree: bool, layout: str) -> Tensors:
    """Tensors without memory, as an engine passes them as far as Triton looks at them."""
    num_heads, kv_heads, dim = attention.num_qo_heads, attention.num_kv_heads, attention.head_dim
    dtype = getattr(torch, attention.dtype)

    def words(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    q = torch.empty(64 * query_len, num_heads, dim, dtype=dtype, device="meta")
    # vLLM keeps K and V of a token's head side by side
    if layout == "HND":
        cache = q.new_empty(8, kv_heads, attention.block_size, 2 * dim).transpose(1, 2)
    else:
        cache = q.new_empty(8, attention.block_size, kv_heads, 2 * dim)
    k_cache, v_cache = cache.split(dim, dim=-1)
    partial_out = torch.empty(16 * query_len, num_heads, dim, device="meta")
    lens = words(64)
    return Tensors(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=words(64, 33),
        seq_lens=lens,
        query_start_loc=words(65) if query_len > 1 else lens,
        tree_mask=words(len(q), -(-query_len // 32)) if tree else None,
        partial_out=partial_out,
        partial_lse=partial_out.new_empty(partial_out.shape[:2]),
        out=torch.empty_like(q),
    )


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{': ' + lines[-1].strip() if lines else ''}".rstrip(".")
