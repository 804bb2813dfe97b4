"""Who may import whom: lower floors never import upper ones."""

import ast
from pathlib import Path

import pytest

import vllm_prefixshare

PACKAGE = Path(vllm_prefixshare.__file__).parent

#: floor -> (own floors it may import, libraries it may import beyond the standard one)
FLOORS = {
    "types": (set(), {"numpy"}),
    "envs": ({"types"}, set()),
    "config": ({"types"}, set()),
    "planning": ({"types", "config"}, {"numpy", "numba"}),
    "kernels": ({"types", "config"}, {"torch", "triton"}),
    "executors": ({"types", "config", "envs", "planning", "kernels"}, {"numpy", "torch"}),
    "profiling": (
        {"types", "config", "envs", "planning", "kernels", "executors"},
        {"numpy", "torch"},
    ),
    "wrapper": ({"types", "config", "planning", "executors", "profiling"}, {"numpy", "torch"}),
    "integration": (
        {"types", "config", "envs", "planning", "executors", "profiling"},
        {"numpy", "torch", "vllm", "packaging"},
    ),
    "testing": (
        {"types", "config", "envs", "planning", "executors"},
        {"numpy", "torch", "transformers", "tokenizers", "safetensors", "vllm"},
    ),
    "cli": (
        {
            "executors",
            "types",
            "config",
            "envs",
            "planning",
            "profiling",
            "integration",
            "testing",
            "__init__",
        },
        set(),
    ),
    "__init__": ({"types", "wrapper"}, set()),
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


def floor_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_stay_on_their_floor(path):
    import sys

    floor = floor_of(path)
    own, libraries = FLOORS[floor]
    for name in imports_of(path):
        top, _, rest = name.partition(".")
        if top == OWN:
            first = rest.partition(".")[0]
            target = first if first in FLOORS else "__init__"
            assert target in own | {floor}, f"{floor} must not import {name}"
        elif top not in sys.stdlib_module_names:
            assert top in libraries, f"{floor} must not import {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_can_be_read_in_one_go(path):
    assert len(path.read_text().splitlines()) <= 420
