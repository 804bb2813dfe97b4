"""The commands: what each prints, and one sentence with exit status 2 for a mistake."""

import argparse
import json
import os
import re
import shlex
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.embedded_model import embedded_model_path
from tests.support.cli_runs import run, write_model
from vllm_prefixshare import __version__
from vllm_prefixshare.cli import doctor
from vllm_prefixshare.cli.main import COMMANDS, main, parser
from vllm_prefixshare.cli.options import HelpFormatter, attention_of
from vllm_prefixshare.cli.served import falls_back, on_one_gpu
from vllm_prefixshare.config import FP8, AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.kernels.cpu.executor import cpu_executor
from vllm_prefixshare.planning.costs import lookup
from vllm_prefixshare.planning.costs.table import CostTable, Grid
from vllm_prefixshare.planning.dividers.registry import DIVIDERS
from vllm_prefixshare.settings import read, settings
from vllm_prefixshare.vllm_plugin import compat, signatures
from vllm_prefixshare.vllm_plugin.eligibility import platform as platforms
from vllm_prefixshare.vllm_plugin.eligibility.checkpoint import LayerKind, layer_kinds
from vllm_prefixshare.vllm_plugin.eligibility.rules import refusal

#: of the user, not of a test
CACHE = read(os.environ).cache


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PREFIXSHARE_CACHE", str(tmp_path))


def shape_for_inspect(folder: Path) -> AttentionConfig:
    return attention_of(parser().parse_args(["inspect", "--model", str(folder)]))


def test_doctor_finds_everything_in_place(tmp_path):
    model = write_model(tmp_path, layer_types=["full_attention", "sliding_attention"] * 2)
    done = run("doctor", "--model", str(model))
    assert done.returncode == 0, done.stdout
    assert "ok      plugin      registered" in done.stdout
    assert "2 full attention, head_dim 64: served" in done.stdout
    assert "2 sliding attention, head_dim 64: keep vLLM's own backend (a sliding" in done.stdout
    assert done.stdout.endswith("PREFIX_SHARE can be chosen\n")


@pytest.mark.parametrize(
    ("value", "expected"),
    [("auto", "all parts; "), ("off", "off"), ("lookup,hashes", "hashes, lookup; ")],
)
def test_doctor_names_the_active_parts_of_shared_host_work(monkeypatch, value, expected):
    monkeypatch.setenv("VLLM_PREFIXSHARE_PROMPTS", value)
    assert doctor.host_work(doctor.Machine([])).startswith(expected)


@pytest.mark.parametrize(
    ("installed", "variable", "advice"),
    [
        (None, "", "with pip install 'fastokens>=0.3.5' and VLLM_USE_FASTOKENS=1"),
        (True, "0", "; new text is tokenized faster with VLLM_USE_FASTOKENS=1"),
        (True, "1", "all parts"),
    ],
)
def test_doctor_names_fastokens_where_it_would_help(monkeypatch, installed, variable, advice):
    monkeypatch.setattr(doctor, "find_spec", lambda name: installed)
    monkeypatch.setenv("VLLM_USE_FASTOKENS", variable)
    assert doctor.host_work(doctor.Machine([])).endswith(advice)


def test_doctor_refuses_fastokens_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setenv("VLLM_USE_FASTOKENS", "1")
    with pytest.raises(PrefixShareError, match="needs fastokens: pip install"):
        doctor.host_work(doctor.Machine([]))


