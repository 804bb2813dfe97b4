"""What the package must not do, checked in its source."""

import ast
from pathlib import Path

import pytest

import vllm_prefixshare

PACKAGE = Path(vllm_prefixshare.__file__).parent
SOURCES = {
    str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
}

#: Modules and calls that can turn data into code.
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "np.load", "numpy.load", "os.system",
    "os.popen", "runpy.run_path", "runpy.run_module", "torch.hub.load",
}  # fmt: skip

#: Calls that write, delete or rename. A method is matched by name on any object.
WRITING = {
    "write_text", "write_bytes", "mkdir", "makedirs", "touch", "unlink", "os.remove", "rmdir",
    "rmtree", "rename", "symlink", "link", "chmod", "chown", "truncate", "ftruncate", "copy2",
    "copyfile", "copymode", "copytree", "move", "os.open", "os.replace", "TemporaryDirectory",
    "TemporaryFile", "mkstemp", "mkdtemp", "NamedTemporaryFile", "MmapedDict", "torch.save",
    "np.save", "json.dump", "extractall", "symlink_to", "hardlink_to", "mkfifo", "mknod", "savez",
    "tofile", "memmap", "mmap.mmap", "FileHandler",
}  # fmt: skip
#: Every module that writes: the calls, and a comment on where it writes.
WRITERS = {
    # a lock on the cache folder, and on that of Numba's cache; neither is a file
    "utils/numba_cache.py": {"os.open", "mkdir", "makedirs"},
    # a file beside the one that a caller names, and in its place; the cache folder
    "utils/trusted_files.py": {"open for writing", "replace", "unlink", "mkdir"},
    # the cache folder
    "kernels/cpu/native_executor.py": {"mkdir", "TemporaryDirectory", "os.replace"},
    "kernels/aot/fill_caches.py": {"mkdir", "touch"},
    # the cache folder, or the file that --out names
    "planning/costs/table.py": {"mkdir"},
    # the file that VLLM_PREFIXSHARE_TRACE names
    "vllm_plugin/observability/tracing.py": {"os.open", "ftruncate"},
    # the null device
    "cli/main.py": {"os.open"},
    # the file that --svg names
    "cli/inspect_plans.py": {"write_bytes"},
    # the folder that VLLM_PREFIXSHARE_METRICS names, or a temporary one
    "vllm_plugin/observability/metrics.py": {"mkdir", "TemporaryDirectory", "TemporaryFile"},
    "vllm_plugin/observability/metric_files.py": {"os.open", "rename", "unlink"},
}  # fmt: skip


def called(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    """Every call: ``name`` or ``module.name`` of the called function, or the name of a method."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                found.append((node.func.id, node))
            elif isinstance(node.func, ast.Attribute):
                found.append((ast.unparse(node.func), node))
    return found


def imported(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def writes(name: str, call: ast.Call) -> str | None:
    """The name of a call in ``WRITING``, or None if it only reads."""
    last = name.rpartition(".")[2]
    if last == "open" and name != "os.open":
        arguments = [*call.args, *(k.value for k in call.keywords)]
        modes = [a.value for a in arguments if isinstance(a, ast.Constant)]
        return "open for writing" if any(set(str(mode)) & set("wax+") for mode in modes) else None
    if last == "replace" and len(call.args) == 1 and not call.keywords:
        return last  # of a path: that of a string has two arguments, that of a record has keywords
    return next((known for known in (name, last) if known in WRITING), None)


@pytest.mark.parametrize("name", SOURCES)
def test_no_data_becomes_code(name):
    tree = SOURCES[name]
    assert not imported(tree) & MODULES
    for function, call in called(tree):
        assert function not in CALLS, f"line {call.lineno}: {function}"
        shell = [k for k in call.keywords if k.arg == "shell"]
        assert not shell, f"line {call.lineno}: a command for a shell"


def test_only_known_modules_write():
    found = {
        name: {what for call in called(tree) if (what := writes(*call)) is not None}
        for name, tree in SOURCES.items()
    }
    assert {name: calls for name, calls in found.items() if calls} == WRITERS
