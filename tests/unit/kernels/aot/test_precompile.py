"""Code that is compiled ahead in another process is the code that an engine would compile."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from numba import njit

from tests.support.processes import run
from vllm_prefixshare.config import FP8, AttentionConfig
from vllm_prefixshare.kernels.aot import fill_caches as program
from vllm_prefixshare.kernels.cache_write import CacheWrite
from vllm_prefixshare.kernels.catalog import Gpu
from vllm_prefixshare.kernels.registry import Choice

LAYER = ["--num-qo-heads", "32", "--num-kv-heads", "8", "--head-dim", "128"]


def precompile(what: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    module = "vllm_prefixshare.kernels.aot.fill_caches"
    return run([sys.executable, "-m", module, what, *arguments], status=None, **environment)


def test_planning_is_compiled_once(tmp_path: Path):
    file = tmp_path / "folder" / "file.done"
    done = precompile(
        *("planning", "--capability", "9.0", "--done", str(file)),
        NUMBA_CACHE_DIR=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert file.is_file()
    compiled = {path.name for path in tmp_path.rglob("*.nbc")}
    assert {name.split(".")[0] for name in compiled} >= {"depth_first", "layout", "prefix_tree"}
    # other heads, as another engine on this machine may use
    other = ["--num-qo-heads", "16", "--num-kv-heads", "16", "--head-dim", "64"]
    done = precompile("planning", "--capability", "9.0", *other, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.rglob("*.nbc")} == compiled


def test_the_kernel_for_latents_is_compiled(tmp_path: Path):
    latent = ["--num-qo-heads", "16", "--num-kv-heads", "1", "--head-dim", "576"]
    latent += ["--kv-lora-rank", "512", "--block-size", "64"]
    file = tmp_path / "file.done"
    done = precompile("kernels", "--capability", "9.0", *latent, "--done", str(file))
    assert done.returncode == 0, done.stderr
    assert file.is_file() and "compiled kernel 'mla_hopper'" in done.stdout


def test_the_cache_write_is_compiled_with_a_kernel(monkeypatch):
    compiled = []
    chosen = Choice(SimpleNamespace(name="hopper"), None)
    monkeypatch.setattr(program, "stand_in", lambda capability: Gpu(capability, 132, 227 << 10))
    monkeypatch.setattr(program, "first_that_compiles", lambda *layer: chosen)
    monkeypatch.setattr(program, "compile_cache_write", compiled.append)
    assert program.main(["kernels", "--capability", "9.0", *LAYER]) == 0
    assert compiled == [AttentionConfig(32, 8, 128, 16)]


def test_a_quantised_cache_has_a_kernel_of_its_own_and_no_cache_write(monkeypatch):
    seen = []

    def first_that_compiles(attention, *_):
        seen.append(attention)
        return Choice(SimpleNamespace(name="hopper"), None)

    monkeypatch.setattr(program, "stand_in", lambda capability: Gpu(capability, 132, 227 << 10))
    monkeypatch.setattr(program, "first_that_compiles", first_that_compiles)
    monkeypatch.setattr(program, "compile_cache_write", seen.append)
    assert program.main(["kernels", "--capability", "9.0", *LAYER, "--kv-dtype", FP8]) == 0
    assert seen == [AttentionConfig(32, 8, 128, 16, kv_dtype=FP8, query_dtype=FP8)]


def test_planning_is_not_compiled_where_nobody_would_find_it(monkeypatch, capsys):
    monkeypatch.setattr(program, "longest_first", njit(lambda: 0))
    monkeypatch.setattr(program, "warm_up_planning", None)
    monkeypatch.setattr(program, "stand_in", lambda capability: Gpu(capability, 132, 227 << 10))
    assert program.main(["planning", "--capability", "9.0"]) == 2
    assert capsys.readouterr().err == "Numba has no folder for what it compiles\n"


def test_a_mark_that_cannot_be_made_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(program, "stand_in", lambda capability: Gpu(capability, 132, 227 << 10))
    monkeypatch.setattr(program, "warm_up_planning", lambda *_: None)
    assert program.main(["planning", "--capability", "9.0", "--done", "/dev/null/x"]) == 2
    assert "/dev/null" in capsys.readouterr().err


def test_an_engine_does_without_a_cache_write_that_cannot_be_compiled(monkeypatch, capsys):
    def fail(write, device):
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(CacheWrite, "write_nothing", fail)
    program.compile_cache_write(AttentionConfig(32, 8, 128, 16))
    assert "the cache write cannot be compiled by Triton" in capsys.readouterr().err


def test_wrong_arguments_are_refused(tmp_path: Path):
    file = tmp_path / "file.done"
    done = precompile("planning", "--capability", "7.5", *LAYER, "--done", str(file))
    assert done.returncode == 2
    assert not file.exists()
    assert "capability must be one of 8.0, 8.6" in done.stderr