def test_doctor_says_whether_a_tokenizer_can_be_cut(tmp_path):
    path = embedded_model_path(CACHE)
    assert "known text is not tokenized again" in doctor.host_work(doctor.Machine([], model=path))
    machine = doctor.Machine([], model=tmp_path)
    assert "no tokenizer that could be checked" in doctor.host_work(machine)
    (tmp_path / "tokenizer.json").write_text("{")
    assert "the tokenizer cannot be loaded (" in doctor.host_work(machine)
    for file in path.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    changed = json.loads((tmp_path / "tokenizer.json").read_text())
    changed["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    assert "of this model is left to vLLM (" in doctor.host_work(machine)


@pytest.mark.parametrize("fields", [{"head_dim": 48}, {"layer_types": ["mamba"] * 4}])
def test_doctor_says_that_no_layer_would_be_served(tmp_path, monkeypatch, capsys, fields):
    monkeypatch.setattr(doctor, "CHECKS", {})
    assert main(["doctor", "--model", str(write_model(tmp_path, **fields))]) == 0
    end = "PREFIX_SHARE can be chosen, but would serve no layer of this model\n"
    assert capsys.readouterr().out.endswith(end)


def test_doctor_says_as_json_all_that_is_wrong(tmp_path):
    table = tmp_path / "table.json"
    table.write_text("{}")
    done = run("doctor",
        "--json",
        "--model", str(write_model(tmp_path, model_type="deepseek_v3", kv_lora_rank=512)),
        VLLM_PREFIXSHARE_DIVIDER="best",
        VLLM_PREFIXSHARE_COST_TABLE=str(table),
        VLLM_PREFIXSHARE_STRICT="1",
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    report = json.loads(done.stdout)
    assert not report["ok"]
    failed = {c["check"]: c["says"] for c in report["checks"] if not c["ok"]}
    assert failed.keys() == {"settings", "strict"}
    assert "divider 'best' is unknown" in failed["settings"]
    assert "a layer would fall back (multi-head latent attention)" in failed["strict"]
    (layer,) = report["layers"]
    assert layer["falls_back"] == "multi-head latent attention"


LAYER = LayerKind(64, "bfloat16", num_heads=8, num_kv_heads=2, name="full attention", count=4)
MACHINE = doctor.Machine([LAYER], Path("model"), on_cpu=True)


def test_doctor_names_a_wrong_variable(monkeypatch):
    monkeypatch.setenv("VLLM_PREFIXSHARE_SHARE", "maybe")
    with pytest.raises(PrefixShareError, match="'maybe' is not valid: set it to one of auto"):
        doctor.environment(MACHINE)


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("VLLM_ATTENTION_BACKEND", "PREFIXSHARE", "'PREFIXSHARE' is not an attention backend"),
        ("VLLM_PREFIXSHARE_DIVIDER", "flashforge", "needs the divider batch_invariant"),
        ("VLLM_PREFIXSHARE_TRACE", "/nowhere/t", "cannot be written (No such file or directory)"),
        ("VLLM_PREFIXSHARE_METRICS", "/proc/none/m", "is not a usable folder (No such file"),
    ],
)
def test_doctor_refuses_what_an_engine_refuses(monkeypatch, variable, value, sentence):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv(variable, value)
    settings.cache_clear()
    with pytest.raises(PrefixShareError, match=re.escape(sentence)):
        doctor.environment(MACHINE)


def test_doctor_names_a_release_whose_hooks_moved(monkeypatch, capsys):
    compat.check_release.cache_clear()
    moved = "vllm.v1.worker.gpu_worker.Worker.wake_up (not found)"
    monkeypatch.setattr(signatures, "moved", lambda: moved)
    try:
        assert main(["doctor"]) == 1
    finally:
        compat.check_release.cache_clear()
    said = capsys.readouterr().out
    assert (
        f"failed  vLLM        PREFIX_SHARE cannot hook vLLM {compat.vllm_version()} at {moved}"
        in said
    )
    assert said.endswith("PREFIX_SHARE cannot run here\n")


def test_doctor_compares_a_table_with_the_machine_and_the_model(tmp_path, monkeypatch, capsys):
    assert main(["profile", "--out", str(tmp_path / "t.json"), "--num-qo-heads", "4",
                 "--num-kv-heads", "2", "--head-dim", "64", "--block-size", "32"]) == 0  # fmt: skip
    assert f"wrote {tmp_path / 't.json'}" in capsys.readouterr().out
    monkeypatch.setenv("VLLM_PREFIXSHARE_COST_TABLE", str(tmp_path / "t.json"))
    settings.cache_clear()
    with pytest.raises(PrefixShareError, match="gqa_group_size 2 instead of 4"):
        doctor.cost_table(MACHINE)


GPU = "NVIDIA H200 x132"
SHAPE = AttentionConfig(8, 2, 64, 16)
FP8_SHAPE = replace(SHAPE, kv_dtype=FP8, query_dtype=FP8)


def on_a_gpu(monkeypatch, **checks):
    """Let ``doctor`` find a GPU with FlashAttention-3, and make ``checks`` of it."""

    def platform(machine: doctor.Machine) -> str:
        machine.on_cpu = False
        return GPU

    monkeypatch.setattr(doctor, "CHECKS", {"platform": platform, **checks})
    monkeypatch.setattr(platforms, "gpu_extras", lambda anywhere=False: platforms.GPU_EXTRAS)
    monkeypatch.setattr(lookup, "gpu", lambda: GPU)


@pytest.mark.parametrize("of", [SHAPE, FP8_SHAPE], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("cache", ["auto", "fp8", "fp8_e4m3", "bfloat16"])
def test_doctor_compares_a_table_with_the_cache_that_an_engine_has(
    tmp_path, monkeypatch, capsys, of, cache
):
    line = Grid(np.array([1.0, 2.0]), np.array([1.0, 2.0]), np.ones((2, 2)))
    path = tmp_path / "t.json"
    CostTable(lookup.fingerprint(of, "hopper", GPU), line, 1.0).save(path)
    monkeypatch.setenv("VLLM_PREFIXSHARE_COST_TABLE", str(path))
    settings.cache_clear()

    on_a_gpu(monkeypatch, **{"cost table": doctor.cost_table})
    monkeypatch.setattr(doctor, "gpu_kernel", lambda *of: ("hopper", None))
    write_model(tmp_path, quantization_config={**MODELOPT, "kv_cache_scheme": SCHEME})
    main(["doctor", "--json", "--model", str(tmp_path), "--kv-cache-dtype", cache])
    checks = {c["check"]: c for c in json.loads(capsys.readouterr().out)["checks"]}
    fits = (of is FP8_SHAPE) == (cache != "bfloat16")
    assert checks["cost table"]["ok"] == fits
    if not fits:
        have, want = ("8-bit", "16-bit") if of is FP8_SHAPE else ("16-bit", "8-bit")
        says = checks["cost table"]["says"]
        assert says.startswith(f"{path} was measured for kv_dtype '{have}' instead of '{want}'")


@pytest.mark.parametrize(
    ("fields", "options", "expected"),
    [
        ({}, [], [SHAPE]),
        ({}, ["--tensor-parallel-size", "4"], [AttentionConfig(2, 1, 64, 16)]),
        ({"torch_dtype": "float16"}, [], [replace(SHAPE, dtype="float16")]),
        ({}, ["--kv-cache-dtype", "fp8"], [FP8_SHAPE]),
        ({"model_type": "gpt_oss", "layer_types": ["full_attention"] * 4}, [],
         [replace(SHAPE, features=("sinks",))]),
        ({"attn_logit_softcapping": 50.0}, [], [replace(SHAPE, features=("soft_cap",))]),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}, [],
         [AttentionConfig(8, 1, 576, 16, kv_lora_rank=512)]),
        ({"model_type": "gemma4_text", "sliding_window": 4096, "head_dim": 128,
          "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 256}, [],
         [AttentionConfig(8, 2, 128, 16, sliding_window=4096), AttentionConfig(8, 2, 256, 16)]),
        ({}, ["--tensor-parallel-size", "4", "--decode-context-parallel-size", "2"],
         [AttentionConfig(4, 1, 64, 16)]),
        ({"head_dim": 48}, [], []),
    ],
)  # fmt: skip
def test_doctor_looks_for_kernels_for_what_one_gpu_has(
    tmp_path, monkeypatch, capsys, fields, options, expected
):
    on_a_gpu(monkeypatch, kernel=doctor.kernel)
    asked = []

    def kernel(shape: AttentionConfig, query_len: int) -> doctor.Choice:
        asked.append((shape, query_len))
        return "hopper", None

    monkeypatch.setattr(doctor, "gpu_kernel", kernel)
    monkeypatch.setattr(doctor, "falls_back", partial(served_anywhere, falls_back))
    main(["doctor", "--json", "--model", str(write_model(tmp_path, **fields)), *options])
    checks = {c["check"]: c["says"] for c in json.loads(capsys.readouterr().out)["checks"]}
    assert asked == [(shape, 1) for shape in expected]
    assert checks["kernel"] == ("hopper" if expected else "none: no layer would be served")


def served_anywhere(falls_back, layer, on_cpu):
    """Whether some GPU serves a layer: what the cost table says of windows is not asked."""
    return falls_back(layer, None)


def test_doctor_looks_for_a_kernel_that_takes_the_drafts(tmp_path, monkeypatch):
    on_a_gpu(monkeypatch, kernel=doctor.kernel)
    asked = []
    monkeypatch.setattr(doctor, "gpu_kernel", lambda *of: asked.append(of) or ("hopper", None))
    main(["doctor", "--model", str(write_model(tmp_path)), "--num-speculative-tokens", "3"])
    assert asked == [(SHAPE, 4)]


def test_drafts_and_the_cache_count_without_a_model(monkeypatch):
    on_a_gpu(monkeypatch, kernel=doctor.kernel)
    asked = []
    monkeypatch.setattr(doctor, "gpu_kernel", lambda *of: asked.append(of) or ("hopper", None))
    usual = AttentionConfig(32, 8, 128, 16)
    for options in (["--num-speculative-tokens", "3"], ["--kv-cache-dtype", "fp8"]):
        assert main(["doctor", *options]) == 0
    assert asked == [(usual, 4), (replace(usual, kv_dtype=FP8, query_dtype=FP8), 1)]


@pytest.mark.parametrize("shards", [[], ["--decode-context-parallel-size", "2"]])
def test_gpus_and_shards_are_refused_without_a_model(capsys, shards):
    assert main(["doctor", "--tensor-parallel-size", "2", *shards]) == 2
    error = capsys.readouterr().err
    assert "--tensor-parallel-size 2 needs --model: name the folder of the model" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (LAYER, replace(SHAPE, block_size=128)),
        (on_one_gpu(LAYER, 2), AttentionConfig(4, 1, 64, 128)),
        (replace(LAYER, dtype="float16"), AttentionConfig(8, 2, 64, 128, "float16")),
        (replace(LAYER, kv_cache_dtype="fp8"), None),
    ],
    ids=["whole", "half", "float16", "fp8"],
)
def test_doctor_looks_for_the_executor_of_a_cpu(layer, expected):
    machine = replace(MACHINE, layers=[layer], kernels={})
    said = doctor.kernel(machine).split()[0]
    assert said == ("none:" if expected is None else cpu_executor(expected).name)
    assert list(machine.kernels) == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nMore."),
         "the check ended with OutOfMemoryError (CUDA out of memory.): free memory"),
        (RuntimeError("CUDA driver initialization failed"), "RuntimeError (CUDA driver"),
        (MemoryError(), "MemoryError (no reason given)"),
        (ImportError("No module named 'triton'"), "No module named 'triton': install what is"),
    ],
)  # fmt: skip
def test_an_error_in_a_check_of_doctor_is_a_sentence(monkeypatch, capsys, error, sentence):
    def kernel(*of):
        raise error

    on_a_gpu(monkeypatch, kernel=doctor.kernel)
    monkeypatch.setattr(doctor, "gpu_kernel", kernel)
    assert main(["doctor"]) == 1
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith("failed  kernel ") and sentence in line


