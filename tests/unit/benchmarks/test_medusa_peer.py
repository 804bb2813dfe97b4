"""Medusa's attention as a peer: a dense mask over all tokens of the batch."""

import numpy as np
import pytest
import torch

from benchmarks.kernel.bench import make_case, reference, relative_error
from benchmarks.papers import deft, timing
from benchmarks.papers.experiment import Setting
from benchmarks.peers import PEERS, Options, make
from benchmarks.support.trees import Workload, forest, tree

PARENTS = np.array([-1, 0, 0, 1, 1], np.int32)
CASES = {
    "tree": tree("1,2,6_40,24,9"),
    "forest": tree("2,4_48,5"),
    "unequal": forest("unequal", [-1, 0, 0, -1], [37, 20, 3, 50]),
    "token trees": forest("trees", [-1, -1], [45, 70], query_len=5, query_parents=PARENTS),
    "drafts": forest("drafts", [-1, 0, 0], [48, 20, 9], query_len=3),
}


def prepared(w: Workload):
    layer = timing.layer_options("cpu", 1)
    case = make_case(w, (8, 2), layer)
    peer = make("medusa", Options(torch.device("cpu"), torch.float32, {}))
    (launch,) = peer.prepare(case)
    return case, launch


@pytest.mark.parametrize("name", CASES)
def test_its_output_is_attention(name):
    case, launch = prepared(CASES[name])
    assert relative_error(launch.call(), reference(case)) < 1e-5
    # each token of the cache once, whatever the number of requests that read it
    assert launch.note == f"{CASES[name].kv_tokens} tokens"


def test_experiments_time_it_beside_the_strategies():
    (point,) = deft.time_stars(Setting("cpu", tiny=True, repeats=1, peers=("medusa",)))
    peers = point.run()["peers"]
    assert list(peers).count("medusa") == 1 and len(peers) == 6
    assert {found["status"] for found in peers.values()} == {"ok"}
    said = deft.stars_sentence({point.name: {"peers": peers}})
    assert "medusa " in said and "DeFT-Flatten " in said


def test_stars_are_those_of_the_published_runs():
    names = [p.name for p in deft.time_stars(Setting("cuda"))]
    assert [n for n in names if "64" in n] == [
        "star of 64: 1,64_1016,1",
        "star of 64: 1,64_3507,1",
        "star of 64: 1,64_5999,1",
    ]
    assert names[-1] == "few-shot 10: 1,10_4000,400"
    assert PEERS["medusa"][2] == "Medusa"
