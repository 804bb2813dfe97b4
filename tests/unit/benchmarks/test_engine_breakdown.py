"""``benchmarks.engine --breakdown``: kinds of kernels, which steps are profiled, and the sweep."""

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.engine import bench as bench_engine
from benchmarks.engine import breakdown
from benchmarks.engine.breakdown import ATTENTION, OTHER, PRODUCTS, WRITTEN
from vllm_prefixshare import PrefixShareError

#: names of kernels as torch's profiler has them
NAMES = {
    ATTENTION: (
        "partial_attention",
        "_merge_states",
        "_merge_stacked",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::",
        "void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<cute::C<8>, ",
        "flash::prepare_varlen_num_blocks_kernel(int, int, int, int const*)",
        "void vllm::merge_attn_states_kernel<__nv_bfloat16, 128>(",
        "kernel_unified_attention_2d",
        "reduce_segments",
        "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0, 2u, ",
        "void flashinfer::PersistentVariableLengthMergeStatesKernel<8u, 16u, 8u, 4u, float, ",
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<",
    ),
    WRITTEN: (
        "_cache_write",
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16, ",
        "void vllm::concat_and_cache_mla_kernel<__nv_bfloat16, ",
    ),
    PRODUCTS: (
        "nvjet_tst_64x8_64x16_4x1_v_bz_TNT",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, ",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, ",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<",
        "triton_tem_fused_mm_3",
        "fused_moe_kernel",
    ),
    OTHER: (
        "triton_poi_fused_mul_silu_slice_1",
        "triton_red_fused__to_copy_add_mean_mul_unified_attention_with_output_2",
        "void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(",
        "void vllm::act_and_mul_kernel<c10::BFloat16, ",
        "void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u, ",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps",
        "Memcpy DtoH (Device -> Pinned)",
    ),
}


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, of in NAMES.items() for n in of])
def test_the_name_of_a_kernel_says_its_kind(kind, name):
    assert breakdown.kind_of(name) == kind


def test_the_kinds_add_up_to_the_busy_time():
    """Kernels that overlap count once, and the gaps between kernels are idle time."""
    spans = [
        ("nvjet_a", 5_000.0, 7_000.0),
        ("partial_attention", 0.0, 3_000.0),
        ("_merge_states", 2_000.0, 4_000.0),
        ("_merge_states", 2_500.0, 3_500.0),  # behind the others
        ("triton_poi_fused_add_0", 9_000.0, 9_500.0),
    ]
    found = breakdown.by_kind(spans, 2)
    assert found["ms"] == {ATTENTION: 2.0, WRITTEN: 0.0, PRODUCTS: 1.0, OTHER: 0.25}
    assert found["launches"] == {ATTENTION: 1.5, WRITTEN: 0.0, PRODUCTS: 0.5, OTHER: 0.5}
    assert found["longest"][ATTENTION] == ["partial_attention", "_merge_states"]
    assert found["idle_ms"] == pytest.approx((9.5 - 6.5) / 2)
    assert breakdown.by_kind([], 2) == {}


class Runner:
    """A model runner whose step runs one attention kernel of a millisecond and 3 ms of others."""

    def __init__(self) -> None:
        self.trace: list[tuple[str, float, float]] | None = None
        self.now = 0.0
        self.done: list[int] = []

    def execute_model(self, scheduled: Any) -> str:
        for name, us in (("partial_attention", 1e3), ("nvjet_x", 3e3)):
            if self.trace is not None:
                self.trace.append((name, self.now, self.now + us))
            self.now += us
        self.done.append(len(scheduled.num_scheduled_tokens))
        return "output"

    def step(self, *tokens: int) -> None:
        counts = {str(i): n for i, n in enumerate(tokens)}
        assert self.execute_model(SimpleNamespace(num_scheduled_tokens=counts)) == "output"


def event(span: tuple[str, float, float], device: str = "CUDA") -> SimpleNamespace:
    name, start, end = span
    kind = getattr(torch.autograd.DeviceType, device)
    return SimpleNamespace(
        name=name, device_type=kind, time_range=SimpleNamespace(start=start, end=end)
    )


