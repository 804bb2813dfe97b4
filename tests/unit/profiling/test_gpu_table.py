"""A GPU's cost table without a GPU: the plans that are timed, the arithmetic on the times, the
folders of tables, which layers read which, and the ablation benchmark on the CPU.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.kernel import ablation, bench
from tests.support.cli_runs import write_model
from tests.support.reference_attention import reference_attention
from vllm_prefixshare import PrefixShareError
from vllm_prefixshare.cli import measure_costs
from vllm_prefixshare.cli.main import main
from vllm_prefixshare.config import FP8, AttentionConfig
from vllm_prefixshare.core import OPEN_END
from vllm_prefixshare.kernels import gpu_executor
from vllm_prefixshare.kernels.catalog import Gpu, KernelLimits
from vllm_prefixshare.kernels.cpu.torch_executor import TorchExecutor
from vllm_prefixshare.kernels.geometry import HOPPER
from vllm_prefixshare.kernels.interface import HostBatch
from vllm_prefixshare.kernels.portable.launch import PortableKernel
from vllm_prefixshare.kernels.registry import Choice
from vllm_prefixshare.planning import invariants
from vllm_prefixshare.planning.costs import lookup as tables
from vllm_prefixshare.planning.costs.lookup import cost_model, fingerprint
from vllm_prefixshare.planning.costs.roofline import AnalyticCost, analytic_cost
from vllm_prefixshare.planning.costs.table import CostTable
from vllm_prefixshare.profiling.gpu_table import (
    BLOCK_SIZE,
    MAX_TILES,
    MAX_TOKENS,
    TOKENS,
    TileBench,
    measure_gpu,
    scattered_blocks,
    tile_counts,
)
from vllm_prefixshare.profiling.repeated_tiles import repeated_tiles

GPU = "NVIDIA H200 x132"
LAYER = AttentionConfig(32, 8, 64, 16)
EIGHT_BITS = replace(LAYER, kv_dtype=FP8, query_dtype=FP8)
LATENT = AttentionConfig(8, 1, 576, 64, kv_lora_rank=512)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PREFIXSHARE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_timed_plan_holds_every_invariant(repeats):
    """Timed plans have only closed runs. Here the last run of each request is opened, as in other
    plans.
    """
    plan = repeated_tiles(2, 1, 32, repeats, 16, partials=repeats > 1)
    ends = np.where(plan.run_kv_end == 32 * repeats, OPEN_END, plan.run_kv_end)
    table = scattered_blocks(2, 1, 2 * repeats, 0)
    invariants.check(replace(plan, run_kv_end=ends), table, plan.planned_seq_lens)
    assert plan.work_indptr.tolist() == [0, repeats, 2 * repeats]


@pytest.mark.parametrize(("repeats", "shared"), [(1, 0), (3, 0), (3, 2)])
def test_a_timed_plan_computes_attention(repeats, shared):
    """Several requests per tile, read from blocks of one worker or from blocks of all workers."""
    torch.manual_seed(0)
    plan = repeated_tiles(2, 3, 32, repeats, 16, partials=repeats > 1)
    table = scattered_blocks(2, 3, 2 * repeats, shared)
    lens = plan.planned_seq_lens
    assert lens.tolist() == [32 * repeats] * 6
    q = torch.randn(6, 4, 64)
    k_cache, v_cache = torch.randn(2, 4 * repeats, 16, 2, 64)
    executor = TorchExecutor(AttentionConfig(4, 2, 64, 16, "float32"))
    executor.prepare(plan, HostBatch(table, lens, np.arange(7, dtype=np.int32)))
    out = torch.full_like(q, torch.nan)
    executor.run(q, k_cache, v_cache, table, lens, out, 0.125)
    expected = reference_attention(
        q, k_cache, v_cache, torch.from_numpy(table), torch.from_numpy(lens)
    )
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    assert plan.num_partials == (6 * repeats if repeats > 1 else 0)


def test_workers_read_blocks_of_their_own_or_the_same_ones():
    own = scattered_blocks(4, 3, 10, 0)
    assert len(np.unique(own)) == 40
    assert all(len(np.unique(rows, axis=0)) == 1 for rows in np.split(own, 4))
    assert not np.array_equal(np.sort(own[0]), own[0])
    same = scattered_blocks(4, 3, 10, 5)
    assert len(np.unique(same)) == 5
    assert len(np.unique(same, axis=0)) == 1
    np.testing.assert_array_equal(same[:, :5], same[:, 5:])


def test_many_tiles_are_more_than_few_and_bounded():
    for kv_len in TOKENS:
        few, many = tile_counts(kv_len)
        assert 1 <= few < many <= MAX_TILES
        assert many * kv_len <= MAX_TOKENS
        assert few * kv_len // BLOCK_SIZE % 16 == many * kv_len // BLOCK_SIZE % 16 == 0


class ModelledGpu:
    """An executor whose time follows a formula; the timer returns that time.

    A launch takes 6 us, a tile 2 us, a token of 16 bits 0.01 us from the worker's own blocks or
    0.006 us from blocks that all workers read, one of 8 bits half of it, a row 0.02 us, and a
    merged row 0.03 us.
    """

    name = "hopper"
    limits = KernelLimits(HOPPER, num_workers=2, max_tile_requests=32)
    device = torch.device("cpu")
    noise = 0.0

    def __init__(self, attention):
        self.attention = attention
        self.us = 0.0

    def prepare(self, plan):
        self.plan = plan

    def run(self, q, k_cache, v_cache, block_table, seq_lens, out, sm_scale):
        assert self.attention.num_qo_heads == q.shape[1]
        assert k_cache.shape[2:] == (self.attention.num_kv_heads, self.attention.head_dim)
        assert int(block_table.max()) < len(k_cache) == len(v_cache)
        assert out.shape == (*q.shape[:2], self.attention.v_head_dim)
        assert v_cache.shape == (*k_cache.shape[:3], self.attention.v_head_dim)
        a, names = self.attention, [str(x.dtype) for x in (q, k_cache, v_cache, out)]
        of_each = a.of_queries, a.of_cache, a.of_cache, a.dtype
        assert names == [f"torch.{name}" for name in of_each]
        assert len(q) == self.plan.num_reqs == len(seq_lens)
        tiles, group = self.plan.num_tiles // self.limits.num_workers, self.attention.gqa_group_size
        rows = group * self.plan.num_reqs // self.limits.num_workers
        tokens = int(self.plan.run_kv_end[0])
        shared = bool((block_table[0] == block_table[-1]).all())
        bits = 8 * k_cache.element_size()
        tile = 2 + tokens * bits / 16 * (0.006 if shared else 0.01) + 0.02 * rows
        merged = group * self.plan.num_partials / self.limits.num_workers
        self.us = 6 + tiles * tile + 0.03 * merged
        self.us += self.noise * math.sin(self.us * 1e3)


def modelled_table(monkeypatch, noise=0.0, layer=LAYER):
    made = []
    monkeypatch.setattr(ModelledGpu, "noise", noise)

    def make(attention):
        made.append(ModelledGpu(attention))
        return made[-1]

    def timer(call):
        call()
        return made[-1].us

    return measure_gpu(layer, make, timer, GPU)


@pytest.mark.parametrize(
    ("layer", "width"),
    [(LAYER, 1), (EIGHT_BITS, 0.5), (replace(EIGHT_BITS, query_dtype=None), 0.5), (LATENT, 1)],
    ids=["plain", "fp8", "fp8, plain queries", "latent"],
)
def test_the_table_holds_the_price_of_a_tile_without_the_launch(monkeypatch, layer, width):
    table = modelled_table(monkeypatch, layer=layer)
    assert table.fingerprint == fingerprint(layer, "hopper", GPU)
    assert table.fingerprint.head_dim == layer.head_dim
    assert table.fingerprint.kv_dtype == ("16-bit" if width == 1 else "8-bit")
    for rows in (16, 64, 128):
        for kv_len in TOKENS:
            own, same = 0.01 * width * kv_len, 0.006 * width * kv_len
            assert table.tile_us(rows, kv_len) == pytest.approx(2 + own + 0.02 * rows)
            assert table.tile_l2_us(rows, kv_len) == pytest.approx(2 + same + 0.02 * rows)
    assert table.merge_us == pytest.approx(0.03)
    one, many = (float(table.tile(64, 1024, readers)) for readers in (1, 1000))
    assert one == pytest.approx(2 + 10.24 * width + 1.28)
    assert many == pytest.approx(2 + 6.144 * width + 1.28, rel=0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu measures with real kernels")
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize(
    ("cache", "queries"), [(None, None), (FP8, FP8), (FP8, None)], ids=["plain", "fp8", "mixed"]
)
def test_what_is_timed_is_attention_of_such_a_layer(monkeypatch, cache, queries):
    """The portable kernel, under Triton's interpreter."""
    layer = replace(LAYER, dtype="float16", kv_dtype=cache, query_dtype=queries)
    a100 = Gpu((8, 0), 8, 163 << 10)

    def choose(attention, device, kernel, query_len):
        return Choice(PortableKernel(attention, query_len, a100), None)

    monkeypatch.setattr(gpu_executor, "choose_kernel", choose)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ran = []

    def make(attention):
        return gpu_executor.GpuExecutor(attention, torch.device("cpu"))

    bench = TileBench(layer, make, lambda call: ran.append(call()) or 1.0, tokens=(64,))
    torch.manual_seed(0)
    bench.microseconds(2, 64, 1, shared=False)
    torch.manual_seed(0)
    requests = 2 * bench.num_workers
    q = torch.empty(requests, 32, 64, dtype=torch.float16).normal_()
    q = q.to(getattr(torch, queries or "float16"))
    table = torch.from_numpy(scattered_blocks(bench.num_workers, 2, 4, 0))
    lens = torch.full((requests,), 64, dtype=torch.int32)
    expected = reference_attention(q, bench.k_cache, bench.v_cache, table, lens)
    (out,) = ran
    assert out.dtype == torch.float16
    assert bench.k_cache.dtype == bench.v_cache.dtype == getattr(torch, cache or "float16")
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)


