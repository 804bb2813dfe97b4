"""A Gluon kernel's own source under Triton's interpreter, which has no Gluon.

Gluon is Triton with layouts, shared memory, asynchronous copies and products, and partitions of
warps. Here layouts are nothing, shared memory is an array, and whatever is asynchronous is done at
once. Each partition is a thread; one runs at a time, until it waits at a barrier. So arithmetic,
addresses, masks and the order of the barriers are tested; layouts and overlap are not.
"""

import dataclasses
import importlib.util
import sys
import threading
import types
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.interpreter import (
    InterpretedFunction,
    InterpreterBuilder,
    TensorHandle,
    _get_np_dtype,
)
from triton.tools.tensor_descriptor import TensorDescriptor

#: seconds after which partitions that all wait are given up
DEADLOCK = 60.0
PREFIX = "triton.experimental"
#: held by the partition that runs
_turn = threading.Condition()
#: of the partitions, the first one first
_errors: list[BaseException] = []


def number(x) -> int:
    """The value of an integer that is a tensor, a compile-time value or both."""
    return number(x.value) if isinstance(x, tl.constexpr) else int(x)


class SharedMemory:
    """A view of an array in shared memory, at first NaN (-1 in integers)."""

    def __init__(self, data: np.ndarray, dtype: tl.dtype) -> None:
        self.data, self.dtype = data, dtype

    @classmethod
    def allocate(cls, dtype: tl.dtype, shape: list[int]) -> "SharedMemory":
        data = np.empty(shape, _get_np_dtype(dtype))
        data.view(np.uint8)[...] = 0xFF
        return cls(data, dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def index(self, i) -> "SharedMemory":
        return SharedMemory(self.data[number(i)], self.dtype)

    def slice(self, start, length, dim=0) -> "SharedMemory":
        places = (slice(None),) * dim + (slice(number(start), number(start) + number(length)),)
        return SharedMemory(self.data[places], self.dtype)

    def permute(self, order) -> "SharedMemory":
        return SharedMemory(self.data.transpose(order), self.dtype)

    def reinterpret(self, dtype, shape, layout=None) -> "SharedMemory":
        data = self.data.view(_get_np_dtype(dtype))
        return SharedMemory(data.reshape([number(n) for n in shape]), dtype)

    def store(self, value) -> None:
        assert value.dtype == self.dtype
        self.data[...] = value.handle.data

    def load(self, layout=None) -> tl.tensor:
        shape = tl.block_type(self.dtype, list(self.data.shape))
        return tl.tensor(TensorHandle(self.data.copy(), self.dtype), shape)


class Barrier:
    """An mbarrier: its phase ends when all have arrived and all bytes that were announced have."""

    def __init__(self) -> None:
        self.count = self.missing = self.phase = self.bytes = 0

    def init(self, count: int) -> None:
        self.count = self.missing = number(count)

    def change(self, arrived: int, announced: int) -> None:
        self.missing -= arrived
        self.bytes += announced
        assert self.missing >= 0
        if self.missing == self.bytes == 0:
            self.missing, self.phase = self.count, self.phase + 1
            _turn.notify_all()

    def wait(self, phase) -> None:
        # a barrier that nobody has used yet is past the phase before its first
        parity = number(phase)
        over = _turn.wait_for(lambda: self.phase % 2 != parity or _errors, DEADLOCK)
        assert over and not _errors, "partitions wait forever, or another has failed"


class Barriers:
    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, i) -> Barrier:
        return self.all[number(i)]


def allocate_shared_memory(dtype, shape, layout):
    shape = [number(n) for n in shape]
    return Barriers(shape[0]) if layout is Barriers else SharedMemory.allocate(dtype, shape)


def async_load(descriptor, at, barrier: Barrier, shared: SharedMemory) -> None:
    shared.store(descriptor.load(at))
    barrier.change(0, -shared.data.nbytes)