@pytest.fixture
def runner(monkeypatch) -> Iterator[Runner]:
    """A runner and, in the place of torch's profiler, one that records its kernels."""
    made = Runner()

    class Trace:
        def __init__(self, activities: Any) -> None:
            assert activities == [torch.profiler.ProfilerActivity.CUDA]
            self.found: list[tuple[str, float, float]] = []

        def prepare_trace(self) -> None:
            pass

        def start_trace(self) -> None:
            made.trace = []

        def stop_trace(self) -> None:
            self.found, made.trace = made.trace or [], None

        def events(self) -> list[SimpleNamespace]:
            launch = event(("cudaGraphLaunch", 0.0, 1e6), "CPU")
            return [launch, *map(event, self.found)]

    monkeypatch.setattr(torch.profiler, "profile", Trace)
    yield made
    assert "execute_model" not in vars(made), "it is as before"


def test_steps_in_which_all_requests_decode_are_profiled(runner):
    profiler = breakdown.StepProfiler(runner, 3)
    runner.step(64, 64, 64)
    runner.step(1, 1)
    for _ in range(breakdown.TOKENS):
        runner.step(1, 1, 1)
    found = profiler.end()
    assert found["steps"] == breakdown.PROFILED
    assert found["ms"] == {ATTENTION: 1.0, WRITTEN: 0.0, PRODUCTS: 3.0, OTHER: 0.0}
    assert found["idle_ms"] == pytest.approx(0)
    assert len(runner.done) == breakdown.TOKENS + 2


@pytest.mark.parametrize("last", [(), (1, 1)], ids=["nothing", "fewer requests"])
def test_a_profile_ends_with_the_last_step_of_all_requests(runner, last):
    profiler = breakdown.StepProfiler(runner, 3)
    for _ in range(breakdown.SKIPPED + breakdown.WARM + 2):
        runner.step(1, 1, 1)
    if last:
        for _ in range(20):
            runner.step(*last)
    found = profiler.end()
    assert found["steps"] == 2
    assert found["ms"][ATTENTION] == 1.0


@pytest.mark.parametrize("steps", [0, breakdown.SKIPPED + 1])
def test_too_few_steps_are_said(runner, steps):
    profiler = breakdown.StepProfiler(runner, 3)
    for _ in range(steps):
        runner.step(1, 1, 1)
    assert profiler.end() == {"failed": "no kernels were recorded in 0 steps"}


def test_a_step_goes_on_without_its_profile(runner, monkeypatch):
    def refuse(activities: Any) -> None:
        raise OSError("no CUPTI")

    monkeypatch.setattr(torch.profiler, "profile", refuse)
    profiler = breakdown.StepProfiler(runner, 1)
    for _ in range(breakdown.TOKENS):
        runner.step(1)
    assert profiler.end() == {"failed": "OSError: no CUPTI"}
    assert len(runner.done) == breakdown.TOKENS


class Engine:
    """Stands in for an ``EngineProcess``; its worker is asked for a profile."""

    def __init__(self, attention: float | None) -> None:
        self.attention, self.calls = attention, []

    def generate(self, prompts: list[list[int]], tokens: int, **options: Any) -> None:
        self.calls.append((len(prompts), len(prompts[0]), tokens))

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        self.calls.append((method, *args))
        if method == "begin_breakdown":
            return [None]
        if self.attention is None:
            return [{"failed": "OSError: no CUPTI"}]
        us = 1e3 * self.attention
        spans = [("partial_attention", 0.0, us), ("nvjet", us, us + 4e3)]
        return [breakdown.by_kind(spans, 1)]


@pytest.fixture
def bench(tmp_path) -> Callable[..., bench_engine.Bench]:
    def make(stock: float | None, ours: float | None) -> bench_engine.Bench:
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100}))
        options = "--workloads sweep8k --breakdown --tokens 4 --scale 0.1"
        engines: Any = {"stock": Engine(stock), "PREFIX_SHARE": Engine(ours)}
        return bench_engine.Bench(bench_engine.parse(options.split()), tmp_path, engines)

    return make


def test_each_engine_is_profiled_on_cached_documents(bench):
    made = bench(12.0, 1.0)
    row = {"workload": "a title", "breakdown": made.breakdown("sweep8k")}
    for engine in made.engines.values():
        assert engine.calls == [
            (1, 819, 1),
            ("begin_breakdown", 3),
            (3, 819 + 16, breakdown.TOKENS),
            ("end_breakdown",),
        ]
    assert breakdown.attention_ms(row, "stock") == (12.0, 16.0)
    assert breakdown.attention_ms(row, "PREFIX_SHARE") == (1.0, 5.0)
    with pytest.raises(PrefixShareError, match="PREFIX_SHARE: OSError: no CUPTI"):
        bench(12.0, None).breakdown("sweep8k")