def test_noise_never_makes_a_longer_tile_cheaper(monkeypatch):
    table = modelled_table(monkeypatch, noise=40.0)
    for grid in (table.tile_us, table.tile_l2_us):
        assert np.all(grid.microseconds > 0)
        assert np.all(np.diff(grid.microseconds, axis=0) >= 0)
        assert np.all(np.diff(grid.microseconds, axis=1) >= 0)
    assert np.all(table.tile_l2_us.microseconds <= table.tile_us.microseconds)
    assert table.merge_us > 0


def test_one_gpu_table_serves_every_number_of_heads_and_block_size():
    here = fingerprint(LAYER, "hopper", GPU)
    others = (
        replace(LAYER, num_qo_heads=64),
        replace(LAYER, num_kv_heads=32),
        replace(LAYER, block_size=64),
        replace(LAYER, dtype="float16"),
    )
    assert all(fingerprint(other, "hopper", GPU) == here for other in others)


@pytest.mark.parametrize(
    ("layer", "kernel", "device", "difference"),
    [
        (replace(LAYER, head_dim=128), "hopper", GPU, "head_dim 64 instead of 128"),
        (LAYER, "portable", GPU, "kernel 'hopper-1' instead of 'portable-4'"),
        (LAYER, "hopper", "NVIDIA H200 x60", "device 'NVIDIA H200 x132' instead of"),
        (EIGHT_BITS, "hopper", GPU, "kv_dtype '16-bit' instead of '8-bit'"),
    ],
)
def test_a_table_of_another_gpu_kernel_head_dim_or_cache_is_refused(
    layer, kernel, device, difference, tmp_path, monkeypatch
):
    path = tmp_path / "table.json"
    modelled_table(monkeypatch).save(path)
    monkeypatch.setenv("VLLM_PREFIXSHARE_COST_TABLE", str(path))
    found = cost_model(LAYER, "hopper", device_name=GPU)
    assert found.fingerprint == fingerprint(LAYER, "hopper", GPU)
    with pytest.raises(PrefixShareError, match="was measured for") as e:
        cost_model(layer, kernel, device_name=device)
    assert difference in str(e.value)


