"""Apply the patches for forks to an installed vLLM or a checkout, or revert them."""

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import vllm_prefixshare
from vllm_prefixshare.core import PrefixShareError

EXAMPLE = """\
In a checkout of vLLM's tag v0.29.0, so that the plugin installs no hooks there:

    vllm-prefixshare patch apply --checkout ~/vllm
    vllm-prefixshare patch revert --checkout ~/vllm

Without --checkout it is the vLLM that this interpreter would import. The plugin works without the
patches. A vLLM that cannot be patched stays unchanged, and the exit status is 2."""

#: Folder that keeps the files being replaced; a killed process leaves it behind.
JOURNAL = ".prefix_share_patch"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    command.add_argument("action", choices=("apply", "revert", "status"), help="what to do")
    command.add_argument("--checkout", type=Path, metavar="DIR", help="a checkout of vLLM")


def run(args: argparse.Namespace) -> int:
    """Change or look at the tree; the exit status is 0."""
    tree = find_tree(args.checkout)
    with tree.locked(), _termination_raises():
        repaired = tree.undo_interrupted()
        state = tree.state()
        if args.action == "apply":
            tree.apply(state)
            state = "patched"
        elif args.action == "revert":
            tree.revert(state)
            state = "released"
    if args.json:
        report = {
            "root": str(tree.root),
            "release": tree.release,
            "state": state,
            "patches": [path.stem for path in tree.series],
            "undid_interrupted": repaired,
        }
        print(json.dumps(report, indent=1))
    else:
        if repaired:
            print("a change that was interrupted has been undone")
        print(f"vLLM {tree.release} in {tree.root}: {STATES[state]} ({len(tree.series)} patches)")
    return 0


STATES = {
    "released": "not patched",
    "patched": "patched",
    "changed": "neither as released nor with the whole series",
}


def patches_folder() -> Path:
    """The folder of the patches: in the package in a wheel, next to it in a checkout."""
    package = Path(vllm_prefixshare.__file__).parent
    inside = package / "patches"
    return inside if inside.is_dir() else package.parent / "patches"


def find_tree(checkout: Path | None) -> "Tree":
    """The vLLM to patch, which is not imported.

    Raises:
        PrefixShareError: there is none, its release is unknown or has no series.
    """
    if checkout is not None:
        # the functions of pathlib raise for an unknown user and for what cannot be looked up
        root = Path(os.path.realpath(os.path.expanduser(checkout)))
    else:
        spec = find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            raise PrefixShareError("vLLM is not installed here: name a checkout with --checkout.")
        root = Path(next(iter(spec.submodule_search_locations))).parent
    if not os.path.isfile(root / "vllm" / "__init__.py"):
        raise PrefixShareError(f"{root} holds no package vllm: name a checkout of vLLM.")
    release = _release(root)
    known = sorted(p.name for p in patches_folder().iterdir() if p.is_dir())
    if release not in known:
        raise PrefixShareError(
            f"there are no patches for vLLM {release or 'of an unknown release'} in {root}: use "
            f"{', '.join(known)}."
        )
    return Tree(root, release, sorted((patches_folder() / release).glob("*.patch")))


def _release(root: Path) -> str:
    """Release by a checkout's last tag, or by the file that vLLM's build writes; "" if unknown."""
    if (root / ".git").exists():
        tag = _git(root, "describe", "--tags", "--abbrev=0", "--match=v[0-9]*")
        if tag.returncode == 0:
            return tag.stdout.strip().removeprefix("v")
    try:
        text = (root / "vllm" / "_version.py").read_text()
    except (OSError, UnicodeDecodeError):
        return ""
    found = re.search(r"^__version__\s*=.*['\"]([\w.]+)[\w.+]*['\"]$", text, re.MULTILINE)
    return found.group(1) if found else ""


