"""The workloads that kernels are compared on, and the harness that compares them."""

import json
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kernel import bench as bench_kernel
from benchmarks.peers import Case, Options, UnavailableError, make
from benchmarks.peers.flashinfer_peers import levels_of, page_arrays, token_tree_mask
from benchmarks.support.trees import Workload, forest, tree
from benchmarks.support.workload_sets import (
    ANCHORS,
    FASTTREE,
    WORKLOAD_SETS,
    recorded_step,
    token_tree_parents,
    workload_set,
)
from tests.support.processes import run
from tests.support.reference_attention import reference_attention
from vllm_prefixshare.core import PrefixShareError

ROOT = Path(__file__).parents[3]


@st.composite
def forests(draw):
    """Parents and lengths of a random forest; some inner nodes are empty or short."""
    count = draw(st.integers(1, 14))
    parents = [draw(st.integers(-1, i - 1)) for i in range(count)]
    inner = set(parents)
    tokens = [draw(st.integers(0 if i in inner else 1, 50)) for i in range(count)]
    return parents, tokens


def requests_of(parents, tokens):
    """The path to each leaf, as the nodes with tokens on the path, in depth-first order."""

    def below(i):
        children = [j for j, p in enumerate(parents) if p == i]
        return [path for j in children for path in below(j)] if children else [[i]]

    paths = [path for i, p in enumerate(parents) if p == -1 for path in below(i)]
    return [climb(parents, path[-1]) for path in paths]


def climb(parents, i):
    return [*climb(parents, parents[i]), i] if parents[i] >= 0 else [i]


