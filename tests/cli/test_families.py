"""Layers of families whose files do not say plainly what they have."""

import json

import pytest
from packaging.version import Version

from tests.cli.test_commands import write_model
from vllm_prefixshare.cli.main import main
from vllm_prefixshare.cli.model import layer_kinds, read_config
from vllm_prefixshare.cli.served import falls_back, on_one_gpu
from vllm_prefixshare.integration.support import Engine
from vllm_prefixshare.settings import settings

ALIBI = "ALiBi slopes"
MIMO = {
    "model_type": "mimo_v2_flash",
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "sliding_window_size": 128,
    "add_swa_attention_sink_bias": True,
    "hybrid_layer_pattern": [0, 1, 1, 0],
}


def kinds_of(folder, release=None, **fields):
    return layer_kinds(folder, read_config(write_model(folder, **fields)), release)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_type": "bloom"}, ALIBI),
        ({"model_type": "mpt"}, ALIBI),
        ({"model_type": "mpt", "attn_config": {"kv_n_heads": 2}}, ALIBI),
        ({"model_type": "mpt", "attn_config": {"alibi": True}}, ALIBI),
        ({"model_type": "mpt", "attn_config": {"alibi": False}}, None),
        ({"model_type": "falcon", "alibi": True}, ALIBI),
        ({"model_type": "falcon", "alibi": False}, None),
        ({"model_type": "jais", "position_embedding_type": "alibi"}, ALIBI),
        ({"model_type": "jais", "position_embedding_type": "learned"}, None),
        ({"model_type": "baichuan", "hidden_size": 5120, "num_attention_heads": 40}, ALIBI),
        ({"model_type": "baichuan", "hidden_size": 4096, "num_attention_heads": 32}, None),
        ({"model_type": "step1"}, ALIBI),
    ],
)
def test_which_families_have_alibi_slopes(tmp_path, fields, expected):
    (kind,) = kinds_of(tmp_path, **fields)
    assert falls_back(kind, None) == expected


TYPES = ["full_attention", "sliding_attention"] * 2


@pytest.mark.parametrize(
    ("fields", "full", "sliding"),
    [
        ({"model_type": "gpt_oss"}, True, True),
        ({"model_type": "flint"}, True, True),
        ({"model_type": "granite"}, True, True),
        ({"model_type": "granitemoe", "attention_sinks": False}, False, False),
        ({"model_type": "granitemoehybrid"}, False, False),
        ({"model_type": "laguna", "swa_attention_sink_enabled": True}, False, True),
        ({"model_type": "laguna"}, False, False),
        ({"model_type": "llama"}, False, False),
    ],
)
def test_which_layers_have_sinks(tmp_path, fields, full, sliding):
    kinds = kinds_of(tmp_path, layer_types=TYPES, sliding_window=512, **fields)
    assert [kind.has_sink for kind in kinds] == [full, sliding]


def test_mimo_has_a_backend_of_its_own_where_values_are_narrower(tmp_path):
    full, sliding = kinds_of(tmp_path, **MIMO)
    assert (full.count, full.num_kv_heads, full.has_sink, full.sliding_window) == (
        2,
        2,
        False,
        None,
    )
    assert (sliding.count, sliding.num_kv_heads, sliding.sliding_window) == (2, 4, 128)
    for kind in (full, sliding):
        assert falls_back(kind, None) == "keys of 192 and values of 128"
    full, sliding = kinds_of(tmp_path, **MIMO | {"v_head_dim": 192, "swa_v_head_dim": 192})
    assert falls_back(full, None) is falls_back(sliding, None) is None
    assert (full.has_sink, sliding.has_sink) == (False, True)


@pytest.mark.parametrize(
    ("release", "fields", "expected"),
    [
        (None, {"model_type": "gemma3"}, True),
        ("0.33.1", {"model_type": "gemma3"}, True),
        ("0.32.0", {"model_type": "gemma3"}, False),
        (None, {"model_type": "gemma3_text"}, False),
        ("0.26.0", {"model_type": "molmo2"}, True),
        (None, {"model_type": "paligemma"}, False),
        (None, {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text"}}, False),
        ("0.26.0", {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text",
         "use_bidirectional_attention": "vision"}}, True),
        (None, {"model_type": "gemma4_unified", "text_config":
         {"model_type": "gemma4_unified_text"}}, True),
        (None, {"model_type": "llama", "is_mm_prefix_lm": True}, True),
    ],
)  # fmt: skip
def test_which_layers_let_the_tokens_of_an_image_see_each_other(
    tmp_path, release, fields, expected
):
    (kind, *_) = kinds_of(tmp_path, release and Version(release), head_dim=64, **fields)
    wanted = "bidirectional multimodal prefixes" if expected else None
    assert falls_back(kind, None) == wanted


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 16}
WINDOW = {"sliding_window": 4096}
SINKS = {"model_type": "gpt_oss"}