def test_doctor_names_a_plugin_that_is_left_out(monkeypatch):
    assert doctor.plugin(MACHINE) == "registered"
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    with pytest.raises(PrefixShareError, match="add prefix_share"):
        doctor.plugin(MACHINE)


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.1-8B", "config.json", "empty"])
def test_a_model_is_a_folder_with_a_config(tmp_path, monkeypatch, capsys, model):
    monkeypatch.chdir(write_model(tmp_path))
    (tmp_path / "empty").mkdir()
    assert main(["doctor", "--model", model]) == 2
    assert capsys.readouterr().err == (
        f"vllm-prefixshare: error: {model} is no folder with a config.json: name the folder of a "
        "checkpoint (names on the Hugging Face hub are not looked up).\n"
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [("full attention", 4, None)]),
        ({"sliding_window": 4096}, [("sliding attention", 4, "a sliding window")]),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 4096,
                "use_sliding_window": False,
                "max_window_layers": 3,
            },
            [("full attention", 4, None)],
        ),
        (
            {"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 4},
            [("sliding attention", 3, "a sliding window"), ("full attention", 1, None)],
        ),
        ({"model_type": "qwen3_next", "full_attention_interval": 4}, [("full attention", 1, None)]),
        (
            {"model_type": None, "layer_types": ["mamba", "mamba", "attention", "mamba"]},
            [("full attention", 1, None)],
        ),
        (
            {"model_type": "gpt_oss", "layer_types": ["full_attention"] * 4},
            [("full attention", 4, "attention sinks")],
        ),
        (
            {"model_type": "deepseek_v2", "kv_lora_rank": 512},
            [("full attention", 4, "multi-head latent attention")],
        ),
        ({"attn_logit_softcapping": 50.0}, [("full attention", 4, "a logits soft cap")]),
        ({"model_type": "bloom"}, [("full attention", 4, "ALiBi slopes")]),
        ({"head_dim": 48}, [("full attention", 4, "head_dim 48")]),
        (
            {"head_dim": 256, "global_head_dim": 512, "sliding_window": 1024},
            [("sliding attention", 4, "a sliding window")],
        ),
        (
            {"model_type": None, "text_config": {"head_dim": 320}},
            [("full attention", 4, "head_dim 320")],
        ),
    ],
)
def test_doctor_knows_which_layers_are_served(tmp_path, config, expected):
    kinds = layer_kinds(write_model(tmp_path, **config))
    machine = doctor.Machine(kinds, on_cpu=True)
    served = sum(count for _, count, reason in expected if reason is None)
    assert doctor.layers(machine) == f"{served} of 4 would be served"
    assert [(k["kind"], k["count"], k["falls_back"]) for k in machine.served] == expected


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("gemma2", {}),
        ("gemma2", {"num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8}),
        ("gemma3_text", {}),
        ("gemma3_text", {"num_hidden_layers": 34, "sliding_window": 1024, "head_dim": 128}),
        ("llama4_text", {"num_hidden_layers": 6, "attention_chunk_size": 64, "num_attention_heads":
                         40, "num_key_value_heads": 8, "head_dim": 128}),
        ("qwen3_next", {"num_hidden_layers": 8, "full_attention_interval": 4, "head_dim": 256,
                        "num_attention_heads": 16, "num_key_value_heads": 2}),
        ("bloom", {"n_layer": 24, "n_head": 16, "n_embed": 1024}),
        ("bloom", {"n_layer": 30, "n_head": 32, "hidden_size": 4096}),
        ("mpt", {"n_layers": 32, "n_heads": 32, "d_model": 4096}),
        ("gpt2", {"n_layer": 12, "n_head": 12, "n_embd": 768}),
        ("gpt_bigcode", {"n_layer": 40, "n_head": 48, "n_embd": 6144, "multi_query": True}),
        ("dbrx", {"n_layers": 40, "n_heads": 48, "d_model": 6144, "attn_config":
                  {"kv_n_heads": 8, "rope_theta": 5e5}}),
    ],
)  # fmt: skip
def test_what_a_file_leaves_out_is_as_in_transformers(tmp_path, model_type, fields):
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **fields}))
    theirs = AutoConfig.for_model(model_type, **fields)
    shape = shape_for_inspect(tmp_path)
    heads = theirs.num_attention_heads
    assert shape.num_qo_heads == heads
    kv_heads = getattr(theirs, "num_key_value_heads", heads)
    kv_heads = getattr(getattr(theirs, "attn_config", None), "kv_n_heads", None) or kv_heads
    assert shape.num_kv_heads == kv_heads
    assert shape.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // heads)
    kinds = layer_kinds(tmp_path)
    found = [kind.name.replace(" ", "_") for kind in kinds for _ in range(kind.count)]
    full = ["full_attention"] * theirs.num_hidden_layers
    assert sorted(found) == sorted(getattr(theirs, "layer_types", full))
    for kind in kinds:
        if kind.name == "sliding attention":
            assert kind.sliding_window == theirs.sliding_window
        assert kind.logits_soft_cap == bool(getattr(theirs, "attn_logit_softcapping", None))
        assert kind.alibi == (model_type in ("bloom", "mpt"))


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("jamba", {"attn_layer_period": 8, "attn_layer_offset": 4, "num_hidden_layers": 32}),
        ("bamba", {"attn_layer_indices": [9, 18, 27], "num_hidden_layers": 32}),
        ("nemotron_h", {"hybrid_override_pattern": "M-M-M-MM-M*-M-", "num_hidden_layers": 14}),
        ("minimax", {"attn_type_list": [0, 0, 0, 1] * 4, "num_hidden_layers": 16}),
        ("zamba2", {"layers_block_type": ["mamba", "mamba", "hybrid"] * 3,
                    "num_hidden_layers": 9}),
    ],
)  # fmt: skip
def test_doctor_knows_which_layers_of_hybrid_models_have_a_kv_cache(tmp_path, model_type, fields):
    from transformers import AutoConfig

    folder = write_model(tmp_path, model_type=model_type, **fields)
    kinds = layer_kinds(folder)
    found = {kind.name: kind.count for kind in kinds if kind.attention}
    if model_type == "minimax":  # vLLM's words; transformers has others
        theirs = ["full_attention" if kind else "mamba" for kind in fields["attn_type_list"]]
    else:
        theirs = AutoConfig.for_model(model_type, **fields).layer_types
    assert len(theirs) == fields["num_hidden_layers"]
    assert found == {"full attention": sum(x in ("full_attention", "hybrid") for x in theirs)}
    assert sum(kind.count for kind in kinds) == len(theirs)


