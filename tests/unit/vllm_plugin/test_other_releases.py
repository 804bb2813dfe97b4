"""The same tests against the released files of other vLLM versions. Their CUDA build cannot run
here: its modules import, the hooks find their targets, the backend works on its metadata.
"""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.processes import run
from tests.support.vllm_releases import ALL, CHOSEN, USUAL, python_files
from vllm_prefixshare.settings import settings

ROOT = Path(__file__).parents[3]
FILES = {path.name: path for path in Path(__file__).parent.rglob("test_*.py")}
#: What runs on each of them.
TESTS = (
    "test_context_parallel.py",
    "test_composite_backend.py",
    "test_cuda_backend.py",
    "test_layers_of_families.py",
    "test_hook_targets.py",
    "test_hooks.py",
    "test_host_tables.py",
    "test_invariance.py",
    "test_metrics.py",
    "test_mla_backend.py",
    "test_mla_fp8_backend.py",
    "test_order.py",
    "test_external_prefixes.py",
    "test_background_compilation.py",
    "test_backend_choices.py",
    "test_nixl.py",
)
#: What also runs on each of them, of the tests of prompts.
PROMPT_TESTS = (
    "test_beams.py",
    "test_block_hashes.py",
    "test_block_lookup.py",
    "test_detokenization.py",
)
#: Of TESTS, what `make test` runs with the installed release only.
SELDOM = ("test_context_parallel.py", "test_background_compilation.py")
#: The other files: they need nothing of vLLM's, or its one release for CPUs.
OTHERS = (
    "test_cpu_backend.py",
    "test_other_releases.py",
    "test_step_planner.py",
    "test_ray_metrics.py",
)


def test_every_file_runs_on_each_release():
    others = {name for name, path in FILES.items() if path.parent.name != "prompts"}
    assert others == {*TESTS, *OTHERS}
    (paragraph,) = re.findall(
        r"^\*\*Hook tests\.\*\*.*", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    assert all(version in paragraph for version in USUAL)


@pytest.mark.parametrize("version", CHOSEN)
def test_the_backend_on_another_release(version):
    path = os.pathsep.join([str(python_files(version)), str(ROOT)])
    names = [name for name in TESTS if ALL or name not in SELDOM]
    files = [str(FILES[name]) for name in (*names, *PROMPT_TESTS)]
    environment = {
        "PYTHONPATH": path,
        "PREFIXSHARE_EXPECT_VLLM": version,
        # vLLM keeps what it knows of a model's class for one release only
        "VLLM_CACHE_ROOT": str(settings().cache / "vllm-caches" / version),
    }
    command = [sys.executable, "-m", "pytest", "-q", *files]
    done = run(command, cwd=ROOT, timeout=7200, **environment)
    assert " passed" in done.stdout