@pytest.mark.parametrize(
    ("device", "memory", "arithmetic"),
    [("NVIDIA H100 80GB HBM3 x132", 3350 / 4800, 1), (GPU, 1, 1),
     ("NVIDIA H20 x78", 4000 / 4800 * 132 / 78, 148 / 989 * 132 / 78),
     ("NVIDIA H100 80GB HBM3 MIG 3g.40gb x60", 1, 1)],
)  # fmt: skip
def test_an_estimate_is_scaled_to_a_gpu_that_is_known(device, memory, arithmetic):
    measured = analytic_cost(LAYER, "hopper").roofline
    found = cost_model(LAYER, "hopper", device_name=device).roofline
    assert found.bytes_per_us == pytest.approx(memory * measured.bytes_per_us)
    assert found.cached_bytes_per_us == pytest.approx(memory * measured.cached_bytes_per_us)
    assert found.flops_per_us == pytest.approx(arithmetic * measured.flops_per_us)
    assert found.launch_us == measured.launch_us


def test_a_table_measured_here_goes_before_a_shipped_one(tmp_path, monkeypatch):
    lines = []

    def look():
        return cost_model(LAYER, "hopper", lines.append, GPU)

    assert isinstance(look(), AnalyticCost)
    assert len(lines) == 1
    assert f"No cost table for {GPU}" in lines[0]
    table = modelled_table(monkeypatch)
    name = table.fingerprint.file_name()
    replace(table, merge_us=1.0).save(tables.SHIPPED / name)
    assert look().merge_us == 1.0
    replace(table, merge_us=2.0).save(tables.cache_folder() / name)
    assert look().merge_us == 2.0
    assert len(lines) == 1


