"""Bad input to the operator: what is refused, and the messages."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import vllm_prefixshare
from tests.support.processes import run_python
from vllm_prefixshare import PrefixShareDecodeWrapper, PrefixShareError, merge_states
from vllm_prefixshare.kernels.catalog import Gpu
from vllm_prefixshare.kernels.cpu.torch_executor import TorchExecutor
from vllm_prefixshare.kernels.extras import LayerExtras
from vllm_prefixshare.kernels.hopper.launch import HopperKernel

SHAPE = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": 16}
TABLE = np.array([[1, 2, 3], [1, 2, 4]], np.int32)
LENS = np.array([40, 41], np.int32)
H200 = Gpu((9, 0), 132, 227 << 10)


def wrapper(**changes: object) -> PrefixShareDecodeWrapper:
    return PrefixShareDecodeWrapper(**{**SHAPE, "dtype": torch.float32, **changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"divider": "best"}, "divider 'best' is unknown: use one of flashforge"),
        ({"head_dim": 32}, "head_dim must be a multiple of 8 from 64 to 512, got 32"),
        ({"dtype": torch.int8}, "dtype must be one of float32, bfloat16, float16, got int8"),
        ({"device": "meta"}, "device 'meta' has no executor: use cpu or cuda"),
        ({"sm_scale": 0.0}, "sm_scale must be positive and finite, got 0.0"),
        ({"sm_scale": float("nan")}, "sm_scale must be positive and finite"),
        ({"share": "maybe"}, "share must be one of auto, always, never, got 'maybe'"),
        ({"num_workers": 0}, "num_workers must be at least 1"),
        ({"max_query_len": 0}, "max_query_len must be at least 1, got 0"),
        ({"kernel": "foo"}, "kernel must be one of auto, hopper, portable, got 'foo'"),
        ({"features": ["sinks", "tanh"]}, "features must be some of sinks, .*, got 'tanh'"),
        ({"divider": ["fasttree"]}, "divider .'fasttree'. is unknown"),
        ({"sliding_window": 2**63 - 1}, "sliding_window must be at most 2147483647, got 9"),
        ({"block_size": 2**40}, "block_size must be at most 2147483647"),
        ({"num_workers": 2**40}, "num_workers must be at most 65536"),
    ],
)
def test_refuses_arguments_out_of_range(changes, sentence):
    with pytest.raises(PrefixShareError, match=sentence):
        wrapper(**changes)


def test_takes_numbers_of_numpy():
    shape = {name: np.int64(value) for name, value in SHAPE.items()}
    assert wrapper(**shape, features={"sinks"}).attention == wrapper(features=["sinks"]).attention


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_refuses_a_gpu_that_is_not_there():
    with pytest.raises(PrefixShareError, match="'cuda' is not an NVIDIA GPU that can be used"):
        wrapper(device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("table", "lens", "starts", "sentence"),
    [
        (TABLE[0], LENS, None, "block_table must be 2-dimensional integers"),
        (TABLE.astype(float), LENS, None, "block_table must be 2-dimensional integers"),
        ([[1, 2], [3]], LENS, None, "block_table must be 2-dimensional integers"),
        (torch.zeros(2, 3, device="meta"), LENS, None, "block_table must be .* on the host"),
        (TABLE.astype(np.int64) + 2**31, LENS, None, "block_table has entries beyond 32 bits"),
        (TABLE, LENS[:1], None, "block_table has 2 rows, seq_lens 1"),
        (TABLE, LENS + 8, None, r"seq_lens\[1\] = 49 goes beyond the block table: 3 blocks of 16"),
        (TABLE, LENS * -1, None, r"seq_lens\[0\] = -40 is less than its own queries"),
        (TABLE, LENS * 0, [0, 2, 3], r"seq_lens\[0\] = 0 is less than its own queries"),
        (TABLE * -1, LENS, None, r"block_table\[0, 0\] = -1: block ids start at 0"),
        (TABLE, LENS, [0, 1], "query_start_loc must rise from 0 over 3 entries"),
        (TABLE, LENS, [0, 1, 1], "query_start_loc must rise"),
    ],
)
def test_refuses_batches_that_make_no_sense(table, lens, starts, sentence):
    with pytest.raises(PrefixShareError, match=sentence):
        wrapper().plan(table, lens, starts)


def test_refuses_token_trees_on_a_cpu():
    w = wrapper()
    with pytest.raises(PrefixShareError, match="query_parents need a GPU, and no kv_lora_rank"):
        w.plan(TABLE, LENS, [0, 2, 4], query_parents=[-1, 0, -1, 0])
    with pytest.raises(PrefixShareError, match="no plan yet"):
        w.stats()


def test_unused_entries_of_the_table_may_hold_anything():
    table = np.array([[1, 2, 3, -1], [1, 2, 4, -7]], np.int32)
    assert wrapper().plan(table, LENS).num_reqs == 2


def tensors(blocks: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(2, 4, 64), torch.randn(blocks, 16, 2, 64), torch.randn(blocks, 16, 2, 64)


def test_refuses_tensors_of_another_shape_or_dtype():
    w = wrapper()
    with pytest.raises(PrefixShareError, match="no plan yet"):
        w.run(*tensors(), TABLE, LENS)
    w.plan(TABLE, LENS)
    q, k, v = tensors()
    with pytest.raises(PrefixShareError, match=r"q must be \[2, 4, 64\], got \[1, 4, 64\]"):
        w.run(q[:1], k, v, TABLE, LENS)
    with pytest.raises(PrefixShareError, match=r"q must be \[2, 4, 64\], got \[6, 4, 64\]"):
        w.run(q.repeat(3, 1, 1), k, v, TABLE, LENS)
    with pytest.raises(PrefixShareError, match=r"k_cache must be \[num_blocks, 16, 2, 64\]"):
        w.run(q, k.transpose(1, 2), v, TABLE, LENS)
    with pytest.raises(PrefixShareError, match=r"v_cache must be float32 on the cpu"):
        w.run(q, k, v.half(), TABLE, LENS)
    with pytest.raises(PrefixShareError, match="names block 4, but the cache has 4 blocks"):
        w.run(*tensors(blocks=4), TABLE, LENS)
    with pytest.raises(PrefixShareError, match="the cache has 0 blocks"):
        w.run(q, torch.zeros(()), torch.zeros(()), TABLE, LENS)
    with pytest.raises(PrefixShareError, match="q must be a torch tensor, got ndarray"):
        w.run(q.numpy(), k, v, TABLE, LENS)
    with pytest.raises(PrefixShareError, match="out must be like q"):
        w.run(q, k, v, TABLE, LENS, out=q.half())
    with pytest.raises(PrefixShareError, match="out must be a torch tensor, got ndarray"):
        w.run(q, k, v, TABLE, LENS, out=q.numpy())
    with pytest.raises(PrefixShareError, match="lse must be a torch tensor, got ndarray"):
        w.run(q, k, v, TABLE, LENS, lse=np.zeros((2, 4), np.float32))
    with pytest.raises(PrefixShareError, match="not the planned one"):
        w.run(q, k, v, TABLE, LENS - 8)
    with pytest.raises(PrefixShareError, match="not the planned one"):
        w.run(q, k, v, TABLE[::-1], LENS[::-1])


@pytest.mark.parametrize("of_plan", [False, True])
def test_a_refused_batch_leaves_the_plan_as_it_was(of_plan):
    few, many = TABLE, TABLE + 10

    def refused(w, table):
        if of_plan:
            with pytest.raises(PrefixShareError, match="query_parents need a GPU"):
                w.plan(table, LENS, query_parents=[-1, -1])
            return
        with pytest.raises(PrefixShareError, match="not the planned one"):
            w.run(*tensors(20), table, LENS)

    w = wrapper()
    w.plan(few, LENS)
    refused(w, many)
    assert w.run(*tensors(5), few, LENS).shape == (2, 4, 64)
    w.plan(many, LENS)
    refused(w, few)
    with pytest.raises(PrefixShareError, match="names block 14, but the cache has 5 blocks"):
        w.run(*tensors(5), many, LENS)


def test_queries_under_an_empty_plan_are_refused():
    w = wrapper()
    w.plan(np.zeros((0, 3), np.int32), [])
    with pytest.raises(PrefixShareError, match="no requests, but q has 2 rows"):
        w.run(*tensors(), TABLE, LENS)


def test_another_default_device_changes_nothing():
    w = wrapper()
    q, k, v = tensors()
    w.plan(TABLE, LENS)
    usual = w.run(q, k, v, TABLE, LENS)
    with torch.device("meta"):
        w = wrapper()
        w.plan(TABLE, LENS)
        assert torch.equal(w.run(q, k, v, TABLE, LENS), usual)


@pytest.mark.parametrize(
    ("extras", "sentence"),
    [
        ((1,), "extras must be LayerExtras, got tuple"),
        (LayerExtras(soft_cap="3"), "soft_cap must be 0 or more and finite, got 3"),
        (LayerExtras(k_scale="abc"), "k_scale must be a number or a tensor, got 'abc'"),
        (LayerExtras(k_scale=[1.0, 2.0]), "k_scale must be a number or a tensor"),
        (LayerExtras(v_scale=10**400), "v_scale must be positive and finite"),
        (LayerExtras(v_scale=float("nan")), "v_scale must be positive and finite"),
    ],
)
def test_refuses_extras_of_another_kind(extras, sentence):
    w = wrapper(kv_dtype=torch.float8_e4m3fn, features=["soft_cap"])
    w.plan(TABLE, LENS)
    q, k, v = tensors()
    with pytest.raises(PrefixShareError, match=sentence):
        w.run(q, *(x.to(torch.float8_e4m3fn) for x in (k, v)), TABLE, LENS, extras=extras)


def test_a_greater_id_than_32_bits_hold_is_refused_in_any_type():
    with pytest.raises(PrefixShareError, match="entries beyond 32 bits"):
        wrapper().plan(np.full((2, 3), 2**31 + 5, np.uint32), LENS)


def test_an_empty_batch_is_a_batch():
    w = wrapper()
    assert w.plan(np.zeros((0, 3), np.int32), np.zeros(0, np.int32)).num_tiles == 0
    nothing = torch.zeros(0, 4, 64), *tensors()[1:], np.zeros((0, 3), np.int32), []
    assert w.run(*nothing).shape == (0, 4, 64)
    out, lse = w.run(*nothing, return_lse=True)
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4) and lse.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_merge_into_attention_over_all_tokens(dtype):
    """Merge three parts of the tokens, at once and one after the other. The last part is empty for
    two queries, and one query sees no token.
    """
    torch.manual_seed(0)
    scores, values = torch.randn(5, 4, 30).double() * 8, torch.randn(5, 4, 30, 64).double()
    scores[1:3, :, 20:] = -torch.inf
    scores[4] = -torch.inf
    parts = [slice(0, 7), slice(7, 20), slice(20, 30)]
    lses = torch.stack([scores[..., p].logsumexp(-1) for p in parts])
    outs = torch.stack(
        [
            torch.einsum("thk,thkd->thd", scores[..., p].softmax(-1), values[..., p, :])
            for p in parts
        ]
    )
    assert outs[2, 1].isnan().all(), "an output with an lse of -inf must not be read"
    outs, lses = outs.to(dtype), lses.float()
    expected = torch.einsum("thk,thkd->thd", scores[:4].softmax(-1), values[:4])
    pair = merge_states(outs[:2], lses[:2])
    step = merge_states([pair[0], outs[2]], [pair[1], lses[2]])
    for out, lse in (merge_states(outs, lses), step):
        assert out.dtype == dtype and lse.dtype == torch.float32
        error = (out[:4].double() - expected).norm() / expected.norm()
        assert error < max(1e-6, torch.finfo(dtype).eps)
        torch.testing.assert_close(lse[:4].double(), scores[:4].logsumexp(-1), rtol=0, atol=4e-6)
        assert (out[4] == 0).all() and (lse[4] == -torch.inf).all()


@pytest.mark.parametrize(
    ("outs", "lses", "sentence"),
    [
        (torch.zeros(2, 3, 4, 64), torch.zeros(2, 3, 5), "outs and lses must be"),
        (torch.zeros(0, 3, 4, 64), torch.zeros(0, 3, 4), "outs and lses must be"),
        (torch.zeros(2, 3, 4, 64), torch.zeros(2, 3, 4).double(), "lses must be float32 on cpu"),
        ([torch.zeros(3, 4, n) for n in (64, 72)], torch.zeros(2, 3, 4), "outs must be tensors"),
        ([], [], "outs must be tensors of one shape"),
        (torch.zeros(2, 3, 4, 64).int(), torch.zeros(2, 3, 4), "outs must be floating point, got"),
        (
            [torch.zeros(3, 4, 64), torch.zeros(3, 4, 64).bfloat16()], torch.zeros(2, 3, 4),
            "outs must be tensors of one dtype, got torch.float32, torch.bfloat16",
        ),
        (
            torch.zeros(2, 3, 4, 64), [torch.zeros(3, 4), torch.zeros(3, 4).double()],
            "lses must be tensors of one dtype, got torch.float32, torch.float64",
        ),
        (7, torch.zeros(2, 3, 4), "outs must be tensors"),
    ],
)  # fmt: skip
def test_refuses_states_that_make_no_sense(outs, lses, sentence):
    with pytest.raises(PrefixShareError, match=sentence):
        merge_states(outs, lses)


def test_stats_count_kv_tokens_and_plans():
    w = wrapper()
    w.plan(TABLE, LENS)
    w.plan(TABLE, LENS + 1)
    stats = w.stats()
    assert stats.kv_tokens_per_request == 83
    assert stats.kv_tokens_read == 83 - 32  # two shared blocks are read once
    assert (stats.updates, stats.plans, stats.work_tiles, stats.partials) == (2, 1, 3, 4)
    assert stats.plan_seconds > 0
    assert stats.row_tiles == 1, "on a CPU nothing is walked by tiles of rows"


@pytest.mark.parametrize(("queries", "tiles"), [(1, 1), (64, 1), (65, 2), (256, 4)])
def test_stats_have_the_row_tiles_of_the_wrappers_queries(queries, tiles, monkeypatch):
    """The Hopper kernel's tiles have 128 rows, two for each query here; the plan has one query."""

    def executor_for(attention, device, *, query_len, num_workers, **_) -> TorchExecutor:
        executor = TorchExecutor(attention, num_workers)
        on_gpu = replace(attention, dtype="bfloat16")
        executor.row_tiles = HopperKernel(on_gpu, query_len, H200).row_tiles
        return executor

    monkeypatch.setattr("vllm_prefixshare.wrapper.executor_for", executor_for)
    w = wrapper(max_query_len=queries)
    w.plan(TABLE, LENS)
    assert w.stats().row_tiles == tiles