def test_doctor_knows_which_layers_of_kimi_linear_have_a_kv_cache(tmp_path):
    linear = {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}
    latents = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    fields = {"model_type": "kimi_linear", "linear_attn_config": linear, **latents}
    kinds = layer_kinds(write_model(tmp_path, **fields))
    assert [(k.name, k.count, k.attention) for k in kinds] == [
        ("linear attention", 3, False),
        ("full attention", 1, True),
    ]


@pytest.mark.parametrize(
    ("fields", "kv_heads"),
    [
        ({"model_type": "falcon", "multi_query": True}, 1),
        ({"model_type": "falcon", "multi_query": True, "new_decoder_architecture": True,
          "num_kv_heads": 8}, 8),
        ({"model_type": "chatglm", "multi_query_group_num": 2}, 2),
        ({"model_type": "mpt", "attn_config": {"alibi": True}}, 64),
    ],
)  # fmt: skip
def test_kv_heads_are_those_that_vllm_counts(tmp_path, fields, kv_heads):
    shape = {"num_attention_heads": 64, "hidden_size": 8192, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({**shape, **fields}))
    assert shape_for_inspect(tmp_path).num_kv_heads == kv_heads
    assert [kind.num_kv_heads for kind in layer_kinds(tmp_path)] == [kv_heads]


