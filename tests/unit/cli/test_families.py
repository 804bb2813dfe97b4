"""Layers of families whose files do not say plainly what they have."""

import json

import pytest
from packaging.version import Version

from tests.support.cli_runs import write_model
from tests.unit.cli.test_commands import shape_for_inspect
from vllm_prefixshare.cli.main import main
from vllm_prefixshare.cli.served import falls_back, on_one_gpu
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.settings import settings
from vllm_prefixshare.vllm_plugin.eligibility.checkpoint import layer_kinds

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
    return layer_kinds(write_model(folder, **fields), release)


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
        ("0.33.0", {"model_type": "gemma3"}, True),
        ("0.33.1", {"model_type": "gemma3"}, True),
        ("0.32.0", {"model_type": "gemma3"}, False),
        (None, {"model_type": "gemma3_text"}, False),
        ("0.29.0", {"model_type": "molmo2"}, True),
        (None, {"model_type": "paligemma"}, False),
        (None, {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text"}}, False),
        ("0.29.0", {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text",
         "use_bidirectional_attention": "vision"}}, True),
        (None, {"model_type": "gemma4_unified", "text_config":
         {"model_type": "gemma4_unified_text"}}, True),
        (None, {"model_type": "llama", "is_mm_prefix_lm": True}, True),
    ],
)  # fmt: skip
def test_which_layers_let_the_tokens_of_an_image_see_each_other(
    tmp_path, release, fields, expected
):
    fields = {"head_dim": 64, "global_head_dim": 64, **fields}
    (kind, *_) = kinds_of(tmp_path, release and Version(release), **fields)
    assert kind.use_mm_prefix is expected


LATENT = {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "num_attention_heads": 16,
}
WINDOW = {"sliding_window": 4096}
SINKS = {"model_type": "gpt_oss", "layer_types": ["full_attention"] * 4}


@pytest.mark.parametrize(
    ("fields", "options", "expected"),
    [
        ({}, {"--num-speculative-tokens": 3}, None),
        (LATENT, {"--num-speculative-tokens": 3}, None),
        (LATENT, {"--num-speculative-tokens": 8},
         "8 drafts and multi-head latent attention of more than 3 heads a GPU"),
        (WINDOW, {"--num-speculative-tokens": 3}, "drafts with a sliding window"),
        ({}, {"--decode-context-parallel-size": 2}, None),
        (LATENT, {"--decode-context-parallel-size": 2}, None),
        ({**LATENT, "num_attention_heads": 128}, {"--decode-context-parallel-size": 2},
         "multi-head latent attention of more than 32 heads a GPU"),
        (LATENT, {"--decode-context-parallel-size": 2, "--kv-cache-dtype": "fp8"},
         "an fp8 KV cache under decode context parallelism"),
        (LATENT, {"--decode-context-parallel-size": 2, "--num-speculative-tokens": 1},
         "drafts under decode context parallelism"),
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
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size must be 1 or more, got 0."),
        (["--tensor-parallel-size", "-2"], "--tensor-parallel-size must be 1 or more, got -2."),
    ],
)  # fmt: skip
def test_doctor_refuses_what_vllm_refuses(tmp_path, capsys, options, sentence):
    asked_of_a_model = "the model's" in sentence
    for model in (["--model", str(write_model(tmp_path))], *([] if asked_of_a_model else [[]])):
        assert main(["doctor", *model, *options]) == 2
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
    assert falls_back(on_one_gpu(kind, 1), None) == "head_dim 576"


def saved(folder, model_type, **fields):
    """Save a model's configuration as transformers does; returns it as transformers reads it."""
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(model_type, **fields)
    (folder / "config.json").write_text(theirs.to_json_string(use_diff=False))
    return theirs


