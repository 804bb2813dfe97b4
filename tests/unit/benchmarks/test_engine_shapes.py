"""The models that ``benchmarks.engine`` times (``benchmarks/engine/shapes.py``), as this package
and vLLM read them, and their random weights.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.engine import bench as bench_engine
from benchmarks.engine.shapes import SHAPES
from benchmarks.engine.workloads import has_experts, kv_bytes_per_token
from tests.support.dummy_model import write_llama_8b
from tests.support.engine import Answer, Batch
from vllm_prefixshare.vllm_plugin.eligibility.checkpoint import layer_kinds

PUBLISHED = json.loads((Path(__file__).parents[2] / "docs" / "models.json").read_text())
#: shape -> the model with its published configuration, and bytes of a token in 16 bits
MODELS = {
    "8b": ("Llama-3.1-8B", 32 * 8 * 128 * 4),
    "gemma3-12b": ("Gemma-3-12B", 48 * 8 * 256 * 4),
    "gpt-oss-20b": ("gpt-oss-20b", 24 * 8 * 64 * 4),
    "qwen3-next": ("Qwen3-Next-80B-A3B", 12 * 2 * 256 * 4),
    "deepseek-v2-lite": ("DeepSeek-V2-Lite", 27 * 576 * 2),
}
#: what makes the models small
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts": 16,
    "n_routed_experts": 8,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}


@pytest.mark.parametrize("shape", MODELS)
def test_layers_are_those_of_the_published_model(shape, tmp_path):
    model, kv_bytes = MODELS[shape]
    folders = tmp_path / "ours", tmp_path / "published"
    write_llama_8b(folders[0], **SHAPES[shape].fields)
    folders[1].mkdir()
    fields = {"torch_dtype": "bfloat16", **PUBLISHED[model]}
    (folders[1] / "config.json").write_text(json.dumps(fields))
    # a text model has no images whose tokens see one another
    ours, published = (
        [replace(kind, use_mm_prefix=False) for kind in layer_kinds(f)] for f in folders
    )
    assert ours == published
    config = json.loads((folders[0] / "config.json").read_text())
    assert kv_bytes_per_token(config) == kv_bytes


@pytest.fixture
def built(shape: str, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A worker with a small model of ``shape``, as vLLM makes it before weights are loaded."""
    pytest.importorskip("vllm")
    from vllm import distributed
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    fields = SHAPES[shape].fields
    small = {name: size for name, size in SMALL.items() if name in fields or "exp" not in name}
    if kinds := fields.get("layer_types"):
        small["layer_types"] = kinds[: SMALL["num_hidden_layers"]]
    write_llama_8b(tmp_path / "model", **{**fields, **small})
    args = EngineArgs(model=str(tmp_path / "model"), skip_tokenizer_init=True, load_format="dummy")
    config = args.create_engine_config()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(config):
            rendezvous = f"file://{tmp_path / 'rendezvous'}"
            distributed.init_distributed_environment(1, 0, rendezvous, 0, "gloo")
            distributed.initialize_model_parallel(1)
            model = initialize_model(vllm_config=config)
            torch.set_default_dtype(before)
            yield SimpleNamespace(
                model_config=config.model_config,
                parallel_config=config.parallel_config,
                rank=0,
                get_model=lambda: model,
            )
    finally:
        torch.set_default_dtype(before)
        distributed.destroy_model_parallel()
        distributed.destroy_distributed_environment()