@pytest.mark.parametrize("head_dim", [32, 100, 576])
def test_a_head_dim_that_is_not_served_is_named_as_such(tmp_path, monkeypatch, head_dim, capsys):
    model = str(write_model(tmp_path, head_dim=head_dim))
    monkeypatch.setattr(doctor, "CHECKS", {})
    main(["doctor", "--json", "--model", model])
    (layer,) = json.loads(capsys.readouterr().out)["layers"]
    assert layer["falls_back"] == f"head_dim {head_dim}"
    assert main(["inspect", "--model", model]) == 2
    said = capsys.readouterr().err
    assert "error: head_dim must be a multiple of 8 from 64 to 512" in said


@pytest.mark.parametrize("cache", ["auto", "fp8", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("heads", "gpus", "kernel", "expected"),
    [
        (16, 1, "auto", None),
        (128, 1, "auto", "multi-head latent attention of more than 32 heads a GPU"),
        (128, 4, "auto", None),
        (16, 1, "portable", "multi-head latent attention and kernel 'portable'"),
    ],
)
def test_doctor_knows_which_mla_layers_are_served(
    tmp_path, monkeypatch, heads, gpus, kernel, expected, cache
):
    monkeypatch.setenv("VLLM_PREFIXSHARE_KERNEL", kernel)
    settings.cache_clear()
    kind = replace(latents(tmp_path, heads), kv_cache_dtype=cache)
    assert falls_back(on_one_gpu(kind, gpus), None) == expected
    assert kind.head_size == 576


def latents(folder: Path, heads: int = 16, **fields: object) -> LayerKind:
    """The layers of a model with latents."""
    shape = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": heads}
    model = write_model(folder, model_type="deepseek_v2", **shape, **fields)
    (kind,) = layer_kinds(model)
    return kind


@pytest.mark.parametrize(
    ("cache", "capability", "expected"),
    [
        ("fp8", (9, 0), None),
        ("fp8_e4m3", (9, 0), None),
        ("fp8_e5m2", (9, 0), "a KV cache of type fp8_e5m2"),
        ("fp8_ds_mla", (9, 0), "a KV cache of type fp8_ds_mla"),
        ("fp8", (10, 0), "multi-head latent attention"),
        ("fp8", (8, 9), "multi-head latent attention"),
    ],
)
def test_doctor_knows_which_caches_of_latents_are_served(tmp_path, cache, capability, expected):
    kind = replace(latents(tmp_path), kv_cache_dtype=cache)
    assert refusal(kind, platforms.gpu_of(capability)) == expected


@pytest.mark.parametrize("takes", [True, False])
def test_doctor_asks_flash_mla_for_an_fp8_cache_of_latents(tmp_path, monkeypatch, takes):
    on_a_gpu(monkeypatch)
    extras = platforms.GPU_EXTRAS - (set() if takes else {"mla_fp8"})
    monkeypatch.setattr(platforms, "gpu_extras", lambda anywhere=False: extras)
    asked: list[AttentionConfig] = []
    kernel = "vllm_prefixshare.vllm_plugin.eligibility.measured.kernel_failure"

    def compiles(attention: AttentionConfig, query_len: int) -> None:
        asked.append(attention)

    monkeypatch.setattr(kernel, compiles)
    kind = replace(latents(tmp_path), kv_cache_dtype="fp8")
    assert falls_back(kind, on_cpu=False) == (None if takes else "a KV cache of type fp8")
    shape = AttentionConfig(16, 1, 576, 64, kv_dtype=FP8, query_dtype=FP8, kv_lora_rank=512)
    assert asked == [shape][:takes] and kind.attention_config() == shape
    assert replace(kind, kv_cache_dtype="auto").attention_config().block_size == 16


MLA = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
SCHEME = {"num_bits": 8, "type": "float", "dynamic": False}


@pytest.mark.parametrize(
    ("quantised", "expected"),
    [
        ({}, "auto"),
        ({"quant_method": "fp8"}, "auto"),
        ({"quant_method": "compressed-tensors"}, "auto"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}, "fp8"),
        (MODELOPT, "auto"),
        ({**MODELOPT, "kv_cache_scheme": SCHEME}, "fp8_e4m3"),
        ({**MODELOPT, "kv_cache_scheme": {**SCHEME, "dynamic": True}}, "auto"),
        ({**MODELOPT, "kv_cache_scheme": {**SCHEME, "num_bits": 4}}, "nvfp4"),
        ({**MODELOPT, "kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({**MODELOPT, "kv_cache_quant_algo": "INT8"}, "auto"),
        ({**MODELOPT, "quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8_e4m3"),
    ],
)
def test_a_checkpoint_says_its_kv_cache_as_to_vllm(tmp_path, quantised, expected):
    from vllm.utils.torch_utils import get_kv_cache_quant_algo_string

    model = write_model(tmp_path, quantization_config=quantised)
    (kind,) = layer_kinds(model)
    assert kind.kv_cache_dtype == expected
    if quantised.get("quant_method") != "compressed-tensors":  # vLLM's layer reads those
        assert expected == (get_kv_cache_quant_algo_string(quantised) or "auto")


LEGACY = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
LEGACY_FP8 = {**LEGACY, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}


@pytest.mark.parametrize(
    ("fields", "beside", "expected"),
    [
        ({}, LEGACY, "auto"),
        ({}, LEGACY_FP8, "fp8_e4m3"),
        ({"quantization_config": None}, LEGACY_FP8, "fp8_e4m3"),
        ({"quantization_config": MODELOPT}, LEGACY_FP8, "auto"),
        ({"quantization_config": LEGACY_FP8}, None, "fp8_e4m3"),
        ({}, {**LEGACY_FP8, "producer": {"name": "another"}}, "auto"),
        ({}, {**LEGACY_FP8, "quantization": {"kv_cache_quant_algo": "FP8"}}, "auto"),
        (
            {},
            {"quantization": {**LEGACY_FP8["quantization"], "modelopt_quant_config": {}}},
            "fp8_e4m3",
        ),
    ],
)
def test_a_file_of_modelopt_beside_the_config_is_read_where_vllm_does(
    tmp_path, fields, beside, expected
):
    import vllm.config  # noqa: F401 - it must come before the others, which import each other
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
    from vllm.utils.torch_utils import get_kv_cache_quant_algo_string

    model = write_model(tmp_path, model_type="llama", architectures=["LlamaForCausalLM"], **fields)
    if beside is not None:
        (model / "hf_quant_config.json").write_text(json.dumps(beside))
    (kind,) = layer_kinds(model)
    assert kind.kv_cache_dtype == expected
    theirs = get_config(str(model), trust_remote_code=False)
    quantised = ModelArchConfigConvertorBase(theirs, theirs).get_quantization_config()
    assert expected == (get_kv_cache_quant_algo_string(quantised) or "auto")


@pytest.mark.parametrize(
    ("changes", "cache", "on_cpu", "expected"),
    [
        ({}, "fp8", None, None),
        ({}, "fp8", True, "a KV cache of type fp8"),
        ({}, "bfloat16", True, None),
        ({}, "fp8_e5m2", None, "a KV cache of type fp8_e5m2"),
        (MLA, "fp8", None, None),
        (
            MLA,
            "fp8_ds_mla",
            None,
            "a KV cache of type fp8_ds_mla",
        ),
    ],
)
def test_doctor_knows_the_kv_cache_that_is_asked_for(
    tmp_path, monkeypatch, capsys, changes, cache, on_cpu, expected
):
    write_model(tmp_path, quantization_config={**MODELOPT, "kv_cache_scheme": SCHEME}, **changes)

    def platform(machine: doctor.Machine) -> str:
        machine.on_cpu = on_cpu
        return "not looked for"

    monkeypatch.setattr(doctor, "CHECKS", {"platform": platform})
    main(["doctor", "--json", "--model", str(tmp_path), "--kv-cache-dtype", cache])
    (layer,) = json.loads(capsys.readouterr().out)["layers"]
    assert (layer["kv_cache_dtype"], layer["falls_back"]) == (cache, expected)
    main(["doctor", "--model", str(tmp_path)])
    assert ", KV cache fp8_e4m3: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "gpu"), [("inspect", []), ("inspect", ["--gpu", "H100"]), ("estimate", ["H100"])]
)
def test_plans_are_priced_for_the_cache_that_vllm_would_have(tmp_path, capsys, command, gpu):
    model = str(write_model(tmp_path, quantization_config={**MODELOPT, "kv_cache_scheme": SCHEME}))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f"{[1] * 8192}\n" * 32)
    of = {
        "inspect": ["inspect", "--tree", "1,32_65536,64", *gpu],
        "estimate": ["estimate", str(prompts), "--gpu", *gpu],
    }[command]

    def microseconds(*options: str) -> float:
        assert main([*of, "--json", *options]) == 0
        found = json.loads(capsys.readouterr().out)
        if command == "estimate":
            return found["attention_us_shared"] / found["layers"]
        return max(plan["busiest_worker_us"] for plan in found["dividers"])

    shape = "--num-qo-heads", "8", "--num-kv-heads", "2", "--head-dim", "64"
    wide, narrow = microseconds(*shape), microseconds(*shape, "--kv-cache-dtype", "fp8")
    assert narrow < wide
    assert microseconds("--model", model) == pytest.approx(narrow, abs=0.01)
    assert microseconds("--model", model, "--kv-cache-dtype", "bfloat16") == pytest.approx(
        wide, abs=0.01
    )


@pytest.mark.parametrize("command", ["inspect", "estimate"])
def test_nothing_is_promised_for_caches_that_are_not_served(tmp_path, capsys, command):
    prompts = [str(tmp_path / "prompts")] if command == "estimate" else []
    assert main([command, *prompts, "--gpu", "H200", "--kv-cache-dtype", "fp8_e5m2"]) == 2
    error = capsys.readouterr().err
    assert "layers with a KV cache of type fp8_e5m2 keep vLLM's own backend, so there" in error
    assert error.count("\n") == 1


def test_doctor_refuses_gpus_that_cannot_divide_the_heads(tmp_path, capsys):
    model = str(write_model(tmp_path))
    assert main(["doctor", "--model", model, "--tensor-parallel-size", "3"]) == 2
    assert "must divide the model's 8 query heads, got 3." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "gpus", "expected"),
    [
        ({"num_key_value_heads": 10}, 4, None),  # Phi-4
        ({"num_key_value_heads": 10}, 5, (8, 2)),
        ({"num_key_value_heads": 10}, 20, (2, 1)),
        ({"num_attention_heads": 24, "num_key_value_heads": 4, "hidden_size": 1536}, 6, None),
        # latents are not divided, and other layers have no KV heads
        ({"model_type": "deepseek_v2", "num_key_value_heads": 10, "kv_lora_rank": 512}, 4, (10, 2)),
        ({"num_key_value_heads": 10, "layer_types": ["mamba"] * 4}, 4, (10, 2)),
    ],
)  # fmt: skip
def test_gpus_divide_the_kv_heads_or_hold_copies_of_one(tmp_path, fields, gpus, expected):
    model = write_model(tmp_path, **{"num_attention_heads": 40, "hidden_size": 2560, **fields})
    (kind,) = layer_kinds(model)
    if expected is None:
        with pytest.raises(
            PrefixShareError, match=f"KV heads or be a multiple of them, got {gpus}."
        ):
            on_one_gpu(kind, gpus)
    else:
        found = on_one_gpu(kind, gpus)
        assert (found.num_heads, found.num_kv_heads) == expected