def test_importing_the_package_loads_neither_torch_nor_vllm():
    code = (
        "import sys, vllm_prefixshare.settings, vllm_prefixshare.planning.planner\n"
        "print(sorted({'torch', 'vllm', 'triton'} & sys.modules.keys()))"
    )
    assert run_python(code).stdout.strip() == "[]"


def test_the_operator_and_its_plan_show_what_they_are_in_a_line():
    w = wrapper()
    shown = "PrefixShareDecodeWrapper(4 query and 2 KV heads, head_dim 64, float32, KV cache "
    shown += "float32, blocks of 16 tokens; torch kernel on cpu, divider flashforge (default); "
    assert repr(w) == f"{shown}no plan yet)"
    plan = w.plan(np.array([[7, 2, 3, 4], [7, 2, 3, 5], [7, 2, 6, 0]], np.int32), [60, 52, 48])
    assert repr(w) == f"{shown}share factor 2.00)"
    assert repr(plan) == (
        "DecodePlan(3 requests, blocks of 16 tokens; 5 work tiles in 1 work queues, 8 partial "
        "results; share factor 2.00)"
    )
    assert "; torch kernel on cpu, divider deft_node; " in repr(wrapper(divider="deft_node"))
    assert repr(w.plan(np.zeros((0, 1), np.int32), [])).endswith("share factor 0.00)")


def test_dir_lists_every_public_name():
    assert {*vllm_prefixshare.__all__} <= {*dir(vllm_prefixshare)}
    assert all(hasattr(vllm_prefixshare, name) for name in dir(vllm_prefixshare))
