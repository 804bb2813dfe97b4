"""What is read as a prompt in JSON lines, text and logs."""

import json
from pathlib import Path

import numpy as np
import pytest

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


@pytest.mark.parametrize("first", ["[Gloo] Rank 0 is connected.", '{"loaded": true}', "[3]"])
def test_a_log_may_have_lines_of_all_kinds(tmp_path, first):
    assert prompts_of(tmp_path / "p.log", f"{first}\n{LOGGED}") == [[1, 2]]
    with pytest.raises(PrefixShareError, match="has no prompts: give"):
        prompts_of(tmp_path / "p.log", f"{first}\n")


@pytest.mark.parametrize("prompt", [QUOTING, {"prompt": QUOTING}])
def test_a_prompt_about_a_log_is_no_log(tmp_path, prompt):
    content = f'{json.dumps(prompt)}\n"two"\n[3]\n'
    assert [len(tokens) for tokens in prompts_of(tmp_path / "p", content)] == [11, 1, 1]


@pytest.mark.parametrize("first", ["# my prompts", "42", '{"prompt": "cut o'])
def test_json_is_not_skipped_for_its_first_line(tmp_path, first):
    with pytest.raises(PrefixShareError, match=r"^line 1 of .* is not a prompt \("):
        prompts_of(tmp_path / "p", f"{first}\n{json.dumps(QUOTING)}\n[3]\n")


class BosTokenizer(ByteTokenizer):
    """Begins each text with a token, as Llama's does."""

    def encode(self, text: str) -> np.ndarray:
        return np.append(np.int32(1), super().encode(text))


def test_an_empty_prompt_is_one_sentence_with_every_tokenizer(tmp_path):
    with pytest.raises(PrefixShareError, match=r"^line 1 of .* is not a prompt \(it is empty\)"):
        prompts_of(tmp_path / "p.jsonl", '{"prompt": ""}\n', BosTokenizer())


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
