"""Prompts that form a tree, and FastTree's workloads of whole engines."""

import numpy as np
import pytest

from benchmarks.engine import bench
from benchmarks.engine.workloads import SWEEP
from benchmarks.papers import fasttree
from benchmarks.papers.experiment import Setting
from benchmarks.support.prompt_trees import (
    FASTTREE,
    FLASHFORGE,
    FORGE_CONTEXT,
    PromptTree,
    document_paths,
    flashforge_trees,
    radix,
)
from benchmarks.support.trees import forest, tree
from benchmarks.support.workload_sets import flashforge

SMALL = PromptTree("small", (-1, 0, 0, 1), (32, 16, 48, 16), 3, 5)


def test_requests_share_the_texts_above_them():
    assert SMALL.leaves == [2, 3]
    assert (SMALL.num_reqs, SMALL.document_tokens) == (6, 80)
    texts = SMALL.cached_prompts(1000)
    assert [len(text) for text in texts] == [32 + 48, 32 + 16 + 16]
    assert texts[0][:32] == texts[1][:32] and texts[0][32:48] != texts[1][32:48]
    prompts = SMALL.prompts(1000, seed=1)
    assert [p[:-5] for p in prompts] == [texts[0]] * 3 + [texts[1]] * 3
    assert len({tuple(p[-5:]) for p in prompts}) == 6
    assert SMALL.prompts(1000, seed=2) != prompts
    assert SMALL.prompts(1000, seed=1) == prompts


def test_its_forest_has_the_tokens_of_its_cache():
    w = forest("small", *SMALL.with_requests(11))
    assert w.seq_lens.tolist() == [64 + 16] * 3 + [80 + 16] * 3
    assert w.kv_tokens == SMALL.distinct_tokens(11) == 112 + 6 * 16
    half = SMALL.scaled(0.5)
    assert (half.tokens, half.per_leaf, half.own_tokens) == ((16, 16, 24, 16), 2, 16)
    assert SMALL.scaled(1) is SMALL


def test_a_radix_tree_has_each_common_beginning_once():
    parents, tokens = radix([[0, 4], [0, 2], [1, 2], [0, 2]], 7)
    assert parents == (-1, 0, 0, -1, 3)
    assert tokens == (7,) * 5


def test_fasttrees_workloads_are_those_of_its_artifact():
    sizes = {name: (w.num_reqs, len(w.leaves)) for name, w in FASTTREE.items()}
    assert sizes == {
        "fasttree_a": (512, 4),
        "fasttree_b": (128, 8),
        "fasttree_c": (128, 32),
        "fasttree_d": (128, 16),
    }
    # three countries below one root, and two languages below the first
    assert FASTTREE["fasttree_a"].parents == (-1, 0, 0, 0, 1, 1, 2, 3)
    assert FASTTREE["fasttree_a"].document_tokens == FASTTREE["fasttree_b"].tokens[0] == 3193
    # random.seed(0) of bench_multi_document.py; a start that branches share is one node
    paths = document_paths()
    assert sorted(paths)[:2] == [[0, 2, 11, 13], [0, 4, 12, 13]]
    starts = {tuple(path[:n]) for path in paths for n in range(1, 5)}
    assert len(FASTTREE["fasttree_d"].parents) == len(starts)
    assert all(len(set(path)) == 4 and max(path) < 17 for path in paths)


def test_flashforges_sweeps_are_the_trees_of_its_layers():
    layers = list(flashforge(16))
    trees = [of for sweep in flashforge_trees(122_880).values() for of in sweep]
    assert [w.name for w in layers] == [name for name, _, _ in trees]
    assert layers[0].name == "1,2_122880,512" and layers[-1].name == "degenerate tree"
    assert [w.num_reqs for w in layers[10:15]] == [2, 4, 8, 16, 32]
    for w, (name, *nodes) in zip(layers[10:15], trees[10:15], strict=True):
        of_spec, same = tree(name), forest(name, *nodes)
        assert np.array_equal(of_spec.block_table, same.block_table)
        assert np.array_equal(w.seq_lens, same.seq_lens)
    # in engines every leaf is cached and has one request
    assert [w.num_reqs for w in FLASHFORGE.values()] == [w.num_reqs for w in layers[5:]]
    assert all(w.document_tokens <= FORGE_CONTEXT + 256 for w in FLASHFORGE.values())


def test_a_layer_has_the_requests_half_way_through_their_answers(monkeypatch):
    seen = {}

    def time_methods(setting, w, heads, ways) -> dict:
        seen[w.name] = w
        return {"peers": {}}

    monkeypatch.setattr(fasttree.timing, "time_methods", time_methods, raising=False)
    monkeypatch.setattr("benchmarks.papers.timing.time_methods", time_methods)
    for point in fasttree.time_workloads(Setting("cuda")):
        point.run()
    assert {n: w.num_reqs for n, w in seen.items()} == {
        w.title: w.num_reqs for w in FASTTREE.values()
    }
    assert seen["B, few-shot"].seq_lens.tolist() == [3193 + 3000 + 60 + 128] * 128


@pytest.mark.parametrize("name", [*FASTTREE, *SWEEP])
def test_engines_run_them_when_they_are_named(name, capsys):
    assert name not in bench.parse([]).workloads
    w = {**FASTTREE, **SWEEP}[name]
    needed = w.document_tokens + w.own_tokens + 256
    named = ["--workloads", name, "--tokens", "256", "--max-model-len"]
    args = bench.parse([*named, f"{needed}"])
    assert args.workloads == [name] and bench.longest(name, args) == needed
    with pytest.raises(SystemExit):
        bench.parse([*named, f"{needed - 1}"])
    assert f"{name} needs --max-model-len {needed}" in capsys.readouterr().err
    assert bench.parse([*named, f"{needed}", "--scale", "0.1"]).scale == 0.1


def test_the_sweep_has_documents_of_four_lengths():
    assert [w.document_tokens for w in SWEEP.values()] == [8192, 32768, 65536, 122880]