def test_inspect_compares_every_divider(capsys):
    assert main(["inspect", "--tree", "1,4_256,64", "--compare"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "4 requests, 1280 KV tokens read one by one"
    rows = {line.split()[0]: line.split() for line in lines[lines.index("") + 2 : -1]}
    assert [*rows][:2] == ["depth_first", "unshared"]
    assert rows.keys() - {"unshared"} == DIVIDERS.keys()
    assert rows["deft_node"][1:3] == ["512", "2.50"]
    assert rows["per_request"][1] == rows["unshared"][1] == "1280"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["inspect", "--tree", "4,1_16,16"], "tree '4,1_16,16' is not valid"),
        (["inspect", "--divider", "best"], "divider 'best' is unknown"),
        (["inspect", "--head-dim", "48"], "head_dim must be"),
        (["inspect", "--workers", "0"], "--workers must be from 1 to 65536, got 0"),
        (["inspect", "--block-size", "9" * 10], "block_size must be at most 2147483647"),
        (
            ["profile", "--device", "cpu", "--num-qo-heads", "9", "--num-kv-heads", "3",
             "--head-dim", "64", "--block-size", "8"],
            "no kernel for blocks of 8 tokens: name a --block-size that is a multiple of 16",
        ),
        (["profile", "--model", "/nowhere"], "/nowhere is no folder with a config.json: name"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(arguments, sentence, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "group"),
    [
        ({"num_attention_heads": 8, "hidden_size": 512, "num_key_value_heads": None,
          "num_hidden_layers": 1}, 1),
        ({"text_config": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
                          "num_hidden_layers": 1}}, 4),
        ({"num_attention_heads": 8, "hidden_size": 512, "text_config": None,
          "num_hidden_layers": 1}, 1),
        ({"num_attention_heads": 0, "hidden_size": 512, "num_hidden_layers": 1}, None),
        ([], None),
    ],
)  # fmt: skip
def test_the_shape_is_taken_from_the_models_file(tmp_path, config, group, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = parser().parse_args(["inspect", "--model", str(tmp_path)])
    if group is None:
        assert main(["inspect", "--model", str(tmp_path)]) == 2
        assert "config.json does not describe a model" in capsys.readouterr().err
    else:
        shape = attention_of(arguments)
        assert (shape.head_dim, shape.gqa_group_size) == (64, group)


GOOD = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
}


