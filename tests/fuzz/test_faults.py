"""Damaged files on the disk: each is refused in one sentence, or the package works without it."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from tests.support.faults import failing_at
from tests.support.native_executor import needs_native
from tests.support.paged_batches import paged_batch
from tests.support.planning_cases import (
    COSTS,
    LLAMA,
    document_qa,
    flashforge_table,
    gpu_config,
    quick,
)
from tests.support.processes import run, run_python
from vllm_prefixshare.config import AttentionConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.kernels.aot import compilation as compile_module
from vllm_prefixshare.kernels.aot.compilation import compile_launches
from vllm_prefixshare.kernels.catalog import Gpu
from vllm_prefixshare.kernels.cpu import native_executor
from vllm_prefixshare.kernels.interface import Capacity
from vllm_prefixshare.planning import planner as planner_module
from vllm_prefixshare.planning.costs import lookup
from vllm_prefixshare.planning.costs.roofline import AnalyticCost
from vllm_prefixshare.planning.costs.table import CostTable
from vllm_prefixshare.planning.dividers.registry import Divider
from vllm_prefixshare.planning.planner import PLANNING_FAILED, DecodePlanner
from vllm_prefixshare.settings import settings
from vllm_prefixshare.utils import numba_cache, trusted_files
from vllm_prefixshare.utils.numba_cache import one_process_at_a_time

# -- cost tables


@pytest.fixture(scope="module")
def good_table(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("table") / "table.json"
    flashforge_table().save(path)
    return path.read_text()


def load(path: Path, content: bytes | str) -> CostTable:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return CostTable.load(path, flashforge_table().fingerprint)


def assert_refused_or_usable(path: Path, content: bytes | str) -> None:
    """Assert that loading raises a sentence with the file and the remedy, or gives a table of
    finite prices.
    """
    refused = None
    try:
        table = load(path, content)
    except PrefixShareError as e:
        refused = str(e)
    if refused is not None:
        assert str(path) in refused and "measure one" in refused
        return
    rows, kv_len = np.array([1, 7, 128, 4096]), np.array([1, 100, 16384, 1 << 20])
    for price in (table.tile(rows, kv_len), table.unshared(rows, kv_len), table.merge(rows)):
        assert np.isfinite(price).all() and (price >= 0).all()


def test_a_table_cut_off_anywhere_is_refused(good_table, tmp_path):
    for end in range(0, len(good_table) - 1, 7):
        with pytest.raises(PrefixShareError, match="not a usable cost table"):
            load(tmp_path / "t.json", good_table[:end])


@quick(300)
@given(st.data())
def test_a_table_with_bytes_changed_is_refused_or_usable(good_table, tmp_path_factory, data):
    content = bytearray(good_table.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    assert_refused_or_usable(tmp_path_factory.mktemp("t") / "t.json", bytes(content))


ODD = st.sampled_from(
    [None, True, -1, 0, 1e308, -1e308, 10**400, float("nan"), float("inf"), float("-inf"), "", "7"]
) | st.sampled_from([[], {}, [[]], [1], {"rows": [1, 2]}, [[1, 2], [3]], [[[1]]]])


@quick(400)
@given(st.data(), ODD)
def test_a_table_with_a_value_replaced_is_refused_or_usable(
    good_table, tmp_path_factory, data, odd
):
    tree = node = json.loads(good_table)
    while True:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else
                                        range(len(node))))  # fmt: skip
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = odd
    assert_refused_or_usable(tmp_path_factory.mktemp("t") / "t.json", json.dumps(tree))


def test_a_table_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / "t.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(PrefixShareError, match="larger than the 1 MiB that are read"):
        CostTable.load(tmp_path / "t.json")


@pytest.mark.parametrize("prices", [1e-300, 1e300])
def test_absurd_prices_do_not_hang_the_planner(good_table, tmp_path, prices):
    """Runs in a separate process, because compiled loops cannot be interrupted."""
    data = json.loads(good_table)
    us = np.array(data["tile"]["microseconds"])
    rng = np.random.default_rng(0)
    data["tile"]["microseconds"] = np.where(rng.random(us.shape) < 0.5, us, prices).tolist()
    (tmp_path / "t.json").write_text(json.dumps(data))
    code = """
import sys
from pathlib import Path
from tests.support.planning_cases import document_qa, make_planner
from vllm_prefixshare.planning.costs.table import CostTable
from vllm_prefixshare.planning import invariants
from vllm_prefixshare.planning.planner import PLANNING_FAILED
from vllm_prefixshare.core import PrefixShareError
try:
    table = CostTable.load(Path(sys.argv[1]))
