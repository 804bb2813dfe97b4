"""What ``doctor`` makes of a model's file is what vLLM's own code makes of it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm
from transformers import AutoConfig, GraniteConfig
from vllm.config import ModelConfig
from vllm.model_executor.models.granite import granite_layer_attn_params

from vllm_prefixshare.vllm_plugin.compat import vllm_version
from vllm_prefixshare.vllm_plugin.eligibility.checkpoint import layer_kinds

MODELS = Path(vllm.__file__).parent / "model_executor" / "models"


def mm_prefix_by_vllm(whole, part, images: bool = True) -> bool:
    """``is_mm_prefix_lm`` of vLLM's configuration for layers made from ``part`` of a model."""
    model = SimpleNamespace(
        hf_config=part,
        hf_text_config=whole.get_text_config(),
        _supports_multimodal_for_mm_prefix=lambda: images,
        revision=None,
    )
    return ModelConfig.get_model_arch_config(model).is_mm_prefix_lm


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("gemma3", {}),
        ("gemma3_text", {}),
        ("gemma4", {}),
        ("gemma4", {"use_bidirectional_attention": "vision"}),
        ("gemma4_text", {"use_bidirectional_attention": "vision"}),
        ("paligemma", {}),
        ("llama", {}),
    ],
)
def test_images_see_each_other_where_vllm_tells_the_layers(tmp_path, model_type, fields):
    whole = AutoConfig.for_model(model_type)
    part = whole.get_text_config()
    for name, value in fields.items():
        setattr(part, name, value)
    # as the model's class does before it makes its text model
    if model_type == "gemma3" and "text_config.is_mm_prefix_lm" in _source("gemma3_mm"):
        part.is_mm_prefix_lm = True
    wanted = mm_prefix_by_vllm(whole, part)
    assert wanted == (bool(fields) or (model_type == "gemma3" and vllm_version().minor >= 33))

    shape = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
             "hidden_size": 512}  # fmt: skip
    text = {"model_type": part.model_type, **shape, **fields}
    file = text if part is whole else {"model_type": model_type, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(file))
    (kind, *_) = layer_kinds(tmp_path)
    assert kind.use_mm_prefix == wanted
    assert not mm_prefix_by_vllm(whole, part, images=False)


def _source(model: str) -> str:
    return (MODELS / f"{model}.py").read_text()


@pytest.mark.parametrize("model", ["gemma3_mm", "gemma4_mm", "paligemma"])
def test_layers_are_made_from_the_configuration_of_the_text_model(model):
    made = _source(model).split("init_vllm_registered_model(\n")[1]
    assert "hf_config=config.text_config," in made.split(")")[0]


@pytest.mark.parametrize("model", ["molmo2", "moondream3"])
def test_layers_are_made_from_the_configuration_of_the_whole_model(model):
    assert "init_vllm_registered_model" not in _source(model)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"layer_types": ["full_attention"] * 2, "attention_sinks": False},
        {"attention_sinks": True},
    ],
)
def test_granite_has_sinks_as_in_vllm(tmp_path, fields):
    shape = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512}
    config = GraniteConfig(**shape, **fields, sliding_window=512)
    _, _, wanted = granite_layer_attn_params(config, 0)
    file = {"model_type": "granite", "sliding_window": None, **shape, **fields}
    (tmp_path / "config.json").write_text(json.dumps(file))
    assert {kind.has_sink for kind in layer_kinds(tmp_path)} == {wanted}


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("laguna", ["swa_attention_sink_enabled"]),
        ("mimo_v2", ["add_swa_attention_sink_bias", "hybrid_layer_pattern", "swa_head_dim",
                     "swa_v_head_dim", "swa_num_attention_heads", "swa_num_key_value_heads",
                     "sliding_window_size", "self.v_head_dim != self.head_dim"]),
        ("openpangu", ["v_channels", "FlashAttentionDiffKVBackend"]),
        ("step1", ["alibi_slopes=alibi_slopes"]),
        ("bloom", ["alibi_slopes=alibi_slopes"]),
        ("falcon", ["config.alibi"]),
    ],
)  # fmt: skip
def test_vllm_reads_the_fields_that_doctor_reads(model, fields):
    source = _source(model)
    assert [name for name in fields if name not in source] == []