@dataclass(frozen=True)
class Tree:
    """Files of vLLM and the patches for them.

    root: the folder that holds the package ``vllm``.
    """

    root: Path
    release: str
    series: list[Path]

    @property
    def files(self) -> list[str]:
        """Files that the series changes, relative to ``root``."""
        text = "".join(path.read_text() for path in self.series)
        return sorted(set(re.findall(r"^diff --git a/(\S+) b/\1$", text, re.MULTILINE)))

    @property
    def journal(self) -> Path:
        """The folder that holds what undoing an interrupted change needs."""
        return self.root / "vllm" / JOURNAL

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the tree: only one process changes it at a time."""
        with (self.root / "vllm" / "__init__.py").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise PrefixShareError(
                    f"another process is patching {self.root}: wait until it has ended."
                ) from None
            yield

    def state(self) -> str:
        """A key of ``STATES``."""
        if self.result(revert=True) is not None:
            return "patched"
        return "released" if self.result(revert=False) is not None else "changed"

    def apply(self, state: str) -> None:
        """Raises:
        PrefixShareError: it is patched already, was changed, or cannot be written.
        """
        if state == "patched":
            raise PrefixShareError(f"vLLM in {self.root} is patched already.")
        if changed := self.changed_file():
            raise PrefixShareError(
                f"{self.root / changed} has been changed: patch vLLM {self.release} as released, "
                "or commit what you changed."
            )
        self._replace_files(revert=False)

    def revert(self, state: str) -> None:
        """Raises:
        PrefixShareError: it is not patched, was changed since, or cannot be written.
        """
        if state == "released":
            raise PrefixShareError(f"vLLM in {self.root} is not patched.")
        self._replace_files(revert=True)

    def changed_file(self) -> str:
        """A file that differs from its committed or installed state; "" if there is none."""
        if (self.root / ".git").exists():
            done = _git(self.root, "status", "--porcelain", "--untracked-files=no")
            if done.returncode != 0:
                raise PrefixShareError(f"git cannot read {self.root}: {done.stderr.strip()}.")
            return done.stdout[3:].partition("\n")[0]
        ours = set(self.files)
        for distribution in distributions(path=[str(self.root)]):
            if not (distribution.name or "").startswith("vllm"):
                continue
            for file in distribution.files or ():
                if str(file) in ours and file.hash is not None and file.hash.mode == "sha256":
                    digest = sha256((self.root / file).read_bytes()).digest()
                    if urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                        return str(file)
        return ""

    def result(self, revert: bool) -> dict[str, bytes] | None:
        """Contents of the files with the series applied, or reverted; None if it does not fit."""
        with tempfile.TemporaryDirectory() as scratch:
            for name in self.files:
                if not (self.root / name).is_file():
                    return None
                copy = Path(scratch, name)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.root / name, copy)
            patches = [*map(str, self.series)]
            if revert:
                patches = ["--reverse", *reversed(patches)]
            if _git(Path(scratch), "apply", "--whitespace=nowarn", *patches).returncode != 0:
                return None
            return {name: Path(scratch, name).read_bytes() for name in self.files}

    def _replace_files(self, revert: bool) -> None:
        """Replace all of the files or none: the old ones are kept until all are replaced."""
        new = self.result(revert)
        if new is None:
            raise PrefixShareError(
                f"the patches do not fit vLLM {self.release} in {self.root}, which was changed: "
                "nothing was done."
            )
        try:
            for name, data in new.items():
                for folder in ("old", "new"):
                    (self.journal / folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self.root / name, self.journal / "old" / name)
                (self.journal / "new" / name).write_bytes(data)
                shutil.copymode(self.root / name, self.journal / "new" / name)
            (self.journal / "complete").touch()
            for name in new:
                (self.journal / "new" / name).replace(self.root / name)
        except BaseException as e:  # interruptions included
            with contextlib.suppress(OSError):
                self.undo_interrupted()
            if isinstance(e, OSError):
                raise PrefixShareError(
                    f"{self.root} cannot be written ({e.strerror or e}): nothing was changed."
                ) from None
            raise
        self._forget_journal()

    def undo_interrupted(self) -> bool:
        """Restore files that an interrupted process replaced. Returns whether there were any."""
        if not self.journal.is_dir():
            return False
        try:
            if complete := (self.journal / "complete").exists():
                for name in self.files:
                    old = self.journal / "old" / name
                    copy = old.with_name(f"{old.name}.copy")
                    shutil.copy2(old, copy)
                    copy.replace(self.root / name)
            self._forget_journal()
        except OSError as e:
            raise PrefixShareError(
                f"a change of {self.root} was interrupted and cannot be undone ({e}): reinstall "
                "vLLM, or make it writable and try again."
            ) from None
        return complete

    def _forget_journal(self) -> None:
        # first the marker that makes the journal valid
        (self.journal / "complete").unlink(missing_ok=True)
        shutil.rmtree(self.journal)


@contextlib.contextmanager
def _termination_raises() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that an unfinished change is undone first."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git in ``folder``, ignoring any repository around it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"GIT_CEILING_DIRECTORIES": str(folder.parent), "LC_ALL": "C"}
    if arguments[0] == "apply":  # a user's settings may change whitespace
        environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    try:
        return subprocess.run(
            ["git", *arguments], cwd=folder, env=environment, capture_output=True, text=True
        )
    except FileNotFoundError:
        raise PrefixShareError("patching needs git: install it.") from None
