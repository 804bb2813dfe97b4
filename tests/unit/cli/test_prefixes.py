"""Prefixes of a file: counted block by block, and compared with a search over all pairs."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.decode_groups import one_group
from vllm_prefixshare.cli.main import main
from vllm_prefixshare.cli.prefixes import PrefixBlocks, _hashes

BLOCK = 4
#: Prompts of few different tokens share prefixes of every length.
PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=12)


def added(prompts: list[list[int]], block_size: int = BLOCK) -> PrefixBlocks:
    blocks = PrefixBlocks(block_size)
    for i, prompt in enumerate(prompts):
        blocks.add(str(i), np.array(prompt, np.int32))
    return blocks


def common(a: list[int], b: list[int]) -> int:
    """Number of leading tokens that two prompts share."""
    same = [x == y for x, y in zip(a, b, strict=False)]
    return same.index(False) if False in same else len(same)


@settings(max_examples=200, deadline=None)
@given(PROMPTS)
def test_blocks_are_shared_as_pairs_of_prompts_say(prompts):
    blocks = added(prompts)
    for i, prompt in enumerate(prompts):
        assert blocks.tokens_of(i).tolist() == prompt
        shareable = (len(prompt) - 1) // BLOCK  # the last token is computed in any case
        earlier = [
            min(common(prompt, other), (len(other) - 1) // BLOCK * BLOCK) // BLOCK
            for other in prompts[:i]
        ]
        assert blocks.prompts[i].num_known == min(shareable, max(earlier, default=0))
    found = one_group(blocks)
    distinct = {
        tuple(prompt[: end * BLOCK])
        for prompt in prompts
        for end in range(1, (len(prompt) - 1) // BLOCK + 1)
    }
    shareable = sum((len(prompt) - 1) // BLOCK for prompt in prompts)
    assert found.prompt_tokens == sum(map(len, prompts))
    assert found.new_tokens == found.prompt_tokens - BLOCK * (shareable - len(distinct))
    table, lens = found.batch.block_table, found.batch.seq_lens
    used = [table[i, j] for i in range(len(lens)) for j in range(-(-int(lens[i]) // BLOCK))]
    assert 0 not in used
    private = sum(-(-(len(p) + 1) // BLOCK) - (len(p) - 1) // BLOCK for p in prompts)
    assert len(set(used)) == len(distinct) + private


@settings(max_examples=200, deadline=None)
@given(PROMPTS)
def test_neighbours_in_depth_first_order_share_the_most(prompts):
    blocks = added(prompts)
    order = blocks.depth_first_order()
    assert sorted(order) == list(range(len(prompts)))
    # a block is found again wherever it was just used: requests of a node are neighbours
    for i in range(len(prompts)):
        for block in blocks.prompts[i].blocks.tolist():
            places = [n for n, j in enumerate(order) if block in blocks.prompts[j].blocks.tolist()]
            assert places == list(range(places[0], places[0] + len(places)))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 40))
def test_windows_of_tokens_have_the_same_hash_only_if_they_are_equal(tokens, width):
    width = min(width, len(tokens))
    windows = [tuple(tokens[i : i + width]) for i in range(len(tokens) - width + 1)]
    hashes = _hashes(np.array(tokens, np.int32), width).tolist()
    assert len(hashes) == len(windows)
    assert len(set(zip(hashes, windows, strict=True))) == len(set(hashes)) == len(set(windows))


@settings(max_examples=200, deadline=None)
@given(PROMPTS)
def test_a_break_is_at_the_first_token_that_differs(prompts):
    for one in added(prompts).breaks():
        first, other = prompts[one.first], prompts[one.other]
        assert one.other < one.first
        assert common(first, other) == one.token
        assert one.block == one.token // BLOCK
        assert one.num_prompts >= 1 and one.equal_after >= BLOCK


def test_a_time_at_the_start_breaks_a_prefix():
    document = list(range(100, 500))
    prompts = [[7, i, *document, 900 + i] for i in range(10)]
    (one,) = added(prompts).breaks()
    assert (one.block, one.token, one.first, one.other, one.num_prompts) == (0, 1, 1, 0, 9)
    # the rest of the first block is lost in any case
    assert 400 - 2 * BLOCK < one.equal_after <= 400


def test_a_longer_time_shifts_what_follows():
    document = list(range(100, 500))
    prompts = [[7, *range(i), *document] for i in (1, 2, 3)]
    (one,) = added(prompts).breaks()
    assert (one.token, one.num_prompts) == (2, 2)
    assert one.equal_after > 380


def test_conversations_that_go_on_break_nothing():
    turns = list(range(400))
    assert added([turns[:100], turns[:200], turns]).breaks() == []
    assert added([turns, turns[:200], turns[:100]]).breaks() == []


def test_questions_at_the_end_break_nothing():
    document = list(range(100, 500))
    assert added([[*document, *range(i * 30, i * 30 + 30)] for i in range(8)]).breaks() == []


def test_samples_share_their_prompt():
    blocks = PrefixBlocks(BLOCK)
    blocks.add("one", np.arange(9, dtype=np.int32), samples=3)
    assert [prompt.num_known for prompt in blocks.prompts] == [0, 2, 2]


def estimate(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> dict:
    assert main(["estimate", *map(str, words), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_what_breaks_a_prefix_is_named(tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    rules = "Answer politely. " * 100
    path.write_text(
        "".join(
            json.dumps({"custom_id": f"task-{i}", "prompt": f"It is 14:02:{i:02d}. {rules}{i}"})
            + "\n"
            for i in range(20)
        )
    )
    found = estimate(capsys, path, "--gpu", "H200")
    (one,) = found["prefix_cache"]["breaks"]
    assert (one["block"], one["shared_tokens"], one["requests"]) == (0, 0, 19)
    assert (one["first"], one["differs_from"]) == ("task-1", "task-0")
    assert one["text"].startswith("01. Answer") and one["other_text"].startswith("00. Answer")
    assert one["equal_after"] > 350
    assert main(["estimate", str(path), "--gpu", "H200"]) == 0
    said = capsys.readouterr().out
    assert "what breaks prefixes" in said and "01. Answer" in said


def test_sorting_brings_documents_together(tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    documents = [[1 + i, *range(100, 3100)] for i in range(4)]
    prompts = [[*documents[i % 4], 5000 + i] for i in range(64)]
    path.write_text("".join(f"{prompt}\n" for prompt in prompts))
    found = estimate(capsys, path, "--gpu", "H200", "--batch", "16,64")
    rows = {(row["batch"], row["order"]): row for row in found["estimates"]}
    assert list(rows) == [(16, "as ordered"), (16, "sorted by prefix"), (64, "as ordered")]
    shuffled, ordered = rows[16, "as ordered"], rows[16, "sorted by prefix"]
    # four requests on each of four documents, or sixteen on one
    tokens = 16 * (3002 + 129)
    assert shuffled["kv_tokens"] == ordered["kv_tokens"] == tokens
    assert shuffled["share_factor"] <= tokens / (4 * 2992 + 16 * (10 + 129)) + 0.01
    assert ordered["share_factor"] <= tokens / (2992 + 16 * (10 + 129)) + 0.01
    assert ordered["share_factor"] > 2 * shuffled["share_factor"]
    assert found["batch"] == 64
    assert main(["estimate", str(path), "--gpu", "H200", "--batch", "16"]) == 0
    seconds = ordered["seconds"]["parts_on"]
    assert (
        f"\nSorted by prefix, PREFIX_SHARE takes {seconds:.3g} s: sort" in capsys.readouterr().out
    )


@pytest.mark.parametrize(("gpus", "status"), [(1, 1), (2, 0)])
def test_what_does_not_fit_is_told(tmp_path, capsys, gpus, status):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f"{[i, *range(119_999)]}\n" for i in range(4)))
    words = [path, "--gpu", "A10", "--tensor-parallel-size", gpus, "--output-tokens", 16]
    found = estimate(capsys, *words, status=status)
    # 32 layers with 8 KV heads of 128 numbers of two bytes, keys and values
    needed = 120_016 * 32 * 8 * 128 * 2 * 2 / gpus / 1e9
    usable, weights = 0.92 * 24, 16.06 / gpus
    fits = needed <= usable - weights
    assert fits == (status == 0)
    assert found["memory"]["fits"] == fits
    assert found["memory"]["too_long"] == (0 if fits else 4)
    assert found["memory"]["kv_gb"] == pytest.approx(usable - weights, abs=0.01)
    if fits:
        assert found["kv_gb"] == pytest.approx(needed, rel=0.01)
        assert found["batches"] == 4 and found["limited_by_memory"]
    else:
        assert main(["estimate", *map(str, words)]) == 1
        said = capsys.readouterr().out
        assert said.startswith("Does not fit: 4 of 4 requests need more KV cache than the 6.0 GB")
        assert " ms a token" not in said


def test_the_other_requests_are_estimated_where_one_does_not_fit(tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f"{[*range(tokens)]}\n" for tokens in (100, 200_000, 300)))
    found = estimate(capsys, path, "--gpu", "A10", status=1)
    assert (found["memory"]["too_long"], found["batches"]) == (1, 1)
    assert found["tokens_per_second"]["vllm"] > 0
    assert main(["estimate", str(path), "--gpu", "A10"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("Does not fit: 1 of 3 requests") and "where the time goes" in said


def test_shared_blocks_need_room_once(tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f"{[*range(120_000), i]}\n" for i in range(16)))
    found = estimate(capsys, path, "--gpu", "H200", "--output-tokens", 15)
    distinct = 120_000 + 16 * 16
    assert found["kv_gb"] == pytest.approx(distinct * 131072 / 1e9, rel=1e-3)
    assert found["batches"] == 1 and not found["limited_by_memory"]


def test_times_tokens_and_hours_agree(tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f"{[*range(5000), i]}\n" for i in range(40)))
    words = ["--gpu", "H100", "--batch", 16, "--output-tokens", 100, "--samples", 2]
    found = estimate(capsys, path, *words)
    assert (found["requests"], found["batches"]) == (80, 5)
    for side in ("vllm", "parts_off", "parts_on"):
        seconds = found["seconds"][side]
        assert seconds * 1e3 == pytest.approx(5 * found["call_ms"]["sum"][side], rel=1e-3)
        assert found["tokens_per_second"][side] == pytest.approx(80 * 100 / seconds, rel=1e-3)
        assert found["ms_per_token"][side] == pytest.approx(
            found["call_ms"]["decode"][side] / 100, rel=1e-3
        )
        assert found["gpu_hours"][side] == pytest.approx(seconds / 3600, rel=1e-2)


def test_two_gpus_have_half_of_the_heads_and_weights_each(tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f"{[*range(5000), i]}\n" for i in range(32)))
    one = estimate(capsys, path, "--gpu", "H200", "--num-qo-heads", 16, "--num-kv-heads", 4)
    two = estimate(capsys, path, "--gpu", "H200", "--tensor-parallel-size", 2)
    assert two["attention_us_shared"] == pytest.approx(32 * one["attention_us_shared"], abs=0.2)
    assert two["memory"]["weights_gb"] == pytest.approx(8.03)
    assert two["gpu_hours"]["vllm"] == pytest.approx(2 * two["seconds"]["vllm"] / 3600, rel=1e-2)


def test_a_large_batch_is_limited_by_arithmetic(tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f"{[i, 2]}\n" for i in range(1024)))
    found = estimate(capsys, path, "--gpu", "H200", "--batch", "1,1024")
    few, many = (
        row["ms_per_token"]["vllm"] - row["attention_us_unshared"] / 1e3
        for row in found["estimates"]
    )
    reading = 16.06e9 / (4.8e12 * 0.8) * 1e3
    multiplying = 1024 * 16.06e9 / (989e12 * 0.75) * 1e3
    assert many - few == pytest.approx(multiplying - reading, abs=0.01)
