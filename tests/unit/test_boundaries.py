"""Lower folders never import upper ones, and the tests are laid out as the package."""

import ast
from pathlib import Path

import pytest

import vllm_prefixshare

PACKAGE = Path(vllm_prefixshare.__file__).parent

#: floor -> (floors that it may import, libraries beyond the standard one). A floor is a module or a
#: folder of the package; the longest matching name applies.
BASE = {"core", "config"}
JIT_COMMON = {"kernels.common.constants", "kernels.common.arrays"}
GLUON_COMMON = JIT_COMMON | {"kernels.common.gluon_names", "kernels.common.dependent_launch"}
JIT = GLUON_COMMON | {
    "kernels.hopper.arrays",
    "kernels.hopper.kernel",
    "kernels.hopper.metadata",
    "kernels.hopper.producer",
    "kernels.hopper.wide_values",
    "kernels.portable.kernel",
    "kernels.mla_hopper.kernel",
    "kernels.mla_hopper.producer",
    "kernels.mla_hopper.wide_values",
}
RUNS = (
    BASE
    | {
        "settings",
        "utils.trusted_files",
        "utils.numba_cache",
        "planning.forest",
        "planning.costs",
        "planning",
        "kernels",
    }
    | JIT
)
FLOORS = {
    "core": (set(), {"numpy"}),
    "utils.numba_cache": ({"core", "settings", "utils.trusted_files"}, {"numba", "llvmlite"}),
    "settings": ({"core"}, set()),
    "utils.trusted_files": (set(), set()),
    "utils.garbage": (set(), set()),
    "config": ({"core"}, set()),
    "planning.forest": ({"core", "utils.numba_cache"}, {"numpy"}),
    "planning.costs": (BASE | {"utils.trusted_files"}, {"numpy"}),
    "planning.costs.lookup": (
        BASE | {"settings", "utils.trusted_files", "planning.costs"},
        {"torch"},
    ),
    "planning": (BASE | {"utils.numba_cache", "planning.forest", "planning.costs"}, {"numpy"}),
    "kernels": (RUNS, {"numpy", "torch", "triton"}),
    "kernels.common.arrays": (set(), set()),
    "kernels.common.constants": ({"kernels.common.arrays"}, {"triton"}),
    "kernels.common.dependent_launch": (set(), {"triton"}),
    "kernels.common.gluon_names": (set(), {"triton"}),
    "kernels.hopper.arrays": (set(), set()),
    "kernels.hopper.kernel": (
        GLUON_COMMON
        | {"kernels.hopper.producer", "kernels.hopper.metadata", "kernels.hopper.wide_values"},
        {"triton"},
    ),
    "kernels.hopper.metadata": ({"kernels.hopper.producer"}, {"triton"}),
    "kernels.hopper.producer": (GLUON_COMMON | {"kernels.hopper.arrays"}, {"triton"}),
    "kernels.hopper.wide_values": (
        GLUON_COMMON | {"kernels.hopper.metadata", "kernels.hopper.producer"},
        {"triton"},
    ),
    "kernels.portable.kernel": (JIT_COMMON, {"triton"}),
    "kernels.mla_hopper.kernel": (
        GLUON_COMMON | {"kernels.mla_hopper.producer", "kernels.mla_hopper.wide_values"},
        {"triton"},
    ),
    "kernels.mla_hopper.producer": (GLUON_COMMON, {"triton"}),
    "kernels.mla_hopper.wide_values": (
        GLUON_COMMON | {"kernels.mla_hopper.producer"},
        {"triton"},
    ),
    "profiling": (RUNS | {"planning.costs.lookup"}, {"numpy", "torch"}),
    "profiling.gpu_timing": (set(), {"torch"}),
    "wrapper": (RUNS | {"planning.costs.lookup"}, {"numpy", "torch"}),
    "merging": ({"core", "kernels"}, {"torch"}),
    "distributed": (RUNS | {"wrapper", "merging"}, {"numpy", "torch"}),
    "vllm_plugin": (
        RUNS | {"utils.garbage", "planning.costs.lookup", "profiling"},
        {"numpy", "torch", "vllm", "packaging", "prometheus_client", "ray"}
        | {"cachetools", "msgspec", "tokenizers", "transformers"},  # vLLM requires them
    ),
    "cli": (
        RUNS
        | {"vllm_plugin", "__init__", "planning.costs.lookup", "profiling"}
        | {"profiling.gpu_timing"},
        {"numpy", "matplotlib", "packaging", "tokenizers", "torch", "transformers"},
    ),
    "__init__": ({"core", "wrapper", "merging", "vllm_plugin"}, set()),
}
OWN = "vllm_prefixshare"


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found |= {f"{OWN}.{a.name}" for a in node.names} if module == OWN else {module}
    return found


def floor_of(module: str) -> str:
    """The floor of ``module``, named without the package."""
    names = module.split(".")
    candidates = [".".join(names[:n]) for n in range(len(names), 0, -1)]
    return next((name for name in candidates if name in FLOORS), "__init__")


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_stay_on_their_floor(path):
    import sys

    floor = floor_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    own, libraries = FLOORS[floor]
    for name in imports_of(path):
        top, _, rest = name.partition(".")
        if top == OWN:
            assert floor_of(rest) in own | {floor}, f"{floor} must not import {name}"
        elif top not in sys.stdlib_module_names:
            assert top in libraries, f"{floor} must not import {name}"


TESTS = Path(__file__).parents[1]


def test_no_two_test_files_have_one_name():
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)


def test_unit_tests_mirror_the_folders_of_the_package():
    unit = TESTS / "unit"
    folders = {path.parent.relative_to(unit).as_posix() for path in unit.rglob("test_*.py")}
    there = {path.parent.relative_to(PACKAGE).as_posix() for path in MODULES}
    assert folders - there == {"benchmarks"}