except PrefixShareError:
    sys.exit()
batch = document_qa(3, 9, document_blocks=40, tail=30)
for divider in ("depth_first", "flashforge"):
    planner = make_planner(16, table, divider=divider, num_workers=16, max_tile_requests=8,
                           max_tile_runs=16, share="auto")
    plan = planner.update(batch.block_table, batch.seq_lens).plan
    invariants.check(plan, batch.block_table, batch.seq_lens)
    assert not planner.counters.fallbacks[PLANNING_FAILED]
"""
    run_python(code, tmp_path / "t.json")


# -- the cache folder


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("VLLM_PREFIXSHARE_CACHE", str(folder))
    monkeypatch.delenv("VLLM_PREFIXSHARE_COST_TABLE", raising=False)
    return folder


#: no file system takes it
LONG_NAME = f"/tmp/{300 * 'a'}"


def lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no file of ``folder`` be looked up: root can search every real folder."""
    stat = os.stat

    def refused(path: object, *args: object, **kwargs: object) -> os.stat_result:
        if str(path).startswith(f"{folder}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refused)


STATES = ["missing", "a file", "a broken link", "a folder as the table", "locked", "a long name"]


@pytest.mark.parametrize("state", STATES)
def test_without_a_readable_cache_the_estimate_is_used(cache, state, monkeypatch):
    if state == "locked":
        lock(cache, monkeypatch)
        with pytest.raises(PermissionError):
            (cache / "file").stat()
    elif state == "a long name":
        monkeypatch.setenv("VLLM_PREFIXSHARE_CACHE", LONG_NAME)
    elif state == "a file":
        cache.write_text("in the way")
    elif state == "a broken link":
        cache.symlink_to(cache / "nowhere")
    elif state == "a folder as the table":
        (lookup.cache_folder() / lookup.fingerprint(LLAMA, "torch").file_name()).mkdir(parents=True)
    lines: list[str] = []
    assert isinstance(lookup.cost_model(LLAMA, "torch", lines.append), AnalyticCost)
    assert len(lines) == 1 and "Measure one" in lines[0]


def test_a_damaged_table_in_the_cache_is_refused_with_its_name(cache):
    path = lookup.cache_folder() / lookup.fingerprint(LLAMA, "torch").file_name()
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(PrefixShareError, match=path.name):
        lookup.cost_model(LLAMA, "torch")


#: a folder of root, in which root can make no file either
UNWRITABLE = Path("/proc")


def test_a_table_is_not_written_where_that_is_impossible(cache):
    cache.write_text("in the way")
    for folder in (cache / "tables", UNWRITABLE):
        with pytest.raises(PrefixShareError, match="cannot be written"):
            flashforge_table().save(folder / "t.json")
    assert cache.read_text() == "in the way"


def test_a_full_disk_leaves_the_old_table_and_nothing_half_written(cache):
    path = cache / "t.json"
    flashforge_table().save(path)
    before = path.read_text()
    code = """
import resource, signal, sys
from pathlib import Path
from tests.support.planning_cases import flashforge_table
from vllm_prefixshare.core import PrefixShareError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    flashforge_table().save(Path(sys.argv[1]))
except PrefixShareError as e:
    sys.exit(0 if "cannot be written" in str(e) else 1)
sys.exit(2)
"""
    run_python(code, path)
    assert path.read_text() == before
    assert os.listdir(cache) == ["t.json"]


def test_a_link_in_the_place_of_the_draft_of_a_table_is_not_followed(cache):
    target = cache.parent / "somebody's file"
    target.write_text("precious")
    cache.mkdir()
    draft = cache / f".t.json.{os.getpid()}.tmp"
    draft.symlink_to(target)
    flashforge_table().save(cache / "t.json")
    assert target.read_text() == "precious"
    assert os.listdir(cache) == ["t.json"] and not (cache / "t.json").is_symlink()


def give_away(path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the file or folder such that other users can change it."""
    if fault == "anybody may write":
        path.chmod(0o777)
    elif os.getuid() == 0:  # root's own files are always trusted: give this file to another user
        os.chown(path, 65534, 65534)
    else:
        monkeypatch.setattr(trusted_files.os, "getuid", lambda: path.stat().st_uid + 1)


BY_OTHERS = pytest.mark.parametrize("fault", ["anybody may write", "another user"])


@BY_OTHERS
@pytest.mark.parametrize("what", ["folder", "table"])
def test_a_table_that_others_can_change_is_not_read(cache, monkeypatch, what, fault):
    path = lookup.cache_folder() / lookup.fingerprint(LLAMA, "torch").file_name()
    table = flashforge_table()
    replace(table, fingerprint=lookup.fingerprint(LLAMA, "torch")).save(path)
    assert isinstance(lookup.cost_model(LLAMA, "torch"), CostTable)
    give_away(path if what == "table" else path.parent, fault, monkeypatch)
    lines: list[str] = []
    assert isinstance(lookup.cost_model(LLAMA, "torch", lines.append), AnalyticCost)
    assert "belongs to another user, or anybody may write" in lines[0]


@pytest.mark.parametrize(
    "why",
    ["a file is in the way", "the disk is full", "nobody can write", "locked", "a long name"],
)
def test_native_code_that_cannot_be_kept_is_done_without(cache, monkeypatch, why):
    (cache if why == "a file is in the way" else cache.parent / "elsewhere").write_text("here")
    if why == "locked":
        lock(cache, monkeypatch)
    elif why == "a long name":
        monkeypatch.setenv("VLLM_PREFIXSHARE_CACHE", LONG_NAME)
    elif why == "nobody can write":
        monkeypatch.setenv("VLLM_PREFIXSHARE_CACHE", str(UNWRITABLE))
    (cache.parent / "cpuinfo").write_text("flags : avx512f avx512bw\n")
    real = native_executor.Path
    monkeypatch.setattr(
        native_executor,
        "Path",
        lambda *a: real(cache.parent / "cpuinfo") if a == (CPUINFO,) else real(*a),
    )
    if why == "the disk is full":

        def full(command, **kwargs):
            raise subprocess.CalledProcessError(1, command, stderr="No space left on device")

        monkeypatch.setattr(native_executor.subprocess, "run", full)
    native_executor._find_library.cache_clear()
    with pytest.raises(native_executor.NativeUnavailableError, match="cannot be built or loaded"):
        native_executor.load_library("bfloat16")
    assert not list(cache.glob("*")), "nothing half written"
    native_executor._find_library.cache_clear()


CPUINFO = "/proc/cpuinfo"


@needs_native
@BY_OTHERS
@pytest.mark.parametrize("what", ["folder", "library"])
def test_code_that_others_can_change_is_not_loaded(cache, monkeypatch, what, fault):
    native_executor._find_library.cache_clear()
    native_executor.load_library("bfloat16")
    give_away(cache if what == "folder" else next(cache.glob("*.so")), fault, monkeypatch)
    native_executor._find_library.cache_clear()
    with pytest.raises(
        native_executor.NativeUnavailableError, match="belongs to another user, or anybody"
    ):
        native_executor.load_library("bfloat16")
    monkeypatch.undo()
    native_executor._find_library.cache_clear()


# -- binaries of GPU kernels


class KernelThatCompiles:
    """Notes the folder in which Triton would look for each binary. fails: with what, at first."""

    name, starts_merging = "noted", False

    def __init__(self, fails: OSError | None = None) -> None:
        self.fails, self.folders = fails, []

    def capacity(self, num_reqs: int) -> Capacity:
        return Capacity(1, 1, 1, {})

    def launch(self, *_: object) -> None:
        self.folders.append(triton.knobs.cache.dir)
        if self.fails is not None:
            fails, self.fails = self.fails, None
            raise fails


def folders_of_binaries(monkeypatch: pytest.MonkeyPatch, fails: OSError | None = None) -> list[str]:
    monkeypatch.setattr(compile_module, "merge_states", lambda *_, **__: None)
    settings.cache_clear()
    kernel, gpu = KernelThatCompiles(fails), Gpu((9, 0), 132, 227 << 10)
    compile_launches(kernel, AttentionConfig(32, 8, 128, 16), 1, gpu)
    settings.cache_clear()
    return kernel.folders


TRITONS = triton.knobs.cache.dir


def test_binaries_are_kept_in_the_cache_folder(cache, monkeypatch):
    assert folders_of_binaries(monkeypatch) == [str(cache / "compiled")]
    assert triton.knobs.cache.dir == TRITONS


@BY_OTHERS
@pytest.mark.parametrize("what", ["cache", "compiled"])
def test_binaries_that_others_can_change_are_not_loaded(cache, monkeypatch, what, fault):
    (cache / "compiled").mkdir(parents=True)
    give_away(cache if what == "cache" else cache / "compiled", fault, monkeypatch)
    assert folders_of_binaries(monkeypatch) == [TRITONS]


def test_binaries_that_cannot_be_kept_are_done_without(cache, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    assert folders_of_binaries(monkeypatch, full) == [str(cache / "compiled"), TRITONS]
    shutil.rmtree(cache)
    cache.write_text("in the way")
    assert folders_of_binaries(monkeypatch) == [TRITONS]
    assert cache.read_text() == "in the way"
    for folder in (str(UNWRITABLE), LONG_NAME):
        monkeypatch.setenv("VLLM_PREFIXSHARE_CACHE", folder)
        assert folders_of_binaries(monkeypatch) == [TRITONS]


# -- Numba's cache of compiled code

CODE = """
from vllm_prefixshare.utils.numba_cache import compiled
@compiled
def double(x):
    return 2 * x
"""
CALLS = """
import logging, resource, signal, sys
logging.basicConfig(level="INFO")
sys.path.insert(0, sys.argv[1])
from code_under_test import double
if "full" in sys.argv:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
assert double(21) == 42
"""


def test_compiled_code_does_without_a_cache_that_is_full_or_damaged(tmp_path):
    (tmp_path / "code_under_test.py").write_text(CODE)
    cache = tmp_path / "cache"

    def call(*arguments: str) -> list[Path]:
        run_python(CALLS, tmp_path, *arguments, timeout=600, NUMBA_CACHE_DIR=str(cache))
        return [path for path in cache.rglob("*.nb?") if path.stat().st_size]

    assert call("full") == []
    files = call()
    assert {path.suffix for path in files} == {".nbi", ".nbc"}
    for spoil in (lambda content: content[: len(content) // 2], lambda content: b"\xff" * 99):
        for path in files:
            content = path.read_bytes()
            path.write_bytes(spoil(content))
            call()
            path.write_bytes(content)


def test_compiled_code_is_kept_in_the_cache_folder(tmp_path, monkeypatch):
    """Next to the source an uninstall would leave it. The program says that it compiles."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "code_under_test.py").write_text(CODE)
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    cache = str(tmp_path / "cache")
    for is_first in (True, False):
        done = run_python(CALLS, source, timeout=600, VLLM_PREFIXSHARE_CACHE=cache)
        assert ("Planning is compiled for this machine, once" in done.stderr) == is_first
    assert len([*(tmp_path / "cache" / "numba").rglob("*.nbc")]) == 1
    assert [path.name for path in source.iterdir()] == ["code_under_test.py"]


SAVES_SLOWLY = """
import sys, time
from pathlib import Path
from numba.core.caching import IndexDataCacheFile
save = IndexDataCacheFile._save_data
def save_slowly(*args):
    Path(sys.argv[1], "index is written").touch()
    while not Path(sys.argv[1], "reader calls").exists():
        time.sleep(0.01)
    time.sleep(1)
    save(*args)
IndexDataCacheFile._save_data = save_slowly
"""
READS_AT_ONCE = """
from pathlib import Path
from numba import njit
njit(lambda x: x)(1)  # the first call takes long
Path(sys.argv[1], "reader calls").touch()
"""


def test_compiled_code_of_another_version_is_not_called(tmp_path):
    """Numba writes its index before the code, while code of the last version has that name."""
    source = tmp_path / "code_under_test.py"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def start(program: str) -> subprocess.Popen:
        command = [sys.executable, "-B", "-c", program, str(tmp_path)]
        return subprocess.Popen(command, env=environment)

    source.write_text(CODE)
    assert start(CALLS).wait(600) == 0
    source.write_text(CODE.replace("2 * x", "3 * x"))  # the same bytecode
    os.utime(source, (1, 1))
    calls = CALLS.replace("== 42", "== 63")
    writer = start(SAVES_SLOWLY + calls)
    while not (tmp_path / "index is written").exists():
        assert writer.poll() is None
        time.sleep(0.01)
    assert start(calls.replace("assert", READS_AT_ONCE + "assert")).wait(600) == 0
    assert writer.wait(600) == 0


# -- the lock under which functions are compiled


def is_held(folder: Path) -> bool:
    code = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), 6)"  # at once or not at all
    result = run([sys.executable, "-c", code, folder], status=None, timeout=60)
    assert result.returncode == 0 or "BlockingIOError" in result.stderr
    return result.returncode != 0


