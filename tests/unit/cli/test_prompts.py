"""Which files of prompts are JSON, and which are logs."""

import gc
import json
from pathlib import Path

import numpy as np
import pytest

from vllm_prefixshare.cli import prompts
from vllm_prefixshare.cli.main import main
from vllm_prefixshare.cli.prompts import Source, open_source, read_requests
from vllm_prefixshare.cli.tokenization import ByteTokenizer, Tokenizer
from vllm_prefixshare.core import PrefixShareError

LOGGED = "INFO 11-22 04:00:00 [logger.py:55] Request r1: prompt: 'x', prompt_token_ids: [1, 2]\n"
#: A prompt about a log.
QUOTING = "why does it say prompt_token_ids: [1, 2]?"


def prompts_of(path: Path, content: str, tokenizer: Tokenizer | None = None) -> list[list[int]]:
    path.write_bytes(content.encode())
    source = Source(path)
    with open_source(source) as file:
        requests = read_requests(source, file, tokenizer or ByteTokenizer())
        return [request.tokens.tolist() for request in requests]


@pytest.mark.parametrize("first", ["[1]", '"text"', '{"prompt": [1]}'])
def test_the_mark_that_windows_puts_before_a_file_is_not_read(tmp_path, first):
    plain = prompts_of(tmp_path / "p", f"{first}\n[2]\n")
    assert len(plain) == 2
    assert prompts_of(tmp_path / "p", f"\ufeff{first}\n[2]\n") == plain


@pytest.mark.parametrize(
    "first",
    [
        "[Gloo] Rank 0 is connected to 0 peer ranks.",
        "[rank0]:[W1127 04:00:00] Warning: ...",
        "# a note",
    ],
)
def test_a_log_may_begin_with_any_line_that_is_no_json(tmp_path, first):
    assert prompts_of(tmp_path / "p", f"{first}\n{LOGGED}") == [[1, 2]]


def test_a_log_may_have_lines_of_json(tmp_path):
    assert prompts_of(tmp_path / "p", f'INFO\n{{"loaded": true}}\n[3]\n{LOGGED}') == [[1, 2]]


@pytest.mark.parametrize("prompt", [QUOTING, {"prompt": QUOTING}])
def test_a_prompt_about_a_log_is_no_log(tmp_path, prompt):
    content = f'{json.dumps(prompt)}\n"two"\n[3]\n'
    assert [len(tokens) for tokens in prompts_of(tmp_path / "p", content)] == [11, 1, 1]


@pytest.mark.parametrize("first", ["# my prompts", "42", '{"prompt": "cut o'])
@pytest.mark.parametrize("then", ['"one"', json.dumps(QUOTING), '{"prompt": [1]}'])
def test_json_is_not_skipped_for_its_first_line(tmp_path, first, then):
    with pytest.raises(PrefixShareError, match=r"^line 1 of .* is not a prompt \("):
        prompts_of(tmp_path / "p", f"{first}\n{then}\n[3]\n")


def test_a_log_without_requests_has_no_prompts(tmp_path):
    with pytest.raises(PrefixShareError, match="has no prompts: give"):
        prompts_of(tmp_path / "p", "INFO\n[Gloo] Rank 0 is connected to 0 peer ranks.\n")


def test_a_log_whose_name_ends_in_txt_is_no_text(tmp_path):
    assert prompts_of(tmp_path / "p.txt", f"INFO 11-22 04:00:00 Started\n{LOGGED}") == [[1, 2]]
    assert len(prompts_of(tmp_path / "p.txt", "one\ntwo\n")) == 2


class BosTokenizer(ByteTokenizer):
    """Begins each text with a token, as Llama's does."""

    def encode(self, text: str) -> np.ndarray:
        return np.append(np.int32(1), super().encode(text))


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [("p.jsonl", '{"prompt": ""}\n', "line 1"), ("p.csv", "prompt,id\nabc,1\n,2\n", "row 2")],
)
def test_an_empty_prompt_is_one_sentence_with_every_tokenizer(tmp_path, name, content, place):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(PrefixShareError, match=rf"^{place} of .* is not a prompt \(it is empty\)"):
        prompts_of(path, content, BosTokenizer())


def test_a_table_is_left_before_its_file_is_closed(tmp_path, capsys, monkeypatch):
    """An error in a generator that is freed too late reaches only Python's hook, and is printed."""
    unraisable: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", unraisable.append)
    path = tmp_path / "p.csv"
    path.write_text("prompt,id\nabc,1\n,2\nabc,3\n")
    assert main(["estimate", str(path), "--gpu", "H200"]) == 2
    gc.collect()
    assert not unraisable
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "data",
    [
        {"prompt": [1], "n": 8},
        {"messages": [{"role": "user", "content": "hi"}], "n": 8},
        {"body": {"prompt": [1], "n": 8}},
    ],
)
def test_n_counts_next_to_the_prompt(tmp_path, capsys, data):
    path = tmp_path / "p.jsonl"
    path.write_text(f"{json.dumps(data)}\n")
    assert main(["estimate", str(path), "--gpu", "H200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 8


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_an_array_on_one_line_may_be_longer_than_a_line(tmp_path, monkeypatch, mark):
    monkeypatch.setattr(prompts, "MAX_LINE", 64)
    monkeypatch.setattr(prompts, "MAX_ARRAY", 1024)
    ids = [[i] * 20 for i in range(1, 10)]
    assert prompts_of(tmp_path / "p", f"{mark}{json.dumps(ids)}\n") == ids
    for content, sentence in (
        (json.dumps(ids * 2), "write one request on each line"),
        (f"[1]\n{ids}\n", "line 2 of .* is longer than"),
        (json.dumps({"prompt": ids}), "line 1 of .* is longer than"),
    ):
        with pytest.raises(PrefixShareError, match=sentence):
            prompts_of(tmp_path / "p", content)
