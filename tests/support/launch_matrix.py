"""That ``launch`` gives a kernel's binary what Triton would give it, with the first Triton on the
path; no GPU is needed, because the launcher of each binary only takes notes.

    python -m tests.support.launch_matrix
"""

import os

os.environ.pop("TRITON_INTERPRET", None)  # before kernels are imported

import sys
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import compute_cache_key

from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.kernels.aot import dispatch
from vllm_prefixshare.kernels.aot.dispatch import launch, only_compile
from vllm_prefixshare.kernels.aot.gpu_target import stand_in
from vllm_prefixshare.kernels.cache_write import CacheWrite
from vllm_prefixshare.kernels.registry import make_kernel

LLAMA = AttentionConfig(32, 8, 128, 16)
LATENT = AttentionConfig(16, 1, 576, 64, kv_lora_rank=512)
LAYERS = {
    "hopper": LLAMA,
    "portable": AttentionConfig(8, 2, 64, 16, "float16"),
    "mla_hopper": LATENT,
}


class Notes:
    """What a binary's launcher was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> None:
        self.calls.append(args)


def seen(x: Any) -> Any:
    """An argument as a launcher sees it: a tensor by its memory, a descriptor or a record for
    profilers by its fields, a group by its elements.
    """
    if isinstance(x, tuple):
        return [*map(seen, x)]
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr()
    if hasattr(x, "block_shape"):
        return seen(x.base), list(x.shape), list(x.strides), list(x.block_shape), x.layout
    return x.data if type(x).__name__ == "LazyDict" else x


def watched(run: Any) -> dict[Any, Notes]:
    """The binaries that ``run`` launches, with their notes. Nothing is launched yet."""
    with only_compile() as binaries:
        run()
    notes = {binary: Notes() for binary in binaries}
    for binary in notes:
        binary._run = notes[binary]
        binary.module, binary.function = object(), object()  # loaded, as far as Triton can see
    return notes


def assert_both_ways_call_the_same(run: Any) -> None:
    """``run`` launches once by way of Triton and once by way of what ``launch`` has kept."""
    notes = watched(run)
    dispatch._known.clear()
    run()
    assert len(dispatch._known) == len(notes)
    with patch.object(triton.runtime.JITFunction, "run", side_effect=AssertionError("by Triton")):
        run()
    for binary, own in notes.items():
        by_triton, kept = own.calls
        assert [*map(seen, by_triton)] == [*map(seen, kept)], binary.metadata.name
        assert kept[4] is binary.function and len(kept) > 9


def words(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def attention(name: str) -> None:
    """A layer's launches, with and without the log-sum-exp."""
    from vllm_prefixshare.kernels.aot import compilation as compiling
    from vllm_prefixshare.kernels.merge_states import merge_states

    layer = LAYERS[name]
    kernel = make_kernel(name, layer, 1, stand_in((9, 0)))
    for lse in (False, True):
        t = compiling._arguments(layer, 1, False, "NHD", lse)
        plan, indptr = dict.fromkeys(kernel.capacity(1).sizes, words(16)), words(65)
        assert_both_ways_call_the_same(lambda t=t, plan=plan: kernel.launch(plan, t, 0.1))
        assert_both_ways_call_the_same(
            lambda t=t, indptr=indptr: merge_states(
                indptr, t.partial_out, t.partial_lse, t.out, t.seq_lens, 1, t.out_lse,
                dependent=kernel.starts_merging,
            )
        )  # fmt: skip


def cache_write() -> None:
    stand_in((9, 0))
    write = CacheWrite.of(LLAMA)
    key, value = torch.zeros(2, 5, 8, 128, dtype=torch.bfloat16)
    cache = torch.zeros(4, 16, 8, 256, dtype=torch.bfloat16)
    slots = torch.arange(5)
    assert_both_ways_call_the_same(
        lambda: write.write(key, value, *cache.split(128, dim=-1), slots)
    )


class Pair(NamedTuple):
    first: Any
    second: Any


@triton.jit
def _kernel(a, b, c, n: tl.constexpr):
    pass


def arguments() -> list[Any]:
    """Of all kinds that Triton tells apart, and some that it does not."""
    buffer = torch.zeros(64, dtype=torch.uint8)
    offset = -buffer.data_ptr() % 16
    tensors = [
        buffer[offset + at : offset + at + 16].view(dtype)
        for at, dtype in product((0, 8, 16), (torch.int32, torch.float32, torch.bfloat16))
    ]
    sizes = [2**31, 2**32, 2**62]
    numbers = [0, 1, 2, 15, 16, 17, 32, *(s + at for s, at in product(sizes, (-16, -1, 0, 1, 16)))]
    return [*tensors, *numbers, *(-n for n in numbers[1:]), True, False, None, 0.0, 1.0, 0.5]


def choices() -> None:
    """Calls that ``launch`` takes for one have one binary in Triton."""
    stand_in((9, 0))
    _, keys, _, _, binder = _kernel.device_caches[90]
    of_choice: dict[Any, str] = {}
    everything = arguments()
    for x, y in product(everything, repeat=2):
        for args, n in product(((x, y, 3), (Pair(x, y), None, 3)), (16, 17)):
            _, specialization, options = binder(*args, n=n)
            key = compute_cache_key(keys, specialization, options)
            choice = dispatch._choice(_kernel, args, {"n": n})
            assert of_choice.setdefault(choice, key) == key, (args, n)
    found = len(of_choice)
    assert 200 < len(set(of_choice.values())) <= found < 4 * len(everything) ** 2, found


def knobs() -> None:
    """A knob that is changed after the first launch has the effect that it has in Triton."""
    stand_in((9, 0))
    dispatch._known.clear()
    settings: list[tuple[Any, str, Any]] = [
        (triton.knobs.runtime, "debug", True),
        (triton.knobs.compilation, "instrumentation_mode", "other"),
    ]

    def run() -> None:
        launch(_kernel, (1,), words(4), words(4), 3, n=18)

    (plain,) = watched(run).values()
    run()
    for group, name, value in settings:
        with group.scope():
            setattr(group, name, value)
            (own,) = watched(run).values()
            for _ in range(2):
                run()
        assert len(own.calls) == 2 and len(plain.calls) == 1, name
    run()
    assert len(plain.calls) == 2


def left_to_triton() -> None:
    """Calls that ``launch`` does not know are Triton's each time."""
    stand_in((9, 0))
    dispatch._known.clear()
    constant = tl.constexpr(3)

    def run() -> None:
        launch(_kernel, (1,), constant, words(4), 3, n=19)

    (notes,) = watched(run).values()
    for _ in range(2):
        run()
    assert len(notes.calls) == 2 and notes.calls[0][9] is constant
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = lambda **_: True  # do not compile, do not launch
        for _ in range(2):
            launch(_kernel, (1,), words(4), words(4), 3, n=20)
    for number in (np.float32(0.5), np.int64(1)):
        for argument in (number, Pair(words(4), number)):
            with pytest.raises(TypeError, match="failed to specialize argument of type"):
                launch(_kernel, (1,), words(4), words(4), argument, n=19)
    assert not dispatch._known


def main() -> None:
    expected = os.environ.get("PREFIXSHARE_EXPECT_TRITON", triton.__version__)
    assert triton.__version__ == expected, f"found Triton {triton.__version__}"
    choices()
    knobs()
    left_to_triton()
    cache_write()
    for name in LAYERS:
        attention(name)
    print("the same calls")


if __name__ == "__main__":
    sys.exit(main())