def test_the_lock_keeps_others_out_and_is_left_for_the_next(cache):
    with one_process_at_a_time():
        assert is_held(cache)
    assert not is_held(cache)
    with pytest.raises(ZeroDivisionError), one_process_at_a_time():
        raise ZeroDivisionError
    assert not is_held(cache)
    assert not list(cache.iterdir())


@pytest.mark.parametrize("why", ["a file", "nobody can write", "no locks", "held for long"])
def test_without_the_lock_functions_are_compiled_all_the_same(cache, monkeypatch, why):
    if why == "a file":
        cache.write_text("in the way")
    elif why == "nobody can write":
        monkeypatch.setenv("VLLM_PREFIXSHARE_CACHE", str(UNWRITABLE))
    else:
        error = OSError(errno.ENOLCK, "No locks") if why == "no locks" else BlockingIOError
        times = iter(range(0, 1000, 7))  # seven seconds between any two looks at the clock
        monkeypatch.setattr(
            numba_cache, "time", SimpleNamespace(monotonic=times.__next__, sleep=lambda _: None)
        )
        monkeypatch.setattr(numba_cache.fcntl, "flock", Mock(side_effect=error))
    compiles = []
    with one_process_at_a_time():
        compiles.append(True)
    assert compiles
    with pytest.raises(ZeroDivisionError), one_process_at_a_time():
        raise ZeroDivisionError