@pytest.mark.parametrize("folder", ["here", "shipped"])
@pytest.mark.parametrize(
    ("measured", "other"), [(LAYER, EIGHT_BITS), (EIGHT_BITS, LAYER)], ids=["16 bits", "8 bits"]
)
def test_a_table_is_read_for_layers_with_its_width_of_cache_only(
    monkeypatch, folder, measured, other
):
    table = modelled_table(monkeypatch, layer=measured)
    at = tables.cache_folder() if folder == "here" else tables.SHIPPED
    table.save(at / table.fingerprint.file_name())
    found = cost_model(measured, "hopper", device_name=GPU)
    assert isinstance(found, CostTable)
    assert found.to_json() == table.to_json()
    estimate = cost_model(other, "hopper", device_name=GPU)
    assert isinstance(estimate, AnalyticCost)
    assert estimate.attention == other
    modelled_table(monkeypatch, layer=other).save(
        at / fingerprint(other, "hopper", GPU).file_name()
    )
    assert cost_model(other, "hopper", device_name=GPU).fingerprint.kv_dtype != (
        table.fingerprint.kv_dtype
    )
    assert cost_model(measured, "hopper", device_name=GPU).to_json() == table.to_json()


def test_names_of_tables_tell_the_width_of_the_cache_apart():
    names = [fingerprint(x, "hopper", GPU).file_name() for x in (LAYER, EIGHT_BITS)]
    assert names == [
        "nvidia_h200_x132-64-16-bit-16-bit-hopper-1.json",  # as tables of 0.1.0
        "nvidia_h200_x132-64-16-bit-8-bit-hopper-1.json",
    ]


@pytest.mark.parametrize(
    ("layer", "kernel", "command"),
    [
        (LAYER, "hopper", "'vllm-prefixshare profile'."),
        (EIGHT_BITS, "hopper", "'vllm-prefixshare profile --kv-cache-dtype fp8'."),
        (LATENT, "mla_hopper", None),  # profile measures none
    ],
)
def test_the_log_names_the_command_that_measures_the_table(layer, kernel, command):
    lines = []
    assert isinstance(cost_model(layer, kernel, lines.append, GPU), AnalyticCost)
    if command is None:
        assert lines == []
    else:
        (line,) = lines
        assert line.endswith(f"Measure one with {command}")