@pytest.mark.parametrize(
    ("fields", "options", "expected"),
    [
        ({}, {"--num-speculative-tokens": 3}, None),
        (LATENT, {"--num-speculative-tokens": 3}, "drafts with multi-head latent attention"),
        (WINDOW, {"--num-speculative-tokens": 3}, "drafts with a sliding window"),
        ({}, {"--decode-context-parallel-size": 2}, None),
        (LATENT, {"--decode-context-parallel-size": 2}, "decode context parallelism"),
        (WINDOW, {"--decode-context-parallel-size": 2},
         "a sliding window under decode context parallelism"),
        (SINKS, {"--decode-context-parallel-size": 2},
         "attention sinks under decode context parallelism"),
        ({}, {"--decode-context-parallel-size": 2, "--kv-cache-dtype": "fp8"},
         "an fp8 KV cache under decode context parallelism"),
        ({"model_type": "bloom"}, {"--decode-context-parallel-size": 2},
         "ALiBi slopes under decode context parallelism"),
        ({}, {"--decode-context-parallel-size": 2, "--num-speculative-tokens": 1},
         "drafts under decode context parallelism"),
    ],
)  # fmt: skip
def test_doctor_knows_what_drafts_and_shards_rule_out(
    tmp_path, monkeypatch, capsys, fields, options, expected
):
    monkeypatch.setenv("VLLM_PREFIXSHARE_EXPERIMENTAL", "alibi")
    settings.cache_clear()
    monkeypatch.setattr("vllm_prefixshare.cli.doctor.CHECKS", {})
    model = write_model(tmp_path, **fields)
    options = {"--tensor-parallel-size": 4, **options}
    words = [str(word) for pair in options.items() for word in pair]
    main(["doctor", "--json", "--model", str(model), *words])
    (layer,) = json.loads(capsys.readouterr().out)["layers"]
    assert layer["falls_back"] == expected


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--decode-context-parallel-size", "2"], "must divide --tensor-parallel-size 1, got 2."),
        (["--decode-context-parallel-size", "0"], "must divide --tensor-parallel-size 1, got 0."),
        (["--tensor-parallel-size", "2", "--decode-context-parallel-size", "2"],
         "at most --tensor-parallel-size 2 divided by the model's 2 KV heads, got 2."),
        (["--num-speculative-tokens", "-1"], "must be from 0 to 1024, got -1."),
        (["--num-speculative-tokens", "9999"], "must be from 0 to 1024, got 9999."),
        (["--tensor-parallel-size", "0"], "must divide the model's 8 query heads, got 0."),
    ],
)  # fmt: skip
def test_doctor_refuses_numbers_that_vllm_refuses(tmp_path, capsys, options, sentence):
    assert main(["doctor", "--model", str(write_model(tmp_path)), *options]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("fields", "on_cpu", "drafts", "expected"),
    [
        ({}, None, 0, None),
        ({}, True, 0, "batch invariance"),
        (LATENT, None, 0, "batch invariance"),
        ({}, None, 2, "drafts under batch invariance"),
        (WINDOW, None, 0, "a sliding window under batch invariance"),
    ],
)
def test_doctor_knows_what_batch_invariance_rules_out(
    tmp_path, monkeypatch, capsys, fields, on_cpu, drafts, expected
):
    def platform(machine):
        machine.on_cpu = on_cpu
        return ""

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr("vllm_prefixshare.cli.doctor.CHECKS", {"platform": platform})
    model = str(write_model(tmp_path, **fields))
    main(["doctor", "--json", "--model", model, "--num-speculative-tokens", str(drafts)])
    (layer,) = json.loads(capsys.readouterr().out)["layers"]
    assert layer["falls_back"] == expected


def test_latents_of_another_rank_are_not_served(tmp_path):
    (kind,) = kinds_of(tmp_path, **LATENT | {"kv_lora_rank": 256, "qk_rope_head_dim": 320})
    assert falls_back(on_one_gpu(kind, 1), None, Engine()) == "head_dim 576"
