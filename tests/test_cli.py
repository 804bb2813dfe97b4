"""The commands a user types: what they print, and one sentence with status 2 for a mistake."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_prefixshare.cli import attention_of, main, parser
from vllm_prefixshare.costs.cost_table import CostTable
from vllm_prefixshare.planning.dividers.registry import DIVIDERS

EXAMPLE = Path(__file__).parents[1] / "examples" / "document_qa.py"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PREFIXSHARE_CACHE", str(tmp_path))


def test_doctor_finds_everything_in_place(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "plugin             registered" in out
    assert out.endswith("PREFIX_SHARE can be chosen\n")


def test_doctor_names_a_wrong_variable(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_PREFIXSHARE_SHARE", "maybe")
    assert main(["doctor"]) == 2
    error = capsys.readouterr().err
    assert "VLLM_PREFIXSHARE_SHARE='maybe' is not valid: set it to one of auto" in error


def test_inspect_shows_every_divider(capsys):
    assert main(["inspect", "--tree", "1,4_256,64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 requests, 1280 KV tokens read one by one"
    rows = {line.split()[0]: line.split() for line in lines[2:]}
    assert rows.keys() == DIVIDERS.keys()
    assert rows["deft_node"][1:4] == ["512", "2.50", "5"]
    assert rows["per_request"][1] == "1280"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["inspect", "--tree", "4,1_16,16"], "tree '4,1_16,16' is not valid"),
        (["inspect", "--divider", "best"], "divider 'best' is unknown"),
        (["inspect", "--head-dim", "48"], "head_dim must be"),
        (["inspect", "--workers", "0"], "num_workers must be at least 1"),
        (["profile", "--model", "/nowhere"], "/nowhere/config.json does not describe a model"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, sentence, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "group"),
    [
        ({"num_attention_heads": 8, "hidden_size": 512, "num_key_value_heads": None}, 1),
        ({"text_config": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}}, 4),
        ({"num_attention_heads": 0, "hidden_size": 512}, None),
        ([], None),
    ],
)
def test_the_shape_is_taken_from_the_models_file(tmp_path, config, group, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = parser().parse_args(["inspect", "--model", str(tmp_path)])
    if group is None:
        assert main(["inspect", "--model", str(tmp_path)]) == 2
        assert "config.json does not describe a model" in capsys.readouterr().err
    else:
        shape = attention_of(arguments)
        assert (shape.head_dim, shape.gqa_group_size) == (64, group)


def test_profile_writes_a_table_that_the_backend_would_load(tmp_path, capsys):
    (tmp_path / "config.json").write_text(
        json.dumps({"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256})
    )
    assert main(["profile", "--model", str(tmp_path), "--block-size", "64"]) == 0
    (path,) = (tmp_path / "cost_tables").glob("*.json")
    assert f"written to {path}" in capsys.readouterr().out
    table = CostTable.load(path)
    assert (table.fingerprint.head_dim, table.fingerprint.gqa_group_size) == (64, 2)
    # how long each took is the machine's affair; what was timed, and that a tile of more tokens
    # never costs less, is not
    tile, unshared = table.tile_us, table.unshared_us
    assert unshared is not None
    assert (tile.rows.tolist(), unshared.rows.tolist()) == ([2, 8, 32, 128], [2, 8])
    assert tile.kv_len.tolist() == unshared.kv_len.tolist() == [256, 1024, 4096, 16384]
    assert float(table.tile(2, 16384)) >= float(table.tile(2, 256)) > 0
    assert float(table.tile(32, 16384)) >= float(table.tile(32, 256)) > 0
    assert min(float(table.unshared(2, 256)), float(table.unshared(2, 16384))) > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--document", "/nowhere.md"], "document /nowhere.md cannot be read (No such file"),
        (["--document", "{binary}"], "cannot be read (it is not UTF-8 text)"),
        (["--questions", "{empty}"], "is empty"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (["--model", "/nowhere"], "model /nowhere is not a checkpoint folder"),
        (["--document", "{long}"], "the model reads 8192: shorten the document"),
    ],
)
def test_the_example_refuses_before_an_engine_starts(arguments, sentence, tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_PREFIXSHARE_CACHE")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").write_text("\n  \n")
    (tmp_path / "long").write_text("prefix " * 9000)
    names = {name: tmp_path / name for name in ("binary", "empty", "long")}
    command = [sys.executable, str(EXAMPLE), *(a.format(**names) for a in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert "starting vLLM" not in done.stdout