SHIPPED = sorted((Path(tables.__file__).parent / "tables").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_tables_are_found_by_their_fingerprint(path):
    table = CostTable.load(path)
    assert table.fingerprint.file_name() == path.name
    assert table.fingerprint.kernel in tables.KERNELS.values()
    assert table.tile_l2_us is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_profile_says_when_there_is_no_gpu(capsys):
    assert main(["profile", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == (
        "vllm-prefixshare: error: torch finds no NVIDIA GPU here: use --device cpu.\n"
    )


def test_profile_names_the_file_after_the_fingerprint(tmp_path, monkeypatch, capsys):
    table = modelled_table(monkeypatch)
    monkeypatch.setattr(measure_costs, "_profile_gpu", lambda attention, kernel: table)
    assert main(["profile", "--device", "cuda", "--out", str(tmp_path)]) == 0
    path = tmp_path / table.fingerprint.file_name()
    assert CostTable.load(path).merge_us == table.merge_us
    out = capsys.readouterr().out
    assert f"wrote {path}" in out
    assert "from L2" in out


STATIC = {"type": "float", "num_bits": 8, "dynamic": False}
FP8_SCHEME = {"quant_method": "compressed-tensors", "kv_cache_scheme": STATIC}
NVFP4 = {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}


@pytest.mark.parametrize(
    ("config", "options", "layer"),
    [
        (None, ["--head-dim", "64"], LAYER),
        (None, ["--head-dim", "64", "--kv-cache-dtype", "fp8"], EIGHT_BITS),
        (None, ["--head-dim", "64", "--kv-cache-dtype", "fp8_e4m3"], EIGHT_BITS),
        ({}, [], LAYER),
        ({}, ["--kv-cache-dtype", "fp8"], EIGHT_BITS),
        ({"quantization_config": FP8_SCHEME}, [], EIGHT_BITS),
        ({"quantization_config": FP8_SCHEME}, ["--kv-cache-dtype", "bfloat16"], LAYER),
        ({"quantization_config": NVFP4}, ["--kv-cache-dtype", "fp8"], EIGHT_BITS),
    ],
)
def test_profile_measures_the_cache_that_vllm_would_have(
    config, options, layer, tmp_path, monkeypatch, capsys
):
    def measured(attention, kernel):
        return modelled_table(monkeypatch, layer=attention)

    monkeypatch.setattr(measure_costs, "_profile_gpu", measured)
    model = [] if config is None else ["--model", str(write_model(tmp_path / "model", **config))]
    assert main(["profile", "--device", "cuda", *model, *options]) == 0
    path = tables.cache_folder() / fingerprint(layer, "hopper", GPU).file_name()
    assert capsys.readouterr().out.endswith(f"wrote {path}\n")
    assert isinstance(cost_model(layer, "hopper", device_name=GPU), CostTable)
    other = EIGHT_BITS if layer is LAYER else LAYER
    assert isinstance(cost_model(other, "hopper", device_name=GPU), AnalyticCost)


@pytest.mark.parametrize(
    ("config", "options", "sentence"),
    [
        (
            {"model_type": "deepseek_v2", "kv_lora_rank": 512},
            [],
            "config.json has multi-head latent attention, which needs no cost table, as its plans "
            "were no faster by measured prices than estimated: name another model.",
        ),
        (
            {"model_type": "deepseek_v2", "kv_lora_rank": 512},
            ["--kv-cache-dtype", "fp8"],
            "config.json has multi-head latent attention, which needs no cost table",
        ),
        (
            {"quantization_config": NVFP4},
            [],
            "layers with a KV cache of type nvfp4 keep vLLM's own backend, so there is nothing to "
            "do here: name --kv-cache-dtype bfloat16 or fp8.",
        ),
        (None, ["--kv-cache-dtype", "fp8_e5m2"], "a KV cache of type fp8_e5m2 keep vLLM's own"),
        (
            None,
            ["--kv-cache-dtype", "float16"],
            "of type float16 keep vLLM's own backend, so there is nothing to do here: name "
            "--kv-cache-dtype bfloat16 or fp8.",
        ),
        (
            None,
            ["--device", "cpu", "--kv-cache-dtype", "fp8"],
            "layers with an fp8 KV cache keep vLLM's own backend on a CPU, which reads no cost "
            "table: name --kv-cache-dtype bfloat16, or --device cuda on a GPU.",
        ),
        (
            {"quantization_config": FP8_SCHEME},
            ["--device", "cpu"],
            "layers with an fp8 KV cache keep vLLM's own backend on a CPU",
        ),
        ({"quantization_config": 8}, [], "config.json does not describe a model ("),
    ],
)
def test_profile_says_whose_table_nobody_would_read(
    config, options, sentence, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(measure_costs, "_profile_gpu", lambda *_: pytest.fail("must not measure"))
    model = [] if config is None else ["--model", str(write_model(tmp_path / "model", **config))]
    assert main(["profile", "--device", "cuda", *model, *options]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert not tables.cache_folder().exists()


ARGUMENTS = [
    *("--device", "cpu", "--dtype", "float32", "--heads", "4:2", "--head-dim", "64"),
    *("--tree", "1,4_128,40", "--repeats", "1"),
]


def test_the_ablation_runs_every_variant_and_checks_it(tmp_path, monkeypatch):
    out = tmp_path / "ablation.json"
    assert ablation.main([*ARGUMENTS, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    cells = result["trees"]["1,4_128,40"]
    assert cells.keys() == {v.title for v in ablation.variants("auto")}
    assert result["slowdown"].keys() == cells.keys()
    assert all(cell["ms"] > 0 and 0 < cell["error"] < 1e-4 for cell in cells.values())
    assert f"KV read {4 * 168 / 288:.2f}x" in cells["no tree, split requests"]["note"]
    assert "KV read 1.00x" in cells["tree, undivided"]["note"]


def test_the_ablation_fails_on_a_wrong_result(monkeypatch, capsys):
    monkeypatch.setattr(bench, "relative_error", lambda out, expected: math.nan)
    assert ablation.main(ARGUMENTS) == 1
    assert "WRONG" in capsys.readouterr().out


def test_the_ablation_refuses_in_one_sentence(capsys):
    assert ablation.main([*ARGUMENTS, "--tree", "4,1_16,16"]) == 2
    assert "tree '4,1_16,16' is not valid" in capsys.readouterr().err
