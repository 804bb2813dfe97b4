"""A Gluon kernel's own source under Triton's interpreter, which has no Gluon.

Gluon is Triton with layouts, shared memory and asynchronous copies and products. Here layouts are
nothing, shared memory is a tensor with a name, and whatever is asynchronous is done at once. So
arithmetic, addresses and masks are tested; layouts, barriers and overlap are not.
"""

import importlib.util
import sys
import types
from pathlib import Path

import triton
import triton.language as tl


class SharedMemory:
    """A tensor that can be stored to, or several."""

    def __init__(self, shape: list[int], dtype: tl.dtype) -> None:
        count = shape[0] if len(shape) > 2 else 0
        self.parts = [SharedMemory(shape[1:], dtype) for _ in range(count)]
        self.rows = [None] * shape[0]
        self.value = None

    def index(self, i):
        if self.parts:
            return self.parts[int(i)]
        return Row(self.rows, int(i))

    def store(self, value) -> None:
        self.value = value

    def load(self, layout=None):
        return self.value

    def permute(self, order):
        assert order == (1, 0)
        return Transposed(self)


class Row:
    """One row of shared memory with two dimensions."""

    def __init__(self, rows: list, i: int) -> None:
        self.rows, self.i = rows, i

    def store(self, value) -> None:
        self.rows[self.i] = value

    def load(self, layout=None):
        return self.rows[self.i]


class Transposed:
    def __init__(self, of: SharedMemory) -> None:
        self.of = of

    @property
    def value(self):
        return tl.trans(self.of.value)


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    a = a.value if hasattr(a, "store") else a
    return tl.dot(a, b.value, acc) if use_acc else tl.dot(a, b.value)


def copy(shared: SharedMemory, pointer, mask) -> None:
    shared.store(tl.load(pointer, mask=mask, other=0.0))


def full(shape, value, dtype, layout=None):
    return tl.full([int(n) for n in shape], value, dtype)


def late(name: str):
    """A function of Triton's, looked up when it is called: the interpreter replaces them."""
    return lambda *args, **options: getattr(tl, name)(*args, **options)


def nothing(*args, **options) -> None:
    pass


def load_kernel(path: Path, folder: Path, name: str = "partial_attention"):
    """The kernel ``name`` of a module of Gluon kernels, as an interpreted Triton function. A copy
    of the module is written to ``folder``: the interpreter knows compile-time arguments by name.
    """
    copied = folder / path.name
    copied.write_text(path.read_text().replace(": gl.constexpr", ": tl.constexpr"))
    gl = types.ModuleType("gl")
    for each in ("constexpr", "float32", "int32", "int64", "uint32"):
        setattr(gl, each, getattr(tl, each))
    for each in ("load", "store", "where", "maximum", "minimum", "max", "sum", "exp2", "log2",
                 "program_id", "multiple_of"):  # fmt: skip
        setattr(gl, each, late(each))
    gl.arange = lambda start, end, layout=None: tl.arange(start, end)
    gl.zeros = lambda shape, dtype, layout=None: full(shape, 0.0, dtype)
    gl.full = lambda shape, value, dtype, layout=None: tl.full(
        [int(n) for n in shape], value, dtype
    )
    gl.convert_layout = lambda x, layout: x
    gl.allocate_shared_memory = lambda dtype, shape, layout: SharedMemory(
        [int(n) for n in shape], dtype
    )
    for each in ("NVMMADistributedLayout", "NVMMASharedLayout", "BlockedLayout", "SliceLayout",
                 "SwizzledSharedLayout", "DotOperandLayout"):  # fmt: skip
        setattr(gl, each, nothing)
    copies = types.SimpleNamespace(
        async_copy_global_to_shared=copy, commit_group=nothing, wait_group=nothing
    )
    hopper = types.ModuleType("hopper")
    hopper.fence_async_shared = nothing
    hopper.warpgroup_mma = warpgroup_mma
    hopper.warpgroup_mma_wait = lambda outstanding, deps: deps[0]
    names = types.ModuleType("gluon_names")
    names.barrier = nothing
    gluon = types.ModuleType("gluon")
    gluon.language, gluon.jit = gl, triton.jit
    ampere = types.ModuleType("ampere")
    ampere.async_copy = copies
    outer = types.ModuleType("triton.experimental")
    outer.gluon = gluon
    prefix = "triton.experimental"
    stand_ins = {
        prefix: outer,
        f"{prefix}.gluon": gluon,
        f"{prefix}.gluon.language": gl,
        f"{prefix}.gluon.language.nvidia.ampere": ampere,
        f"{prefix}.gluon.language.nvidia.hopper": hopper,
        "vllm_prefixshare.kernels.hopper.gluon_names": names,
    }
    kept = {key: sys.modules.get(key) for key in stand_ins}
    interpret = triton.knobs.runtime.interpret
    try:
        sys.modules.update(stand_ins)
        triton.knobs.runtime.interpret = True
        spec = importlib.util.spec_from_file_location("interpreted_kernel", copied)
        module = importlib.util.module_from_spec(spec)
        module.tl = tl  # what the interpreter looks for
        spec.loader.exec_module(module)
    finally:
        triton.knobs.runtime.interpret = interpret
        for key, value in kept.items():
            sys.modules.pop(key) if value is None else sys.modules.update({key: value})
    return getattr(module, name)
