"""What every benchmark writes beside its figures. Imports nothing that compiles: vLLM for CPUs does
not start in a process that has loaded Numba.
"""

import json
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vllm_prefixshare import __version__


def versions() -> dict[str, str]:
    found = {"vllm_prefixshare": __version__, "python": platform.python_version()}
    for name in ("torch", "triton", "vllm", "flashinfer-python", "xformers"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def write(path: Path | None, result: dict[str, object]) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