def change(folder, **fields):
    """Change fields of a saved configuration; None: leave it out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: x for name, x in config.items() if x is not None}))


def shapes(kinds):
    return [(k.count, k.num_heads, k.num_kv_heads, k.head_size) for k in kinds if k.attention]


@pytest.mark.parametrize(
    ("fields", "full_kv_heads"),
    [({}, 4), ({"num_global_key_value_heads": 2}, 4),
     ({"num_global_key_value_heads": 2, "attention_k_eq_v": True}, 2)],
)  # fmt: skip
def test_full_layers_of_gemma_4_have_a_shape_of_their_own(tmp_path, fields, full_kv_heads):
    """In the words of the published files, and as transformers 5.19 saves them."""
    fields = {"num_hidden_layers": 12, "num_attention_heads": 16, "head_dim": 256,
              "global_head_dim": 512, **fields}  # fmt: skip
    theirs = saved(tmp_path, "gemma4_text", num_key_value_heads=4, **fields)
    types = theirs.layer_types
    expected = [(10, 16, 4, 256), (2, 16, full_kv_heads, 512)]
    if hasattr(theirs, "per_layer_config"):
        layers = {(t, x.num_key_value_heads, x.head_dim) for t, x in
                  zip(types, theirs.per_layer_config, strict=True)}  # fmt: skip
        assert layers == {("sliding_attention", 4, 256), ("full_attention", full_kv_heads, 512)}
    assert shapes(layer_kinds(tmp_path)) == expected
    published = {"model_type": "gemma4_text", "num_key_value_heads": 4, **fields}
    assert shapes(kinds_of(tmp_path, layer_types=types, **published)) == expected
    del published["global_head_dim"]
    assert shapes(kinds_of(tmp_path, layer_types=types, **published)) == expected


def test_layers_that_differ_are_kinds_of_their_own(tmp_path):
    own = {"1": {"head_dim": 128}, "2": {"head_dim": 128, "intermediate_size": 8}}
    kinds = kinds_of(tmp_path, per_layer_config=own)
    assert shapes(kinds) == [(2, 8, 2, 64), (2, 8, 2, 128)]


@pytest.mark.parametrize(("hidden_size", "head_dim"), [(2560, 160), (3584, 224)])
def test_zamba_2_has_wide_heads(tmp_path, hidden_size, head_dim):
    theirs = saved(tmp_path, "zamba2", hidden_size=hidden_size, num_attention_heads=32)
    assert theirs.attention_head_dim == head_dim
    expected = [(theirs.layers_block_type.count("hybrid"), 32, 32, head_dim)]
    assert shapes(layer_kinds(tmp_path)) == expected
    change(tmp_path, attention_head_dim=None)
    assert shapes(layer_kinds(tmp_path)) == expected


def test_minicpm3_has_plain_attention(tmp_path):
    theirs = saved(tmp_path, "minicpm3")
    assert theirs.qk_nope_head_dim + theirs.qk_rope_head_dim == 96
    kinds = layer_kinds(tmp_path)
    assert shapes(kinds) == [(62, 40, 40, 96)]
    assert not kinds[0].use_mla and falls_back(kinds[0], None) is None
    assert shape_for_inspect(tmp_path).head_dim == 96
    change(tmp_path, qk_nope_head_dim="wide")
    with pytest.raises(PrefixShareError, match="does not describe a model"):
        shape_for_inspect(tmp_path)


def test_nemotron_h_may_list_its_layers_alone(tmp_path):
    blocks = ["linear_attention", "moe", "full_attention", "mlp", "full_attention"]
    theirs = saved(tmp_path, "nemotron_h", layers_block_type=blocks)
    assert "num_hidden_layers" not in json.loads((tmp_path / "config.json").read_text())
    assert theirs.num_hidden_layers == 5
    kinds = layer_kinds(tmp_path)
    assert shapes(kinds) == [(2, 32, 8, 128)]
    assert sum(kind.count for kind in kinds) == 5


def test_chatglm_has_another_word_for_its_layers(tmp_path):
    from vllm.transformers_utils.configs.chatglm import ChatGLMConfig

    theirs = ChatGLMConfig(num_layers=40, multi_query_attention=True, multi_query_group_num=2)
    (tmp_path / "config.json").write_text(theirs.to_json_string(use_diff=False))
    kinds = layer_kinds(tmp_path)
    assert theirs.num_hidden_layers == 40
    assert shapes(kinds) == [(40, 32, 2, 128)]


def test_longcat_flash_has_two_attentions_in_a_layer(tmp_path):
    theirs = saved(tmp_path, "longcat_flash", num_layers=14)
    assert theirs.num_hidden_layers == 28
    assert shapes(layer_kinds(tmp_path)) == [(28, 64, 64, 576)]
    # some files count the attentions besides
    change(tmp_path, num_layers=14, num_hidden_layers=28)
    assert shapes(layer_kinds(tmp_path)) == [(28, 64, 64, 576)]


def test_plamo2_names_the_width_of_its_heads(tmp_path):
    kinds = kinds_of(tmp_path, model_type="plamo2", hidden_size_per_head=128)
    assert shapes(kinds) == [(4, 8, 2, 128)]


def test_step3p5_names_groups_of_heads(tmp_path):
    shape = {"num_attention_heads": 8, "num_attention_groups": 4, "hidden_size": 512}
    fields = {"model_type": "step3p5", "num_hidden_layers": 4, **shape}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert shapes(layer_kinds(tmp_path)) == [(4, 8, 4, 64)]


@pytest.mark.parametrize("text", [{"model_type": "llama"}, {"model_type": "mistral"}])
def test_text_models_that_are_as_by_default_say_nothing(tmp_path, text):
    """As llava-1.5-7b-hf and pixtral-12b are published."""
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(**text)
    whole = {"model_type": "llava", "text_config": {"vocab_size": 32064, **text}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    (kind,) = layer_kinds(tmp_path)
    heads, kv_heads = theirs.num_attention_heads, theirs.num_key_value_heads
    assert shapes([kind]) == [(theirs.num_hidden_layers, heads, kv_heads, theirs.head_dim)]
    assert kind.sliding_window == getattr(theirs, "sliding_window", None)
    whole["text_config"] |= {"sliding_window": None, "hidden_size": 5120, "head_dim": 160}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    (kind,) = layer_kinds(tmp_path)
    assert (kind.head_size, kind.name) == (160, "full attention")


@pytest.mark.parametrize("model_type", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_the_text_model_of_one_that_speaks_is_found(tmp_path, model_type):
    text = {"num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 2,
            "hidden_size": 2048}  # fmt: skip
    theirs = saved(tmp_path, model_type, thinker_config={"text_config": text})
    assert theirs.get_text_config().num_hidden_layers == 6
    assert shapes(layer_kinds(tmp_path)) == [(6, 16, 2, 128)]
