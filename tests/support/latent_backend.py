"""The backends for latent KV caches without a GPU: a KV-cache group with an MLA layer, and the
imports that these backends need.

Our kernel's own source runs under Triton's interpreter. FLASH_ATTN_MLA does not run here: a
stand-in computes in float64 what it is asked for, from the metadata that it gets.
"""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention import MLAAttention, mla_attention
from vllm.v1.attention.backends import fa_utils
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from tests.support.gluon_interpreter import load_kernel
from tests.support.gpu_backend import (
    BLOCK,
    Group,
    bare,
    interpret,
    share_whatever_it_costs,
    vllm_config,
)
from tests.support.latent_batches import RANK, SCALE, WIDTH, expected
from tests.support.paged_batches import PagedBatch, relative_error
from tests.support.reference_attention import reference_attention
from vllm_prefixshare.kernels.mla_hopper import launch as kernel

# FLASH_ATTN_MLA imports functions that need a GPU, up to vLLM 0.32 from this package
extension = ModuleType("vllm.vllm_flash_attn")
for module in (extension, fa_utils):
    for name in ("flash_attn_varlen_func", "get_scheduler_metadata"):
        if not hasattr(module, name):
            setattr(module, name, None)
sys.modules[extension.__name__] = extension
from vllm.v1.attention.backends.mla import flashattn_mla  # noqa: E402

del sys.modules[extension.__name__]
from vllm_prefixshare.vllm_plugin.backends.mla import latent, unquantized  # noqa: E402

HEADS = 4
SHAPE = {
    "q_lora_rank": None,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
PREFILL = SimpleNamespace(prepare_metadata=lambda metadata: None, get_name=lambda: "FLASH_ATTN")
SPEC = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": WIDTH, "dtype": torch.float16}


class DCPManager(mla_attention.MLADCPManager):
    """Of a rank that holds a shard, where prefills gather nothing."""

    def __init__(self) -> None:
        pass

    def init_kv_gather(self, *args: object) -> None:
        pass


def interpret_latents(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """As ``interpret``, with the kernel for latents, whose source for the interpreter is written to
    ``folder``; share always.
    """
    source = load_kernel("vllm_prefixshare.kernels.mla_hopper", folder)
    monkeypatch.setattr(kernel, "partial_attention", source)
    # an instruction in assembler, which the interpreter does not run
    monkeypatch.setattr(kernel.LatentHopperKernel, "starts_merging", False)
    interpret(monkeypatch, kernel.LatentHopperKernel)
    monkeypatch.setattr(mla_attention, "PIN_MEMORY", False, raising=False)
    monkeypatch.setattr(flashattn_mla, "flash_attn_supports_mla", lambda: True)
    monkeypatch.setattr(flashattn_mla.FlashAttnMLAImpl, "forward_mqa", stand_in)
    share_whatever_it_costs(monkeypatch)


def stand_in(impl: Any, q: Any, cache: Any, metadata: Any, layer: Any) -> Any:
    """What ``FlashAttnMLAImpl.forward_mqa`` is asked for, in float64."""
    decode = metadata.decode
    q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
    caches = cache[:, :, None], cache[:, :, None, :RANK]
    lists = decode.block_table, decode.seq_lens, decode.query_start_loc
    return reference_attention(q, *caches, *lists, sm_scale=impl.scale).to(q.dtype), None


class LatentGroup(Group):
    """One KV-cache group with one MLA layer, its cache and its V2 block tables.

    dtype: the model's. stored: the cache's, for vLLM. scales: of queries and latents.
    """

    impl_cls, builder_cls = (
        unquantized.PrefixShareMLAImpl,
        unquantized.PrefixShareMLAMetadataBuilder,
    )
    cache, dtype, stored = "auto", torch.float16, torch.float16

    def __init__(
        self, monkeypatch, spec=None, num_heads=HEADS, drafts=0, parallel=None, scales=None
    ) -> None:
        self.config = config = vllm_config(
            drafts,
            parallel_config=parallel or {},
            cache_config={"cache_dtype": self.cache},
            model_config={
                "dtype": self.dtype,
                "max_model_len": 64 * self.block_size,
                "get_head_size": lambda: WIDTH,
            },
            attention_config={"use_prefill_query_quantization": False},
            scheduler_config={"max_num_batched_tokens": 1024},
        )
        for module in (latent, mla_attention):
            monkeypatch.setattr(module, "get_current_vllm_config", lambda: config)
        self.impl = self.impl_cls(
            num_heads=num_heads, head_size=WIDTH, scale=SCALE, num_kv_heads=1, alibi_slopes=None,
            sliding_window=None, kv_cache_dtype=self.cache, logits_soft_cap=None,
            attn_type="decoder", kv_sharing_target_layer_name=None, qk_head_dim=192,
            kv_b_proj=None, **SHAPE,
        )  # fmt: skip
        self.layer = bare(
            MLAAttention, **SHAPE, impl=self.impl, num_heads=num_heads,
            prefill_backend=SimpleNamespace(clone=lambda: PREFILL), dcp_manager=DCPManager(),
            kv_cache=torch.zeros(8, self.block_size, WIDTH, dtype=self.stored),
        )  # fmt: skip
        if spec is None:
            own = {"block_size": self.block_size, "dtype": self.stored}
            spec = MLAAttentionSpec(**{**SPEC, **own})
        self._build(spec, scales or {})

    def add_a_layer_that_is_not_served(self) -> None:
        """Make the builder anew, for two layers."""
        impl = SimpleNamespace(shares=False, num_heads=HEADS)
        self.layers["other"] = bare(MLAAttention, **{**vars(self.layer), "impl": impl})
        self.builder = self.builder_for(self.builder.kv_cache_spec)

    def forward(self, batch: PagedBatch, metadata: object, num_tokens: int) -> torch.Tensor:
        """Output of the rows that are decodes to vLLM, from queries in two parts."""
        q = torch.zeros(num_tokens, *batch.q.shape[1:], dtype=batch.q.dtype)
        q[: len(batch.q)] = batch.q
        parts = q[..., :RANK].contiguous(), q[..., RANK:].contiguous()
        out, lse = self.impl.forward_mqa(parts, batch.k_cache[:, :, 0], metadata, self.layer)
        assert lse is None and out.shape == (num_tokens, HEADS, RANK)
        return out

    def assert_right(self, batch: PagedBatch, padding: int = 0) -> object:
        """Build the step's metadata, run the layer, and compare the output with float64."""
        metadata = self.build(batch, padding)
        out = self.forward(batch, metadata, len(batch.q) + padding)
        assert relative_error(out[: len(batch.q)], expected(batch)[0]) < 2e-3
        return metadata
