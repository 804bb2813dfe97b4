"""Which kernel is chosen, and what happens where Triton cannot compile it."""

import re
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.kernels import registry
from vllm_prefixshare.kernels.aot import compilation as compiling
from vllm_prefixshare.kernels.aot.compilation import (
    CompileError,
    compile_launches,
    load_cache_write,
)
from vllm_prefixshare.kernels.aot.dispatch import launch, only_compile
from vllm_prefixshare.kernels.cache_write import CacheWrite
from vllm_prefixshare.kernels.catalog import Gpu, candidates
from vllm_prefixshare.kernels.registry import first_that_compiles, make_kernel

SHAPE = AttentionConfig(32, 8, 128, 16)
H100 = Gpu((9, 0), 132, 227 << 10)
L40S = Gpu((8, 9), 142, 99 << 10)


class Binaries:
    """A stand-in for a Triton function: records how it is called, and raises a given error."""

    def __init__(self, shared: int = 0, error: Exception | None = None) -> None:
        self.shared, self.error = shared, error
        self.warmups: list[bool] = []

    def run(self, *args, warmup, **options):
        assert options["enable_fp_fusion"] is True
        self.warmups.append(warmup)
        if self.error:
            raise self.error
        return SimpleNamespace(metadata=SimpleNamespace(shared=self.shared))


@pytest.fixture
def hopper(monkeypatch):
    """The Hopper kernel's function, replaced."""
    import vllm_prefixshare.kernels.hopper.launch as room

    function = Binaries(shared=230_000)
    monkeypatch.setattr(room, "partial_attention", function)
    return function


@pytest.fixture(autouse=True)
def portable(monkeypatch):
    import vllm_prefixshare.kernels.merge_states as merging
    import vllm_prefixshare.kernels.portable.launch as room

    function = Binaries()
    monkeypatch.setattr(room, "partial_attention", function)
    monkeypatch.setattr(merging, "_merge_states", Binaries())
    return function


def test_hopper_comes_first_on_its_gpu_only():
    assert candidates(SHAPE, H100) == ["hopper", "portable"]
    assert candidates(SHAPE, L40S) == ["portable"]
    assert candidates(AttentionConfig(32, 8, 128, 24), H100) == ["portable"]
    for head_dim, block_size in product((128, 256), (16, 48, 128, 528, 1072)):
        shape = AttentionConfig(32, 8, head_dim, block_size)
        assert candidates(shape, H100) == ["hopper", "portable"]
    assert candidates(SHAPE, H100, "portable") == ["portable"]


FP8 = "float8_e4m3fn"


@pytest.mark.parametrize(
    ("head_dim", "extras", "hopper_serves"),
    [
        (128, {"features": ("sinks", "soft_cap")}, True),
        (128, {"features": ("alibi",)}, False),
        (512, {}, False),
        (128, {"kv_dtype": FP8, "query_dtype": FP8}, True),
        (128, {"kv_dtype": FP8}, False),
        (72, {"kv_dtype": FP8, "query_dtype": FP8}, False),
    ],
)
def test_layers_with_extras_find_the_kernel_that_has_them(head_dim, extras, hopper_serves):
    shape = AttentionConfig(32, 8, head_dim, 16, **extras)
    assert candidates(shape, H100) == ["hopper", "portable"][not hopper_serves :]
    if not hopper_serves:
        with pytest.raises(PrefixShareError, match="kernel 'hopper' needs compute"):
            candidates(shape, H100, "hopper")


@pytest.mark.parametrize(
    ("shape", "gpu", "kernel", "query_len", "message"),
    [
        (SHAPE, L40S, "hopper", 1, "needs compute capability 9.0"),
        (SHAPE, Gpu((7, 5), 40, 64 << 10), "auto", 1, "7.5, 8.0 is the minimum"),
        (SHAPE, H100, "cutlass", 1, "kernel must be one of auto, hopper, portable"),
        (SHAPE, H100, "auto", 0, "max_query_len must be at least 1"),
        (AttentionConfig(32, 8, 128, 16, "float32"), H100, "auto", 1, "dtype must be"),
        (AttentionConfig(16, 1, 576, 12, kv_lora_rank=512), H100, "auto", 1, "multiple of 8 tok"),
        (AttentionConfig(16, 1, 576, 64, kv_lora_rank=512), H100, "auto", 2048, "at most 32767 ro"),
    ],
)
def test_what_no_kernel_serves_is_refused(shape, gpu, kernel, query_len, message):
    with pytest.raises(PrefixShareError, match=message):
        candidates(shape, gpu, kernel, query_len)


def test_compiling_launches_nothing(hopper, portable):
    choice = first_that_compiles(SHAPE, H100, "auto", 1)
    assert choice.kernel.name == "hopper" and choice.passed_over is None
    assert hopper.warmups == [True] and portable.warmups == []
    launch(hopper, (1,))
    assert hopper.warmups == [True, False], "launches again once compiling is over"


