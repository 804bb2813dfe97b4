"""What is left of an engine when its parent is killed, and after Ctrl-C: no process and no file."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import openai
import psutil
import pytest

from tests.support.engine import DEFAULT_ENVIRONMENT
from tests.support.processes import alive, tree
from tests.support.serving import NAME, client_of, server_process

pytestmark = pytest.mark.engine

#: Starts an engine as the examples and the benchmarks do.
PARENT = """
import sys
from tests.support.engine import STOCK, EngineProcess
with EngineProcess(STOCK, sys.argv[1], max_model_len=256, enforce_eager=True, pause=True):
    pass
"""


def test_a_killed_parent_leaves_no_process(model):
    """Kill the parent while vLLM starts, as soon as an engine core exists."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(model)])
    found: list[psutil.Process] = []
    try:
        while not any("EngineCore" in " ".join(p.cmdline()) for p in found):
            assert parent.poll() is None, "the parent ended before it had an engine core"
            time.sleep(0.2)
            found = tree(parent.pid)
    finally:
        parent.kill()
        parent.wait()
    assert not left_of(found, seconds=60), "left behind"


def left_of(processes: Iterable[psutil.Process], seconds: float) -> list[psutil.Process]:
    """The processes that have not ended after so long, which are killed."""
    deadline = time.monotonic() + seconds
    while (left := [p for p in processes if alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        process.kill()
    return left


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files, whose path is short enough for the names of sockets."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def environment(temporary: Path) -> dict[str, str]:
    backend = {"VLLM_ATTENTION_BACKEND": "PREFIX_SHARE", "TMPDIR": str(temporary)}
    return {**os.environ, **DEFAULT_ENVIRONMENT, **backend}


def our_files(temporary: Path) -> list[str]:
    return [path.name for path in temporary.iterdir() if "prefixshare" in path.name]


def press_ctrl_c(pid: int) -> list[psutil.Process]:
    """Send SIGINT to a process and its descendants, as a terminal does. Returns them."""
    found = tree(pid)
    for process in found:
        process.send_signal(signal.SIGINT)
    return found


#: Runs until it is interrupted.
SCRIPT = """
import sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], max_model_len=2048, enforce_eager=True)
    prompts = ["The same words for all. " * 20 + str(i) for i in range(6)]
    print("ready", flush=True)
    while True:
        llm.generate(prompts, SamplingParams(max_tokens=1500, ignore_eos=True), use_tqdm=False)
"""


def test_ctrl_c_ends_a_script(model, temporary, environment):
    script = temporary / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(model)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line == "ready\n" for line in process.stdout), "the script ended before"
        time.sleep(2)  # requests are decoded
        assert our_files(temporary)
        found = press_ctrl_c(process.pid)
        assert not left_of(found, seconds=30), "left behind"
        assert process.wait() != 0
    assert not our_files(temporary)


def test_ctrl_c_ends_a_server_with_streams(model, temporary, environment):
    """Engine and worker end at once. vLLM's API server may wait for its clients, with any backend,
    so these leave before it is waited for.
    """
    arguments = ("--max-model-len", "2048", "--enforce-eager")
    with server_process(model, temporary / "log", environment, *arguments) as (url, process):
        client, begun, leave = client_of(url), threading.Semaphore(0), threading.Event()

        def ask(i: int) -> None:
            answer = client.completions.create(
                model=NAME, prompt="The same words for all. " * 20 + str(i), max_tokens=1500,
                stream=True, extra_body={"ignore_eos": True},
            )  # fmt: skip
            try:
                next(iter(answer))
                begun.release()
                leave.wait()
            except openai.APIError:
                pass
            finally:
                answer.close()

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        assert all(begun.acquire(timeout=120) for _ in threads)
        assert our_files(temporary)
        # Python's tracker of shared memory ends with its parent
        trackers = {p for p in tree(process.pid) if "resource_tracker" in " ".join(p.cmdline())}
        api_server, *others = press_ctrl_c(process.pid)
        try:
            assert not left_of(set(others) - trackers, seconds=30), "left behind"
        finally:
            leave.set()
            for thread in threads:
                thread.join()
        assert not left_of({api_server, *trackers}, seconds=120), "left behind"
    assert not our_files(temporary)