# -- the planner itself


@pytest.mark.parametrize("place", ["shareable_forest", "build_plan", "the divider", "remember"])
@pytest.mark.parametrize("divider", ["depth_first", "flashforge"])
def test_a_planning_failure_costs_one_step_its_sharing(place, divider, monkeypatch):
    batch = document_qa(2, 4, document_blocks=8, tail=3)
    told: list[str] = []
    config = gpu_config(divider=divider, share="always", num_workers=4)
    planner = DecodePlanner(config, COSTS["h200"], 16, 4, on_failure=told.append)
    owner, name = {
        "the divider": (planner, "divider"),
        "remember": (planner_module.CachedPlan, "remember"),
    }.get(place, (planner_module, place))
    second = 3 if place == "build_plan" else 2  # a failure builds one
    fault = IndexError("planted")
    if place == "the divider":
        divide = failing_at(planner.divider.divide, 1, second, error=fault)
        planted = replace(planner.divider, divide=divide)
    else:
        planted = failing_at(getattr(owner, name), 1, second, error=fault)
    monkeypatch.setattr(owner, name, planted)
    everything = batch.seq_lens.sum()
    for failures in (1, 2):
        plan = planner.update(batch.block_table, batch.seq_lens).plan
        assert plan.kv_tokens_read(batch.seq_lens) == everything
        assert plan.num_tiles == len(batch.seq_lens)
        assert planner.counters.fallbacks[PLANNING_FAILED] == failures
        assert not planner.holds(batch.block_table, batch.seq_lens)
    plan = planner.update(batch.block_table, batch.seq_lens).plan
    assert plan.kv_tokens_read(batch.seq_lens) < everything
    assert planner.update(batch.block_table, batch.seq_lens).plan is plan
    assert planner.counters.fallbacks[PLANNING_FAILED] == 2
    assert len(told) == 1 and "IndexError: planted" in told[0]