def test_auto_passes_over_a_kernel_that_does_not_compile(hopper, portable):
    hopper.error = RuntimeError("in line 3:\n`ptxas` failed with error code 255")
    choice = first_that_compiles(SHAPE, H100, "auto", 1)
    assert choice.kernel.name == "portable"
    assert "'hopper' cannot be compiled by Triton" in choice.passed_over
    assert "RuntimeError: `ptxas` failed with error code 255" in choice.passed_over
    assert "\n" not in choice.passed_over


def test_a_named_kernel_that_does_not_compile_is_refused(hopper):
    hopper.error = AttributeError("module 'gl' has no attribute 'barrier'")
    with pytest.raises(PrefixShareError, match=r"no attribute 'barrier'\): use kernel='auto', in"):
        first_that_compiles(SHAPE, H100, "hopper", 1)


def test_another_kernel_is_named_as_the_remedy_only_where_there_is_one(hopper, portable):
    portable.error = hopper.error = RuntimeError("no compiler")
    for gpu, remedy in ((H100, "use kernel='auto', in an engine"), (L40S, "install the Triton")):
        with pytest.raises(PrefixShareError, match=rf"^[^.]+'portable' .*no compiler\): {remedy}"):
            first_that_compiles(SHAPE, gpu, "portable", 1)


def test_no_kernel_at_all(hopper, portable):
    hopper.error = portable.error = RuntimeError("no compiler")
    with pytest.raises(PrefixShareError, match=r"'hopper' cannot be compiled .*\): install the"):
        first_that_compiles(SHAPE, H100, "auto", 1)


def test_a_triton_without_gluon_has_the_portable_kernel(monkeypatch):
    def without_gluon(name):
        if "hopper" in name:
            raise ImportError("No module named 'triton.experimental.gluon'")
        return portable_room

    portable_room = registry.import_module("vllm_prefixshare.kernels.portable.launch")
    monkeypatch.setattr(registry, "import_module", without_gluon)
    choice = first_that_compiles(SHAPE, H100, "auto", 1)
    assert choice.kernel.name == "portable" and "No module named" in choice.passed_over


def test_a_kernel_that_does_not_fit_the_gpu_is_passed_over(hopper):
    hopper.shared = 240_000
    choice = first_that_compiles(SHAPE, H100, "auto", 1)
    assert choice.kernel.name == "portable"
    assert "needs 240000 bytes of shared memory" in choice.passed_over


def test_the_choice_is_made_once(hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: only_compile())  # any context
    monkeypatch.setattr(registry.Gpu, "of", lambda device: H100)
    registry.choose_kernel.cache_clear()
    device = torch.device("cuda", 0)
    try:
        first = registry.choose_kernel(SHAPE, device, "auto", 1)
        assert registry.choose_kernel(SHAPE, device, "auto", 1) is first
        assert hopper.warmups == [True]
        assert registry.choose_kernel(SHAPE, device, "auto", 4) is not first
    finally:
        registry.choose_kernel.cache_clear()


def test_the_cache_folder_of_triton_is_left_as_it_was(hopper, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PREFIXSHARE_CACHE", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/theirs")
    seen = []
    run = hopper.run
    knobs = compiling.triton.knobs.cache
    monkeypatch.setattr(hopper, "run", lambda *a, **k: (seen.append(knobs.dir), run(*a, **k))[1])
    compile_launches(make_kernel("hopper", SHAPE, 1, H100), SHAPE, 1, H100)
    assert seen == [str(tmp_path / "compiled")]
    assert knobs.dir == "/theirs"


def test_what_was_not_compiled_is_named_with_its_gpu(portable):
    portable.error = RuntimeError()
    with pytest.raises(CompileError, match=r"'portable' .* compute capability 8.9: RuntimeError\."):
        compile_launches(make_kernel("portable", SHAPE, 1, L40S), SHAPE, 1, L40S)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("of the machine"),
        torch.OutOfMemoryError("of the GPU"),
        torch.AcceleratorError("the GPU is lost"),
        RuntimeError("Triton Error [CUDA]: out of memory"),  # from the driver, for a binary
    ],
)
def test_what_a_gpu_or_its_memory_is_at_fault_for_is_not_laid_on_the_kernel(
    error, portable, monkeypatch
):
    def fail(*args):
        raise error

    portable.error = error
    with pytest.raises(type(error), match=re.escape(str(error))):
        first_that_compiles(SHAPE, L40S, "auto", 1)
    monkeypatch.setattr(CacheWrite, "write_nothing", fail)
    with pytest.raises(type(error), match=re.escape(str(error))):
        load_cache_write(SHAPE, torch.device("meta"))