@pytest.mark.parametrize("command", ["profile", "inspect", "doctor", "estimate"])
@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("{", "Expecting property name"),
        ("[]", "it is not an object"),
        ({**GOOD, "num_attention_heads": None}, "it has no num_attention_heads"),
        ({**GOOD, "hidden_size": None}, "it has no head_dim and no hidden_size"),
        ({**GOOD, "num_hidden_layers": None}, "it has no num_hidden_layers"),
        ({**GOOD, "linear_attn_config": {"kda": 4}}, "kda_layers"),
    ],
)
def test_a_wrong_model_gets_one_sentence(tmp_path, command, config, sentence, capsys):
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    prompts = [str(tmp_path / "p"), "--gpu", "H200"] if command == "estimate" else []
    assert main([command, *prompts, "--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"vllm-prefixshare: error: {path} does not describe a model (")
    assert sentence in error
    assert error.count("\n") == 1


def test_latents_have_no_shape_for_other_commands(tmp_path, capsys):
    model = str(write_model(tmp_path, **MLA, head_dim=64))
    assert main(["inspect", "--model", model]) == 2
    assert "config.json has multi-head latent attention" in capsys.readouterr().err


def test_profile_writes_a_table_that_the_backend_would_load(tmp_path, capsys):
    write_model(tmp_path, num_attention_heads=4, hidden_size=256)
    assert main(["profile", "--json", "--model", str(tmp_path), "--block-size", "64"]) == 0
    (path,) = (tmp_path / "cost_tables").glob("*.json")
    report = json.loads(capsys.readouterr().out)
    assert report == {"path": str(path), "table": json.loads(path.read_text())}
    table = CostTable.load(path)
    assert (table.fingerprint.head_dim, table.fingerprint.gqa_group_size) == (64, 2)
    # The times depend on the machine. Fixed are the sizes that are timed, and that a tile of more
    # tokens never costs less.
    tile, unshared = table.tile_us, table.unshared_us
    assert unshared is not None
    assert (tile.rows.tolist(), unshared.rows.tolist()) == ([2, 8, 32, 128], [2, 8])
    assert tile.kv_len.tolist() == unshared.kv_len.tolist() == [256, 1024, 4096, 16384]
    assert float(table.tile(2, 16384)) >= float(table.tile(2, 256)) > 0
    assert float(table.tile(32, 16384)) >= float(table.tile(32, 256)) > 0
    assert min(float(table.unshared(2, 256)), float(table.unshared(2, 16384))) > 0


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_can_be_parsed(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "--json" in said
    _, _, example = said.partition("example:\n")
    lines = re.findall(rf"^    vllm-prefixshare ({name} .*)$", example, re.MULTILINE)
    assert lines, "the help must have an example"
    for line in lines:
        assert parser().parse_args(shlex.split(line)).run is COMMANDS[name].run


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_the_default_of_every_option(name):
    (commands,) = parser()._subparsers._group_actions
    formatter = HelpFormatter("")
    for action in commands.choices[name]._actions:
        assert action.help, action.dest
        if action.option_strings and not isinstance(action.default, bool):
            text = formatter._expand_help(action)
            assert action.default in (None, "", argparse.SUPPRESS) or (
                f"(default: {action.default})" in text
            )


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"vllm-prefixshare {__version__}\n"


def test_the_helps_lines_fit_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            main([name, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100