def test_a_launch_that_fails_reaches_the_caller_and_spoils_no_later_one(monkeypatch):
    """The failure reaches the caller as CUDA's errors do: attention has no result without the
    launch.
    """
    batch = paged_batch(requests=4)
    wrapper = batch.wrapper(num_workers=2)
    executor = wrapper._executor
    fails_once = failing_at(executor.run, 2, error=RuntimeError("CUDA error: planted"))
    monkeypatch.setattr(executor, "run", fails_once)
    expected = batch.run(wrapper)
    plan = wrapper.last_plan
    with pytest.raises(RuntimeError, match="planted"):
        batch.run(wrapper)
    assert torch.equal(batch.run(wrapper), expected)
    assert wrapper.last_plan is plan


def test_a_failure_is_logged_where_nobody_asked_to_be_told(caplog):
    planner = DecodePlanner(gpu_config(), COSTS["h200"], 16, 4)
    planner.divider = None
    planner.update(np.ones((1, 1), np.int32), np.ones(1, np.int32))
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "please report it" in caplog.text


def test_a_users_mistake_is_not_a_failure_of_the_planner():
    planner = DecodePlanner(gpu_config(), COSTS["h200"], 16, 4)

    def refuses(problem):
        raise PrefixShareError("name the remedy.")

    planner.divider = Divider(refuses)
    with pytest.raises(PrefixShareError, match="remedy"):
        planner.update(np.ones((1, 1), np.int32), np.ones(1, np.int32))
    assert planner.counters.fallbacks[PLANNING_FAILED] == 0


def test_a_lock_is_released_although_a_forked_child_lives(tmp_path):
    with numba_cache._locked(str(tmp_path), fcntl.LOCK_EX):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
    try:
        with numba_cache._locked(str(tmp_path), fcntl.LOCK_EX, patience=0.0):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