@given(forests(), st.sampled_from([1, 4, 16]), st.integers(0, 9))
def test_two_requests_share_a_block_just_where_its_tokens_are_the_same(shape, size, spare):
    parents, tokens = shape
    w = forest("f", parents, tokens, size, spare=spare)
    streams = [
        [(node, t) for node in path for t in range(tokens[node])]
        for path in requests_of(parents, tokens)
    ]
    assert w.seq_lens.tolist() == [len(s) for s in streams]
    owner: dict[tuple, int] = {}
    for row, stream in zip(w.block_table.tolist(), streams, strict=True):
        blocks = -(-len(stream) // size)
        for column in range(blocks):
            # a whole block depends on all tokens up to its end; a last, partial block is private
            end = (column + 1) * size
            whole = end <= len(stream)
            shared = whole and sum(s[:end] == stream[:end] for s in streams) > 1
            key = tuple(stream[:end]) if shared else (*stream[:end], "of", tuple(stream))
            assert owner.setdefault(key, row[column]) == row[column]
        assert len([b for b in row[blocks:] if b]) == -(-spare // size)
    used = Counter(owner.values())
    assert max(used.values()) == 1, "two contents in one block"
    assert 0 not in used
    assert max(used) < w.num_blocks


@given(forests(), st.sampled_from([1, 4, 16]))
def test_the_nodes_cover_every_row_once_and_parents_come_first(shape, size):
    w = forest("f", *shape, size)
    covered = np.zeros(w.block_table.shape, int)
    for i, n in enumerate(w.nodes):
        assert n.parent < i
        covered[n.first : n.last, n.start : n.end] += 1
        assert len(np.unique(w.block_table[n.first : n.last, n.start : n.end], axis=0)) == 1
        if n.parent >= 0:
            above = w.nodes[n.parent]
            assert above.first <= n.first
            assert n.last <= above.last
            assert n.start == above.end
    blocks = -(-w.seq_lens // size)
    assert np.array_equal(covered, np.arange(covered.shape[1]) < blocks[:, None])
    distinct = sum((n.end - n.start) * size for n in w.nodes)
    assert w.kv_tokens == distinct - int((blocks * size - w.seq_lens).sum())


def test_an_unfilled_block_is_computed_again_in_each_child():
    w = forest("f", [-1, 0, 0], [20, 5, 30], block_size=16)
    assert [tuple(n) for n in w.nodes] == [(-1, 0, 1, 0, 2), (0, 1, 2, 0, 1), (0, 1, 4, 1, 2)]
    assert w.kv_tokens == 16 + (4 + 5) + (4 + 30)


@pytest.mark.parametrize(
    ("parents", "tokens", "sentence"),
    [
        ([-1, 1], [1, 1], "node 1 of 'f' has parent 1"),
        ([-1], [-1], "tokens cannot be negative"),
        ([-1, 0], [16, 0], "give each request at least 1 tokens of its own"),
        ([], [], "give each request"),
    ],
)
def test_a_forest_that_is_none_is_refused(parents, tokens, sentence):
    with pytest.raises(PrefixShareError, match=sentence):
        forest("f", parents, tokens)


def test_the_anchors_are_as_published():
    found = {w.name: w for w in workload_set("anchors")}
    assert tuple(found) == ANCHORS
    assert found["1,1024_2048,32"].share_factor == pytest.approx(61, abs=0.5)
    assert found["8,16,32,256_512,512,256,32"].share_factor == pytest.approx(11.7, abs=0.05)
    assert found["256_1024"].share_factor == 1


def test_the_trees_of_fasttree_are_those_of_its_artifact():
    found = {w.name: w for w in workload_set("fasttree")}
    assert tuple(found) == FASTTREE and len(found) == 15
    # nodes of a level are distributed as ``tree_generation.py`` of the artifact does it
    deep = "1,2,4,8,16,32,64,128,1024_16,16,16,16,16,16,16,16,16"
    levels = [1, 2, 4, 8, 16, 32, 64, 128, 1024]
    assert found[deep].kv_tokens == 16 * sum(levels)
    readers = sorted({n.last - n.first for n in found[deep].nodes}, reverse=True)
    assert readers == [1024 // n for n in levels]
    # the root's 8 tokens are half a block: both of its children hold a copy
    assert found["1,2,64_8,256,32"].kv_tokens == 2 * (8 + 256) + 64 * 32 + 62 * 8
    assert {len(w.seq_lens) for w in found.values()} == {10, 64, 256, 512, 1024}


@pytest.mark.parametrize("name", ["fasttree", "flashforge", "grpo", "unshared", "batches"])
def test_every_set_has_valid_workloads_of_different_names(name):
    every = list(workload_set(name))
    assert len({w.name for w in every}) == len(every)
    assert all(w.seq_lens.max() <= w.block_table.shape[1] * 16 for w in every)
    assert [w.name for w in workload_set(name, quick=True)] == [w.name for w in every][::3]
    if name == "unshared":
        assert {w.share_factor for w in every} == {1.0}


def test_the_tree_shapes_hold_the_same_tokens():
    shapes = {w.name: w for w in workload_set("flashforge") if "T" in w.name or "tree" in w.name}
    assert {n: w.num_reqs for n, w in shapes.items()} == {
        "full 2T": 8,
        "full 3T": 9,
        "full 4T": 16,
        "full 5T": 25,
        "degenerate tree": 6,
    }
    assert all(w.kv_tokens == pytest.approx(122880, rel=0.01) for w in shapes.values())


RUN = [
    {"id": 0, "start": -99, "end": 0, "children": [1, 2]},
    {"id": 1, "start": 1, "end": 40, "children": [3, 4]},
    {"id": 2, "start": 1, "end": 10, "children": []},
    {"id": 3, "start": 41, "end": 60, "children": []},
    {"id": 4, "start": 41, "end": 90, "children": []},
]


def test_a_recorded_step_holds_what_grows_and_its_ancestors():
    early = recorded_step("early", RUN, 5, 16)
    assert early.seq_lens.tolist() == [105, 105]
    late = recorded_step("late", RUN, 50, 16)
    assert late.seq_lens.tolist() == [100 + 40 + 10] * 2
    assert late.nodes[0].end == 140 // 16, "the prompt and the only branch left are one node"


def recordings(folder: Path) -> Path:
    (folder / "smallToT.json").write_text(
        json.dumps([{"data": {}}, {"data": {str(n["id"]): n for n in RUN}}])
    )
    (folder / "tree_size4.json").write_text(
        json.dumps(
            {
                "Tree_Structure": [[0], [1], [0, 0]],
                "Records": [{"prompt": ["x" * 200], "Accept_length": [1, 2, 3, 4]}] * 32,
            }
        )
    )
    return folder


def test_recorded_sets_are_read_from_a_folder(tmp_path):
    steps = list(workload_set("deft", 16, recordings(tmp_path)))
    assert [w.name for w in steps] == [f"smallToT 1 step {s}" for s in (18, 36, 54, 72)]
    trees = list(workload_set("medusa", 16, tmp_path))
    assert [(w.num_reqs, w.query_len) for w in trees] == [(1, 4), (8, 4), (32, 4)]
    assert trees[0].query_parents.tolist() == [-1, 0, 0, 1]
    assert trees[0].seq_lens.tolist() == [200 // 4 + 1 + 2 + 4]
    with pytest.raises(PrefixShareError, match="name the folder of DeFT's JSON files"):
        list(workload_set("deft"))


def test_token_trees_follow_their_paths():
    paths = [[0], [1], [0, 0], [0, 0, 5], [0, 1]]
    assert token_tree_parents(paths).tolist() == [-1, 0, 0, 1, 3, 1]


PLAIN = {
    "kv_dtype": None, "sinks": False, "soft_cap": 0, "alibi": False,
    "mla": False, "sliding_window": None,
}  # fmt: skip


def cpu_case(w: Workload, heads=(4, 2), dtype="float32", **options) -> Case:
    layer = {"dtype": dtype, "device": torch.device("cpu"), "head_dim": 64}
    settings = Namespace(**{**layer, **PLAIN, **options})
    return bench_kernel.make_case(w, heads, settings)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_dtype": "fp8"},
        {"sinks": True, "soft_cap": 3.0, "alibi": True},
    ],
    ids=str,
)
def test_the_harness_reference_agrees_with_the_float64_one(options):
    w = forest("f", [-1, 0, 0, -1], [20, 9, 30, 7], query_len=3)
    case = cpu_case(w, **options)
    tensors = (case.q, case.k_cache, case.v_cache, case.block_table, case.seq_lens)
    expected = reference_attention(*tensors, case.query_start_loc(), extras=case.extras)
    error = bench_kernel.relative_error(expected.float(), bench_kernel.reference(case))
    assert error < 1e-6
    worse = expected.float()
    worse[4] += 1
    assert bench_kernel.relative_error(worse, bench_kernel.reference(case)) > 0.1


@pytest.mark.parametrize("peer", ["ours", "tokens"])
def test_our_peers_take_several_queries_of_a_request(peer):
    w = forest("f", [-1, 0, 0, -1], [40, 9, 30, 7], query_len=3)
    case = cpu_case(w)
    (launch,) = make(peer, Options(case.q.device, case.out_dtype, {})).prepare(case)
    expected = bench_kernel.reference(case)
    assert bench_kernel.relative_error(launch.call(), expected) < 1e-2
    assert launch.plan_ms > 0


def test_flashmla_gets_the_latent_cache_as_vllm_hands_it_over(monkeypatch):
    def kernel(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, **others):
        """Takes the arguments of the kernel in vLLM 0.33."""
        assert others == {
            "tile_scheduler_metadata": "schedule", "causal": True, "is_fp8_kvcache": False
        }  # fmt: skip
        caches, tables = (k_cache, k_cache[..., :head_dim_v]), (block_table, cache_seqlens)
        out = reference_attention(q[:, 0], *caches, *tables, sm_scale=softmax_scale)
        return out[:, None].to(q.dtype), None

    there = SimpleNamespace(
        is_flashmla_dense_supported=lambda: (True, None),
        get_mla_metadata=lambda *args, **kwargs: ("schedule", None),
        flash_mla_with_kvcache=kernel,
    )
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.ops.flashmla", there)
    options = Options(torch.device("cuda"), torch.bfloat16, {})
    latent = {"heads": (16, 1), "dtype": "bfloat16", "head_dim": 576, "mla": True}
    case = cpu_case(tree("1,3_128,40", 64), **latent)
    peer = make("flashmla", options)
    case.require_served_by(peer)
    (launch,) = peer.prepare(case)
    error = bench_kernel.relative_error(launch.call(), bench_kernel.reference(case))
    assert error < 1e-2
    with pytest.raises(UnavailableError, match="blocks of 64 tokens only"):
        peer.prepare(cpu_case(tree("1,3_128,40", 16), **latent))
    with pytest.raises(UnavailableError, match="latent KV caches only"):
        peer.prepare(cpu_case(tree("1,3_128,40", 64)))
    there.is_flashmla_dense_supported = lambda: (False, "not built")
    with pytest.raises(UnavailableError, match="not built"):
        make("flashmla", options)


def test_a_branch_of_a_token_tree_sees_what_a_chain_of_its_own_would():
    parents = np.array([-1, 0, 0, 1], np.int32)
    w = forest("f", [-1, -1], [37, 21], query_len=4, query_parents=parents)
    case = cpu_case(w)
    found = bench_kernel.reference(case).view(2, 4, 4, 64)
    mask = token_tree_mask(case).numpy()
    for r, length in enumerate(w.seq_lens.tolist()):
        slots = case.token_ids(r, 0, length)
        k, v = (c.flatten(0, 1)[slots] for c in (case.k_cache, case.v_cache))
        own, mask = mask[: 4 * length].reshape(4, length), mask[4 * length :]
        for query, branch in enumerate(([0], [0, 1], [0, 2], [0, 1, 3])):
            tokens = [*range(length - 4), *(length - 4 + i for i in branch)]
            assert np.flatnonzero(own[query]).tolist() == tokens
            keys, values = (x[tokens].repeat_interleave(2, 1) for x in (k, v))
            scores = torch.einsum("hd,khd->hk", case.q[4 * r + query], keys) / 8
            expected = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
            assert torch.allclose(found[r, query], expected, atol=1e-5)
    assert not len(mask)


@given(forests())
def test_cascade_levels_give_every_request_its_blocks(shape):
    w = forest("f", *shape, 4)
    case = cpu_case(w)
    blocks: list[list[int]] = [[] for _ in range(w.num_reqs)]
    tokens = [0] * w.num_reqs
    for spans in levels_of(case):
        queries, pages, ids, fill = page_arrays(w, spans)
        assert queries[0] == 0
        assert queries[-1] == w.num_reqs
        for i in range(len(queries) - 1):
            count = pages[i + 1] - pages[i]
            for r in range(queries[i], queries[i + 1]):
                blocks[r] += ids[pages[i] : pages[i + 1]].tolist()
                tokens[r] += (count - 1) * 4 + fill[i] if count else 0
    assert tokens == w.seq_lens.tolist()
    for row, length, found in zip(w.block_table, w.seq_lens, blocks, strict=True):
        assert found == row[: -(-length // 4)].tolist()


def test_the_harness_checks_and_times_our_cpu_executor(tmp_path):
    out = tmp_path / "kernel.json"
    done = run(
        [
            *(sys.executable, "-m", "benchmarks.kernel", "--device", "cpu", "--head-dim", "64"),
            *("--heads", "4:2,4:4", "--repeats", "2", "--tree", "1,4_64,16", "--tree", "2,6_40,7"),
            *("--peers", "ours,fa3,pat", "--out", out),
        ],
        cwd=ROOT,
    )
    result = json.loads(out.read_text())
    assert [(c["workload"], c["heads"]) for c in result["cells"]] == [
        (tree_, heads) for tree_ in ("1,4_64,16", "2,6_40,7") for heads in ("4:2", "4:4")
    ]
    for cell in result["cells"]:
        ours = cell["peers"]["ours"]
        assert ours["status"] == "ok"
        assert 0 < ours["error"] < 0.01
        assert ours["roofline"] == pytest.approx(cell["roof_ms"] / ours["ms"])
        assert cell["peers"]["fa3"] == {"status": "unavailable", "reason": "needs a GPU"}
    assert "FA3: needs a GPU (4 of 4)" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--workloads", "all"], "'all' is unknown: use anchors"),
        (["--heads", "3:2"], "argument --heads: must be query:KV heads such as 32:8"),
        (["--workloads", "deft", "--peers", "ours"], "--deft-data"),
    ],
)
def test_the_harness_refuses_a_mistake(arguments, sentence, capsys):
    try:
        status = bench_kernel.main(["--device", "cpu", *arguments])
    except SystemExit as e:
        status = e.code
    error = capsys.readouterr().err
    assert status == 2 and sentence in error and "Traceback" not in error


def test_a_workload_is_the_same_each_time():
    first, again = tree("1,4_64,16", seed=3), tree("1,4_64,16", seed=3)
    assert isinstance(first, Workload)
    assert np.array_equal(first.block_table, again.block_table)
    assert not np.array_equal(first.block_table, tree("1,4_64,16", seed=4).block_table)
    recorded, others = {"deft", "medusa"}, {"grpo", "unshared", "batches", "first_step"}
    assert set(WORKLOAD_SETS) == {"anchors", "fasttree", "flashforge"} | recorded | others


def test_first_steps_have_only_new_tokens_behind_the_document():
    found = list(workload_set("first_step"))
    assert len(found) == 2 * 3 * 5
    for w in found:
        document = int(w.name.split()[-1])
        assert w.name == f"{w.num_reqs} x {w.query_len} new on {document}"
        assert (w.seq_lens == document + w.query_len).all()
        assert (w.block_table[:, : document // 16] == w.block_table[0, : document // 16]).all()


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa3_cascade"])
def test_flash_attention_peers_need_a_gpu(name):
    with pytest.raises(UnavailableError, match="needs a GPU"):
        make(name, Options(torch.device("cpu"), torch.float32, {}))
