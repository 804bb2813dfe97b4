"""``estimate``: every form of prompts, what vLLM would share of them, and hostile files."""

import json
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from examples.embedded_model import embedded_model_path
from tests.support.cli_runs import run
from tests.support.decode_groups import one_group
from vllm_prefixshare.cli.batches import Batch, tree_batch
from vllm_prefixshare.cli.call_time import NEW_US, SHARED_US, SOURCE, call_times
from vllm_prefixshare.cli.decode_groups import DecodeGroup
from vllm_prefixshare.cli.estimated_model import EstimatedModel, estimated_model, weight_bytes
from vllm_prefixshare.cli.main import main, parser
from vllm_prefixshare.cli.planned import Layer
from vllm_prefixshare.cli.prefixes import PrefixBlocks
from vllm_prefixshare.cli.prompts import Source, open_source, read_requests
from vllm_prefixshare.cli.tokenization import ByteTokenizer
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.planning.sharing import shareable_forest

PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "published"
DOCUMENT = [(7 * i) % 1000 for i in range(4096)]


def write(path: Path, lines: list[object]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def read(path: Path) -> list[np.ndarray]:
    source = Source(path)
    with open_source(source) as file:
        return [request.tokens for request in read_requests(source, file, ByteTokenizer())]


def batch_of(prompts: list[np.ndarray], block_size: int, generated: int = 0) -> DecodeGroup:
    blocks = PrefixBlocks(block_size)
    for i, prompt in enumerate(prompts):
        blocks.add(f"prompt {i}", prompt.astype(np.int32))
    return one_group(blocks, generated)


def report(capsys: pytest.CaptureFixture[str], *arguments: object, gpu: str = "H200") -> dict:
    assert main(["estimate", "--gpu", gpu, "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_shared_document_is_found_and_gains(tmp_path, capsys):
    prompts: list[object] = [[*DOCUMENT, *range(i, i + 48)] for i in range(64)]
    found = report(capsys, write(tmp_path / "p", prompts), "--output-tokens", 0)
    # each request has its own 48 tokens and the token to be computed; the other 4096 are shared
    assert found["kv_tokens"] == 64 * (4096 + 49)
    assert found["kv_tokens_read"] >= 4096 + 64 * 49
    assert 15 < found["share_factor"] <= 64 * 4145 / (4096 + 64 * 49)
    assert found["cost"] == "cost table measured on NVIDIA H200"
    assert found["attention_gain"] > 5
    alone = [[*range(i * 5000, i * 5000 + 4000)] for i in range(64)]
    found = report(capsys, write(tmp_path / "p", alone), "--output-tokens", 0)
    assert (found["share_factor"], found["attention_gain"]) == (1.0, 1.0)


def estimated(attention: AttentionConfig, batch: Batch) -> tuple[float, float]:
    """Microseconds of a layer on an H200, without and with sharing."""
    layer = Layer.on("H200", attention)
    planned = layer.plan(batch)
    return planned.unshared_us, planned.attention_us


def test_estimates_are_near_what_was_measured():
    """Over all cells of the published kernel benchmark. What FlashAttention-3 takes for short
    contexts is underestimated, so gains are, too.
    """
    ours, gains = [], []
    for cell in json.loads((PUBLISHED / "kernel.json").read_text())["cells"]:
        attention = AttentionConfig(*map(int, cell["heads"].split(":")), 128, 16)
        unshared, shared = estimated(attention, tree_batch(cell["workload"], 16))
        measured = {name: cell["peers"][name]["ms"] * 1e3 for name in ("ours", "fa3")}
        ours.append(shared / measured["ours"])
        gains.append(unshared / shared / (measured["fa3"] / measured["ours"]))
    assert len(ours) == 56
    assert min(ours) > 0.8 and max(ours) < 1.35
    assert min(gains) > 0.5 and max(gains) < 1.25
    assert 0.85 < np.exp(np.log(gains).mean()) < 1


def test_estimates_of_latents_are_near_what_was_measured():
    gains = []
    for name in ("kernel_mla.json", "kernel_mla_heads.json"):
        for cell in json.loads((PUBLISHED / name).read_text())["cells"]:
            heads = int(cell["heads"].split(":")[0])
            if heads > 32:
                continue  # not served
            attention = AttentionConfig(heads, 1, 576, 64, kv_lora_rank=512)
            unshared, shared = estimated(attention, tree_batch(cell["workload"], 64))
            ours, stock = (cell["peers"][name]["ms"] for name in ("ours", "fa3"))
            gains.append(unshared / shared * ours / stock)
    assert len(gains) == 16
    assert min(gains) > 0.8 and max(gains) < 1.1


def test_every_form_gives_the_same_tokens(tmp_path):
    ids, text = [1, 2, 3], "one two three"
    for line in (ids, {"prompt": ids}, {"prompt": "x", "prompt_token_ids": ids}):
        (tokens,) = read(write(tmp_path / "p", [line]))
        assert tokens.tolist() == ids
    for line in (text, {"prompt": text, "max_tokens": 5}):
        (tokens,) = read(write(tmp_path / "p", [line]))
        assert len(tokens) == 4
        assert tokens.tobytes().rstrip(b"\0").decode() == text


def test_the_log_of_a_server_is_read(tmp_path, capsys):
    from vllm.entrypoints.serve.utils.request_logger import RequestLogger, logger
    from vllm.sampling_params import SamplingParams

    path, level = tmp_path / "server.log", logger.level
    handler = logging.FileHandler(path)
    handler.setFormatter(
        logging.Formatter("DEBUG 11-22 04:00:00 [request_logger.py:55] %(message)s")
    )
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        logger.info("Started server process [1]")
        for i in range(3):
            ids = [*DOCUMENT[:64], i]
            parameters = SamplingParams(), None
            RequestLogger(max_log_len=None).log_inputs(
                f"r{i}", "\nprompt_token_ids: [9]", ids, None, *parameters
            )
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    prompts = [tokens.tolist() for tokens in read(path)]
    assert prompts == [[*DOCUMENT[:64], i] for i in range(3)]
    assert report(capsys, path)["requests"] == 3


def test_blocks_are_shared_as_vllm_shares_them():
    same, other = np.arange(32, dtype=np.int32), np.arange(40, dtype=np.int32)
    batch = batch_of([same, same, other, other + 1], 16, generated=20).batch
    assert batch.seq_lens.tolist() == [53, 53, 61, 61]
    table = batch.block_table
    # the second block of 32 equal tokens is computed for each request: it holds the prompt's last
    # token
    assert table[0, 0] == table[1, 0] == table[2, 0] != table[3, 0]
    assert len({*table[:, 1].tolist()}) == 4
    used = [n for row, k in zip(table, (4, 4, 4, 4), strict=True) for n in row[:k].tolist()]
    assert len(set(used)) == 16 - 2 and 0 not in used
    forest = shareable_forest(table, batch.seq_lens, 16, null_block_id=0)
    assert (forest.node_start.tolist(), forest.node_end.tolist()) == ([0], [16])


def test_batches_are_planned_one_after_the_other(tmp_path, capsys):
    path = write(tmp_path / "p", [[*DOCUMENT[:512], i] for i in range(10)])
    found = report(capsys, path, "--batch", 4)
    assert (found["requests"], found["batches"]) == (10, 3)
    assert main(["estimate", str(path), "--gpu", "H200", "--batch", "4"]) == 0
    said = capsys.readouterr().out
    assert "10 requests, 256 output tokens each; text counts as tokens of 4 bytes each\n" in said
    assert f"us shared, {found['attention_gain']:.2f} times as fast, from" in said


def test_a_tokenizer_and_a_model_are_taken(tmp_path, capsys):
    model = embedded_model_path()
    path = write(tmp_path / "p", ["the same beginning " * 50 + str(i) for i in range(8)])
    done = run("estimate", path, "--gpu", "H100", "--tokenizer", model, "--model", model)
    assert done.returncode == 0, done.stderr
    assert f"text counts as tokens of {model}" in done.stdout
    assert main(["estimate", str(path), "--gpu", "H100", "--model", str(model)]) == 0
    assert capsys.readouterr().out == done.stdout, "the model's own tokenizer"
    assert "attention of 30 layers on H100" in done.stdout
    assert "scaled from an H200 by data sheet, not measured" in done.stdout
    done = run("estimate", path, "--gpu", "H100", "--tokenizer", tmp_path)
    assert done.returncode == 2
    assert "cannot be loaded" in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_a_tokenizer_does_not_take_is_one_sentence(tmp_path):
    model = embedded_model_path()
    path = write(tmp_path / "p", ["half of a pair: \ud800"])
    done = run("estimate", path, "--gpu", "H100", "--tokenizer", model)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "line 1 of" in done.stderr and "the tokenizer does not take it" in done.stderr
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (broken / "tokenizer.json").write_text("[]")
    done = run("estimate", path, "--gpu", "H100", "--tokenizer", broken)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "cannot be loaded" in done.stderr


SHAPE = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
LATENT = {
    "model_type": "deepseek_v2",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


def write_model(folder: Path, **fields: object) -> Path:
    folder.mkdir()
    config = {"model_type": "llama", **SHAPE, "torch_dtype": "bfloat16", **fields}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_layers_that_gain_nothing_are_not_counted(tmp_path, capsys):
    path = write(tmp_path / "p", [[*DOCUMENT, i] for i in range(32)])
    windows = {"layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128}
    gpt_oss = write_model(
        tmp_path / "gpt-oss", model_type="gpt_oss", num_hidden_layers=24, **windows
    )
    one = report(capsys, path, "--num-layers", 1)
    some = report(capsys, path, "--model", gpt_oss)
    assert some["layers"] == 12
    assert some["layers_left_out"] == {"a sliding window of 128 tokens": 12}
    assert some["attention_us_shared"] == pytest.approx(12 * one["attention_us_shared"], abs=0.1)
    assert main(["estimate", str(path), "--gpu", "H200", "--model", str(gpt_oss)]) == 0
    assert "not counted: 12 with a sliding window of 128 tokens\n" in capsys.readouterr().out
    # FlashAttention-2, which does prefills on an L40S, has no sinks
    assert main(["estimate", str(path), "--gpu", "L40S", "--model", str(gpt_oss)]) == 2
    assert "(attention sinks)" in capsys.readouterr().err


def test_layers_of_several_shapes_are_added_up(tmp_path, capsys):
    path = write(tmp_path / "p", [[*DOCUMENT, i] for i in range(32)])
    fields = {"num_hidden_layers": 3, "per_layer_config": {"1": {"num_key_value_heads": 4}}}
    found = report(capsys, path, "--model", write_model(tmp_path / "model", **fields))
    eight, four = (report(capsys, path, "--num-kv-heads", n, "--num-layers", 1) for n in (8, 4))
    for side in ("attention_us_unshared", "attention_us_shared"):
        assert found[side] == pytest.approx(2 * eight[side] + four[side], abs=0.1)
    assert found["layers"] == 3


def test_tokens_read_are_of_the_mean_layer(tmp_path, capsys):
    """Where a layer gains nothing it reads all KV tokens, so shapes differ in what they read."""
    path = write(tmp_path / "p", [[*DOCUMENT[:128], *range(5000 + i, 7000 + i)] for i in range(64)])
    shapes = {str(i): {"num_key_value_heads": 32} for i in range(3)}
    fields = {"num_hidden_layers": 4, "per_layer_config": shapes}
    found = report(capsys, path, "--model", write_model(tmp_path / "model", **fields))
    many, few = (report(capsys, path, "--num-kv-heads", n, "--num-layers", 1) for n in (32, 8))
    assert many["kv_tokens_read"] != few["kv_tokens_read"]
    mean = (3 * many["kv_tokens_read"] + few["kv_tokens_read"]) / 4
    assert found["kv_tokens_read"] == round(mean)
    assert found["share_factor"] == round(found["kv_tokens"] / mean, 3)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "bloom", "num_hidden_layers": 30}, "ALiBi slopes"),
        ({"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}, "none has attention"),
        (
            {**LATENT, "model_type": "deepseek_v3", "num_hidden_layers": 61,
             "num_attention_heads": 128},
            "multi-head latent attention of more than 32 heads a GPU",
        ),
    ],
)  # fmt: skip
def test_a_model_of_which_no_layer_is_served_is_refused(tmp_path, capsys, fields, reason):
    path = write(tmp_path / "p", [[*DOCUMENT, i] for i in range(4)])
    model = write_model(tmp_path / "model", **fields)
    assert main(["estimate", str(path), "--gpu", "H200", "--model", str(model)]) == 2
    error = capsys.readouterr().err
    assert f"{model} has no layer to estimate on H200 ({reason})" in error
    assert error.count("\n") == 1


def test_latents_are_estimated(tmp_path, capsys):
    path = write(tmp_path / "p", [[*DOCUMENT, i] for i in range(32)])
    lite = {**LATENT, "num_attention_heads": 16, "num_hidden_layers": 27}
    model = write_model(tmp_path / "model", **lite)
    found = report(capsys, path, "--model", model, "--block-size", 64)
    assert found["layers"] == 27 and found["attention_gain"] > 1


def test_an_fp8_cache_of_latents_has_blocks_of_its_own(tmp_path, capsys):
    # 31 blocks of 16 tokens are shared, 7 of 64
    path = write(tmp_path / "p", [[*DOCUMENT[:500], i] for i in range(32)])
    lite = {**LATENT, "num_attention_heads": 16, "num_hidden_layers": 27}
    model = write_model(tmp_path / "model", **lite)
    of_model = "--model", model, "--kv-cache-dtype", "fp8"
    found = report(capsys, path, *of_model)
    assert found["layers"] == 27 and found["layers_left_out"] == {}
    assert found == report(capsys, path, *of_model, "--block-size", 64)
    assert found["kv_tokens_read"] > report(capsys, path, "--model", model)["kv_tokens_read"]
    for gpu in ("L40S", "B200"):
        words = [str(path), "--gpu", gpu, *map(str, of_model)]
        assert main(["estimate", *words]) == 2
        assert "(multi-head latent attention)" in capsys.readouterr().err
    words = [str(path), "--gpu", "H200", *map(str, of_model), "--block-size", "0"]
    assert main(["estimate", *words]) == 2
    assert "block_size must be at least 1, got 0" in capsys.readouterr().err


def test_a_cache_that_a_gpu_does_not_serve_is_refused(tmp_path, capsys):
    path = write(tmp_path / "p", [[*DOCUMENT, i] for i in range(4)])
    assert report(capsys, path, "--kv-cache-dtype", "fp8")["layers"] == 32
    # FlashAttention-4 takes it, too
    assert main(["estimate", str(path), "--gpu", "B200", "--kv-cache-dtype", "fp8"]) == 0
    assert main(["estimate", str(path), "--gpu", "L40S", "--kv-cache-dtype", "fp8"]) == 2
    assert "fp8 KV cache keep vLLM's own backend on L40S" in capsys.readouterr().err


def test_a_model_needs_vllm_and_numbers_do_not(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('no vLLM here')\n")
    path = write(tmp_path / "p", [[*DOCUMENT, i] for i in range(4)])
    model = write_model(tmp_path / "model", num_hidden_layers=2)
    there = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run("estimate", path, "--gpu", "H200", "--model", model, PYTHONPATH=there)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "--model needs vLLM, which reads the model's config.json (no vLLM here)" in done.stderr
    assert "or give the shape by --num-qo-heads, --num-kv-heads and --head-dim" in done.stderr
    done = run("estimate", path, "--gpu", "H200", "--num-kv-heads", 4, PYTHONPATH=there)
    assert done.returncode == 0, done.stderr
    assert "attention of one layer on H200" in done.stdout


def test_a_batch_invariant_engine_serves_fewer_layers(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    path = write(tmp_path / "p", [[*DOCUMENT, i] for i in range(4)])
    lite = {**LATENT, "num_attention_heads": 16, "num_hidden_layers": 27}
    model = write_model(tmp_path / "model", **lite)
    assert main(["estimate", str(path), "--gpu", "H200", "--model", str(model)]) == 2
    assert "(batch invariance)" in capsys.readouterr().err


def test_tokens_are_of_one_step(tmp_path, capsys):
    path = write(tmp_path / "p", [[*DOCUMENT, i] for i in range(8)])
    together = report(capsys, path)
    by_two = report(capsys, path, "--batch", 2)
    assert by_two["kv_tokens"] * 4 == together["kv_tokens"]
    assert by_two["kv_tokens_read"] < together["kv_tokens_read"]


def test_a_whole_call_is_near_what_was_measured(tmp_path, capsys):
    """64 questions on a document of 34k tokens that is not cached, 64 output tokens, Llama-3.1-8B
    on an H100: 10.8 s with FLASH_ATTN, 9.0 with PREFIX_SHARE, 2.1 with the parts.
    """
    document = [(7 * i) % 1000 for i in range(34_400)]
    path = write(tmp_path / "p", [[*document, *range(i, i + 30)] for i in range(64)])
    model = write_model(tmp_path / "model", num_hidden_layers=32)
    words = ["--model", model, "--weights-gb", 16, "--output-tokens", 64]
    found = report(capsys, path, *words, gpu="H100")["call_ms"]
    assert 0.8 < found["sum"]["vllm"] / 10_770 < 1.3
    assert 0.8 < found["sum"]["parts_off"] / 9_040 < 1.2
    assert 0.8 < found["sum"]["parts_on"] / 2_090 < 1.2
    for side in ("vllm", "parts_off", "parts_on"):
        rows = [times[side] for row, times in found.items() if row != "sum"]
        assert sum(rows) == pytest.approx(found["sum"][side], abs=0.1)


def llama(*options: str) -> EstimatedModel:
    return estimated_model(parser().parse_args(["estimate", "-", "--gpu", "H200", *options]))


def test_only_new_text_is_tokenized_and_hashed_again():
    group = batch_of([np.arange(n, dtype=np.int32) for n in (33, 33, 49, 20)], 16, generated=5)
    # of 33 tokens two blocks are shared; the last token is computed in any case
    new = [33, 1, 17, 4]
    attended = sum(sum(range(n - k + 1, n + 1)) for n, k in zip((33, 33, 49, 20), new, strict=True))
    assert group[3:] == (135, sum(new), attended)
    group = group._replace(prompt_tokens=1000, new_tokens=100, attended=100_000)
    attention_us = 50.0, 5.0
    known = call_times(group, 10, attention_us, llama("--num-layers", "1"))
    assert list(known) == [*NEW_US, "sum"], "no weights, no prefill and decode"
    half = 900 * SHARED_US["hashes"] + 100 * NEW_US["hashes"]
    assert known["hashes"][2] == pytest.approx(half / 1e3)
    assert known["lookup"][2] == pytest.approx(SHARED_US["lookup"])
    nothing = call_times(group._replace(new_tokens=1000), 10, attention_us, llama())
    _, parts_off, parts_on = nothing["tokenization"]
    assert parts_on == parts_off
    whole = call_times(group, 10, attention_us, llama())
    vllm, parts_off, parts_on = whole["decode"]
    assert vllm > parts_off == parts_on
    vllm, _, parts_on = whole["prefill"]
    assert parts_on == vllm > 0


def cells(said: str) -> list[list[str]]:
    return [line.split() for line in said.splitlines()]


def test_the_table_says_where_the_time_goes(tmp_path, capsys):
    path = write(tmp_path / "p", [[*DOCUMENT, i] for i in range(8)])
    words = ["estimate", str(path), "--gpu", "H200"]
    assert main([*words, "--num-layers", "1"]) == 0
    said = capsys.readouterr().out
    assert "where the time goes, ms of a batch of 256, one thing after the other:\n" in said
    assert ["tokenization", "83.2", "83.2", "10.7"] in cells(said)
    assert said.endswith("name a --model that has them, or --weights-gb and --num-layers\n")
    model = write_model(tmp_path / "model", num_hidden_layers=2)
    (model / "model.safetensors").write_bytes(bytes(1000))
    assert main([*words, "--model", str(model)]) == 0
    said = capsys.readouterr().out
    assert "\nprefill " in said and "\ndecode " in said and "--weights-gb" not in said
    assert said.endswith(f"\nfrom {SOURCE}\n")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, None),
        ({"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}, "experts"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
    ],
)
def test_weights_that_are_not_dense_or_not_of_16_bits_are_named(tmp_path, capsys, fields, words):
    path = write(tmp_path / "p", [[*DOCUMENT, i] for i in range(8)])
    model = write_model(tmp_path / "model", num_hidden_layers=2, **fields)
    words_of = ["estimate", str(path), "--gpu", "H200", "--model", str(model)]
    assert main(words_of) == 0
    assert "of 16 bits" not in capsys.readouterr().out, "without weights there is no arithmetic"
    assert main([*words_of, "--weights-gb", "1"]) == 0
    said = capsys.readouterr().out
    note = f"not counted: {words}; arithmetic is that of dense weights of 16 bits\n"
    assert note in said if words else "of 16 bits" not in said


def test_weights_that_a_folder_has_twice_count_once(tmp_path):
    model = write_model(tmp_path / "model")
    for name in ("consolidated", "model-1", "model-2"):
        (model / f"{name}.safetensors").write_bytes(bytes(1000))
        (model / f"{name}.bin").write_bytes(bytes(5000))
    assert weight_bytes(model) == 2000
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-2.safetensors", "b": "../c"}}))
    assert weight_bytes(model) == 1000
    for wrong in (
        "{",
        "[]",
        "{}",
        '{"weight_map": [1]}',
        '{"weight_map": {"a": [1]}}',
    ):
        index.write_text(wrong)
        with pytest.raises(PrefixShareError, match="is not an index of weights: download it"):
            weight_bytes(model)
    index.unlink()
    for name in ("model-1", "model-2"):
        (model / f"{name}.safetensors").unlink()
    assert weight_bytes(model) == 1000


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "has no prompts: give a JSON string"),
        (b"INFO nothing here\n", "line 1 of {path} is not a prompt"),
        (b'"one"\nINFO two\n', "line 2 of "),
        (b'"one"\n{"text": "two"}\n', "line 2 of {path} is not a prompt (neither text nor"),
        (b"[1, -2]\n", "neither text nor token ids"),
        (b"[1, true]\n", "neither text nor token ids"),
        (b"[1e999]\n", "neither text nor token ids"),
        (b"[%s]\n" % (b"9" * 5000), "4300"),
        (b'""\n', "it is empty"),
        (b"[" * 200000, "line 1 of {path} is not a prompt"),
        (b"\xff\xfe\n", "line 1 of {path} is not UTF-8 text"),
        (b"\"__import__('os').abort()\"[\n", "line 1 of {path} is not a prompt"),
    ],
)
def test_a_wrong_file_gets_one_sentence(tmp_path, content, sentence, capsys):
    path = tmp_path / "p"
    path.write_bytes(content)
    assert main(["estimate", str(path), "--gpu", "H200"]) == 2
    error = capsys.readouterr().err
    assert sentence.replace("{path}", str(path)) in error
    assert error.count("\n") == 1


def test_memory_is_bounded():
    long = np.zeros(1 << 20, np.int32)  # the width of the table that all of them would have
    with pytest.raises(PrefixShareError, match="lower --batch"):
        batch_of([long, *[long[:1]] * 299], 16)


def test_too_many_blocks_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vllm_prefixshare.cli.prefixes.MAX_BLOCKS", 50)
    path = write(tmp_path / "p", [[*DOCUMENT[i : i + 400]] for i in range(3)])
    assert main(["estimate", str(path), "--gpu", "H200"]) == 2
    error = capsys.readouterr().err
    assert (
        "line 3 and the prompts before it have more than 50 different blocks: give --limit" in error
    )
    assert report(capsys, path, "--limit", "2")["requests"] == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["/nowhere"], "/nowhere cannot be read (No such file"),
        (["{path}", "--batch", "0"], "--batch must be from 1 to"),
        (["{path}", "--output-tokens", "-1"], "--output-tokens must be from 0 to"),
        (["{path}", "--head-dim", "48"], "head_dim must be"),
        (["{path}", "--block-size", "9" * 30], "block_size must be at most"),
        (
            ["{path}", "--weights-gb", "16", "--num-kv-heads", "4"],
            "--weights-gb needs the number of layers",
        ),
        (["{path}", "--weights-gb", "-1"], "--weights-gb must be above 0"),
        (["{path}", "--kv-cache-dtype", "fp9"], "a KV cache of type fp9 keep vLLM's own"),
    ],
)
def test_a_wrong_argument_gets_one_sentence(tmp_path, arguments, sentence, capsys):
    path = write(tmp_path / "p", ["one"])
    filled = [a.format(path=path) for a in arguments]
    assert main(["estimate", "--gpu", "H200", *filled]) == 2
    assert sentence in capsys.readouterr().err
