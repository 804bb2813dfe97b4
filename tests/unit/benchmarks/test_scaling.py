"""The model of decode over sharded KV, against the equations of Tree Attention, section 6."""

from dataclasses import replace

import pytest

from benchmarks.kernel import scaling
from benchmarks.kernel.scaling import Cluster, Layer, Link
from vllm_prefixshare.core import PrefixShareError

#: 16 heads of 128, as in section 6.1; one request
PAPER = Layer(1, 5_120_000, 0, 16, 16, 128, 2)
CLUSTER = Cluster(4e6, 7e8, 10.0, 8, Link(10.0, 4.5e5), Link(20.0, 5e4))


def test_bytes_are_those_of_the_equations():
    d, t, p = 16 * 128, 40_000, 128
    assert PAPER.kv_bytes == 2 * 2 * t * d * p
    # eq. 10 counts p rounds; the last one is not sent
    assert scaling.ring_bytes(PAPER, p) * p / (p - 1) == 2 * (2 * t * d) * p
    # eq. 14, in float32
    assert scaling.all_reduce_bytes(PAPER, p) == pytest.approx(4 * 2 * (p - 1) / p * (d + 2 * 16))
    assert scaling.ring_peak_bytes(PAPER, p) == 2 * (4 * t * d + 2 * d)
    assert scaling.tree_peak_bytes(PAPER, p) == 2 * (2 * t * d + 2 * d) + 4 * 2 * 16


def test_requests_that_share_are_counted_once():
    one, many = Layer(1, 4096), Layer(64, 4096, 16)
    assert many.kv_bytes == one.kv_bytes * (4096 + 64 * 16) / 4096
    assert many.flops == 64 * one.flops * (4096 + 16) / 4096


def test_one_gpu_is_the_same_for_every_way():
    layer = Layer(64, 1 << 15, 128)
    alone = scaling.attention_us(layer, CLUSTER)
    for way in (scaling.tree_us, scaling.ring_us, scaling.replicas_us):
        assert way(layer, CLUSTER, 1) == alone


@pytest.mark.parametrize("gpus", [2, 8, 9, 128])
def test_a_ring_never_beats_one_collective_on_long_contexts(gpus):
    assert scaling.ring_us(PAPER, CLUSTER, gpus) > scaling.tree_us(PAPER, CLUSTER, gpus)
    slower = replace(CLUSTER, inside=CLUSTER.between)
    assert scaling.tree_us(PAPER, slower, gpus) >= scaling.tree_us(PAPER, CLUSTER, gpus)


def test_replicas_divide_the_requests_but_not_the_prefix():
    layer = Layer(64, 1 << 20, 0)
    assert scaling.replicas_us(layer, CLUSTER, 64) == scaling.attention_us(
        Layer(1, 1 << 20), CLUSTER
    )


@pytest.mark.parametrize("sizes", [(0, 1), (1, -1)])
def test_a_size_that_cannot_be_is_refused(sizes):
    with pytest.raises(PrefixShareError, match="must be at least"):
        Layer(*sizes)