def warp_specialize(partitions, warps, registers) -> None:
    """Run each partition in a thread. The first error ends them all."""
    _errors.clear()

    def run(function, arguments) -> None:
        with _turn:
            try:
                function(*arguments)
            except BaseException as e:
                _errors.append(e)
                _turn.notify_all()

    threads = [threading.Thread(target=run, args=part, daemon=True) for part in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if _errors:
        raise _errors[0]


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    a = a.load() if isinstance(a, SharedMemory) else a
    return tl.dot(a, b.load(), acc) if use_acc else tl.dot(a, b.load())


class LaunchBefore:
    """The launch before that of the kernel. It ends when the kernel waits for it."""

    def __init__(self) -> None:
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []

    def writes(self, tensor: torch.Tensor) -> None:
        """Let it write what the tensor holds, which is NaN until then."""
        self._written.append((tensor, tensor.clone()))
        tensor.fill_(torch.nan)

    def end(self) -> None:
        while self._written:
            tensor, values = self._written.pop()
            tensor.copy_(values)


launch_before = LaunchBefore()


def full(shape, value, dtype, layout=None):
    return tl.full([number(n) for n in shape], value, dtype)


def late(name: str):
    """A function of Triton's, looked up when it is called: the interpreter replaces them."""
    return lambda *args, **options: getattr(tl, name)(*args, **options)


def nothing(*args, **options) -> None:
    pass


def inline_assembly(text, constraints, args, **options):
    """A reciprocal; what else the kernels say in assembly is about time and order alone."""
    if str(getattr(text, "value", text)).startswith("rcp"):
        return 1.0 / args[0]
    return None


def _module(name: str, **values) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(values)
    return module


def _stand_ins() -> dict[str, types.ModuleType]:
    """Modules of Gluon's under the names by which kernels import them."""
    gl = _module("gl")
    for each in ("constexpr", "float16", "float32", "int32", "int64", "uint32"):
        setattr(gl, each, getattr(tl, each))
    for each in ("load", "store", "where", "maximum", "minimum", "max", "min", "sum", "exp2",
                 "log2", "ceil", "program_id", "num_programs", "multiple_of", "gather",
                 "split"):  # fmt: skip
        setattr(gl, each, late(each))
    for each in ("NVMMADistributedLayout", "NVMMASharedLayout", "BlockedLayout", "SliceLayout",
                 "DistributedLinearLayout", "SwizzledSharedLayout",
                 "DotOperandLayout"):  # fmt: skip
        setattr(gl, each, nothing)
    gl.arange = lambda start, end, layout=None: tl.arange(start, end)
    gl.zeros = lambda shape, dtype, layout=None: full(shape, 0.0, dtype)
    gl.zeros_like = lambda x: x * 0
    gl.full = full
    gl.convert_layout = lambda x, layout, **options: x
    gl.associative_scan = lambda x, axis, add: tl.cumsum(x, axis)
    gl.static_range = range
    gl.inline_asm_elementwise = inline_assembly
    gl.allocate_shared_memory = allocate_shared_memory
    gl.warp_specialize = warp_specialize
    mbarrier = _module(
        "mbarrier",
        MBarrierLayout=lambda: Barriers,
        init=lambda barrier, count: barrier.init(count),
        expect=lambda barrier, count: barrier.change(1, number(count)),
        arrive=lambda barrier, count: barrier.change(number(count), 0),
        wait=lambda barrier, phase: barrier.wait(phase),
    )
    hopper = _module(
        "hopper",
        fence_async_shared=nothing,
        mbarrier=mbarrier,
        warpgroup_mma=warpgroup_mma,
        warpgroup_mma_wait=lambda outstanding, deps: deps[0],
    )
    names = _module(
        "gluon_names",
        barrier=nothing,
        async_load=async_load,
        reinterpret=SharedMemory.reinterpret,
    )
    dependent = _module(
        "dependent", wait_for_launch_before=launch_before.end, launch_merging=nothing
    )
    gluon = _module("gluon", language=gl, jit=_jit)
    return {
        PREFIX: _module("triton.experimental", gluon=gluon),
        f"{PREFIX}.gluon": gluon,
        f"{PREFIX}.gluon.language": gl,
        f"{PREFIX}.gluon.language.nvidia.hopper": hopper,
        "vllm_prefixshare.kernels.common.dependent_launch": dependent,
        "vllm_prefixshare.kernels.common.gluon_names": names,
    }


def _jit(function=None, **options):
    return triton.jit(function) if function else triton.jit


_of_other_types = InterpreterBuilder.binary_op


def _binary_op(builder, a: TensorHandle, b: TensorHandle, op) -> TensorHandle:
    """The interpreter's own would take the bits of a bfloat16 for an integer. And it gives the
    result of a comparison the type of what it compared: broadcast, such a mask is of integers,
    which Triton 3.9 refuses.
    """
    if a.dtype.scalar != tl.bfloat16:
        result = _of_other_types(builder, a, b, op)
        return TensorHandle(result.data, tl.int1) if result.data.dtype == np.bool_ else result
    x, y = ((each.data.astype(np.uint32) << 16).view(np.float32) for each in (a, b))
    rounded = torch.from_numpy(op(x, y)).bfloat16().view(torch.int16)
    return TensorHandle(rounded.numpy().view(np.uint16), tl.bfloat16)


@dataclasses.dataclass(frozen=True)
class InterpretedKernel:
    """A kernel that is launched as Triton's are, with Gluon's tensor descriptors."""

    function: InterpretedFunction

    def run(self, *args, **options) -> None:
        with mock.patch.object(InterpreterBuilder, "binary_op", _binary_op):
            self.function.run(*map(_plain, args), **options)


def _plain(argument):
    if not isinstance(argument, GluonDescriptor):
        return argument
    x = argument
    return TensorDescriptor(x.base, list(x.shape), list(x.strides), list(x.block_shape))


def load_kernel(
    package: str, folder: Path, modules=("producer", "wide_values", "kernel")
) -> InterpretedKernel:
    """``partial_attention`` of the last of a package's modules of Gluon kernels. Copies are
    written to ``folder``: the interpreter knows compile-time arguments by name.
    """
    stand_ins = _stand_ins()
    kept = {}
    interpret = triton.knobs.runtime.interpret
    try:
        triton.knobs.runtime.interpret = True
        for each in modules:
            for name, stand_in in stand_ins.items():
                kept.setdefault(name, sys.modules.get(name))
                sys.modules[name] = stand_in
            name = f"{package}.{each}"
            source = Path(importlib.util.find_spec(name).origin).read_text()
            copied = folder / f"{each}.py"
            copied.write_text(source.replace(": gl.constexpr", ": tl.constexpr"))
            spec = importlib.util.spec_from_file_location(f"interpreted_{each}", copied)
            module = importlib.util.module_from_spec(spec)
            module.tl = tl  # what the interpreter looks for
            spec.loader.exec_module(module)
            stand_ins[name] = module  # for the modules that follow
    finally:
        triton.knobs.runtime.interpret = interpret
        for name, value in kept.items():
            sys.modules.pop(name) if value is None else sys.modules.update({name: value})
    return InterpretedKernel(module.partial_attention)