def score_deviation(attention: Any, config: Any) -> float:
    """Standard deviation of the scores that an attention layer has for random inputs."""
    heads, kv_heads, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    x = torch.randn(256, config.hidden_size, generator=torch.Generator().manual_seed(1))

    def project(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ layer.weight.data.float().T

    if hasattr(attention, "kv_b_proj"):
        nope, rank = config.qk_nope_head_dim, config.kv_lora_rank
        q = project(attention.q_proj, x).view(len(x), heads, -1)
        latent = project(attention.kv_a_proj_with_mqa, x)
        keys = project(attention.kv_b_proj, latent[:, :rank]).view(len(x), heads, -1)[..., :nope]
        k = torch.cat([keys, latent[:, None, rank:].expand(-1, heads, -1)], -1)
        return (torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5).std().item()
    gates = 2 if getattr(attention, "attn_output_gate", False) else 1
    sizes = [heads * d * gates, kv_heads * d, kv_heads * d]
    q, k, _ = project(attention.qkv_proj, x).split(sizes, -1)
    q, k = q.view(len(x), heads, -1)[..., :d], k.view(len(x), kv_heads, d)
    if hasattr(attention, "q_norm"):
        q, k = (
            y / y.pow(2).mean(-1, keepdim=True).sqrt() * (1 + norm.weight.data.float())
            for y, norm in ((q, attention.q_norm), (k, attention.k_norm))
        )
    k = k.repeat_interleave(heads // kv_heads, 1)
    return (torch.einsum("qhd,khd->hqk", q, k) * d**-0.5).std().item()


@pytest.mark.parametrize("shape", MODELS)
def test_random_weights_are_as_large_as_trained_ones(built, shape):
    from benchmarks.engine.worker import SCORE_DEVIATION, BenchWorker

    model, config = built.get_model(), built.model_config.hf_text_config
    for weight in model.parameters():
        weight.data.fill_(torch.nan)
    latent = [m for m in model.modules() if hasattr(m, "impl") and hasattr(m, "kv_b_proj")]
    assert bool(latent) == (shape == "deepseek-v2-lite")
    for layer in latent:  # as when weights are loaded
        heads, rank = layer.num_heads, layer.kv_lora_rank
        for name, size in (
            ("W_UK_T", (heads, layer.qk_nope_head_dim, rank)),
            ("W_UV", (heads, rank, layer.v_head_dim)),
        ):
            empty = torch.full(size, torch.nan, dtype=torch.bfloat16)
            setattr(layer, name, torch.nn.Parameter(empty))
    drawn = BenchWorker.randomize_weights(built)

    parameters = dict(model.named_parameters())
    assert all(weight.isfinite().all() for weight in parameters.values())
    absorbed = sum(layer.W_UK_T.numel() + layer.W_UV.numel() for layer in latent)
    assert drawn == sum(weight.numel() for weight in parameters.values()) - absorbed
    for name, weight in parameters.items():
        if weight.ndim > 1 and not name.endswith("bias") and "W_U" not in name:
            gain = weight.float().pow(2).sum(-1).mean().item()
            if "embed" in name:
                gain /= weight.shape[1]
            assert 0.8 < gain < 1.1 * SCORE_DEVIATION**2, name
    for layer in latent:
        w = layer.kv_b_proj.weight.view(layer.num_heads, -1, layer.kv_lora_rank)
        x = torch.randn(3, layer.kv_lora_rank).bfloat16()
        expanded = torch.einsum("tl,nol->tno", x, w)
        keys = torch.einsum("tl,npl->tnp", x, layer.W_UK_T)
        values = torch.einsum("tl,nlv->tnv", x, layer.W_UV)
        torch.testing.assert_close(torch.cat([keys, values], -1), expanded)

    attentions = [
        module
        for module in model.modules()
        if hasattr(module, "o_proj") and (hasattr(module, "qkv_proj") or hasattr(module, "q_proj"))
    ]
    assert attentions
    for attention in attentions:
        found = score_deviation(attention, config)
        assert found == pytest.approx(SCORE_DEVIATION, rel=0.15)


def test_a_parameter_that_no_such_model_has_is_refused():
    from benchmarks.engine.worker import Drawing, _draw

    with pytest.raises(ValueError, match="parameter a of shape"):
        _draw("a", torch.empty(0), Drawing(1.0, False, False), 0)


def test_host_time_is_that_of_full_attention():
    pytest.importorskip("vllm")
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from benchmarks.engine.worker import BenchWorker

    class Builder:
        def build(self, common_prefix_len: int, common_attn_metadata: Any) -> SimpleNamespace:
            return SimpleNamespace()  # FlashInfer's metadata has no max_query_len

    def group(spec: Any) -> SimpleNamespace:
        builder = Builder()
        return SimpleNamespace(kv_cache_spec=spec, get_metadata_builder=lambda: builder)

    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    groups = [[group("states")], [group(full)]]
    worker = SimpleNamespace(model_runner=SimpleNamespace(attn_groups=groups))
    assert BenchWorker.metadata_times(worker) == []
    for (each,) in groups:
        build = each.get_metadata_builder().build
        build(0, SimpleNamespace(max_query_len=1))
        build(common_prefix_len=0, common_attn_metadata=SimpleNamespace(max_query_len=2))
    assert len(BenchWorker.metadata_times(worker)) == 1


def test_which_shapes_have_experts(tmp_path):
    found = set()
    for shape in SHAPES:
        write_llama_8b(tmp_path / shape, **SHAPES[shape].fields)
        if has_experts(json.loads((tmp_path / shape / "config.json").read_text())):
            found.add(shape)
    assert found == {
        "gpt-oss-20b",
        "gpt-oss-20b-4-experts",
        "qwen3-next",
        "deepseek-v2-lite",
    }


class Rounding:
    """An engine whose answers part from the others' at a token that depends on its batch."""

    def __init__(self, parts_at: dict[int, int]) -> None:
        self.parts_at = parts_at

    def generate(self, prompts: list[list[int]], tokens: int, **options: Any) -> Batch:
        at = self.parts_at[len(prompts)]
        ids = tuple(range(at)) + (900 + len(prompts),) * (tokens - at)
        answer = Answer("", ids, 1, 0, (1.0,) * tokens)
        return Batch((answer,) * len(prompts), 1.0, 1.0)


@pytest.mark.parametrize(
    ("shape", "ours", "alone", "wrong"),
    [
        ("gpt-oss-20b", 3, 8, False),
        ("gpt-oss-20b", 2, 8, True),
        ("gpt-oss-20b", 2, 4, False),
        ("gpt-oss-20b-4-experts", 2, 8, True),
        ("8b", 16, 8, False),
        ("8b", 12, 8, True),
    ],
)
def test_tokens_of_experts_are_compared_with_stocks_own(
    monkeypatch, tmp_path, shape, ours, alone, wrong
):
    """A lead of 1.0 is clear. Stock's answers part after 6 tokens if its batch is half as large,
    after ``alone`` in one of a single request; those of PREFIX_SHARE, in the whole batch, after
    ``ours``.
    """
    write_llama_8b(tmp_path, **SHAPES[shape].fields)
    engines = {
        bench_engine.STOCK: Rounding({8: 16, 4: 6, 1: alone}),
        bench_engine.PREFIX_SHARE: Rounding({8: ours}),
    }
    bench = bench_engine.Bench(bench_engine.parse([]), tmp_path, engines)
    agreement = bench.compare([[1]] * 8)
    assert agreement["largest_gap"] == (1.0 if ours < 16 else 0.0)
    assert bench_engine.is_wrong(agreement, 0.3) == wrong
    monkeypatch.setattr(bench_engine, "ALONE", 3)
    assert bench.compare([[1]] * 8) == agreement
    if shape != "8b":
        assert agreement["tokens_in_common"] == ours
        assert agreement["tokens_in_common_stock"] == {"halves": 6, "alone": alone}
        assert agreement["largest_gap_stock"] == {"halves": 1.0, "alone": 1.0}
