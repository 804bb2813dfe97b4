"""The file of a benchmark's results, the date and the versions that it names.

It imports no kernels: an engine's processes import the script that started them, and vLLM 0.32 on
a CPU does not start where Numba was imported.
"""

import json
import platform
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vllm_prefixshare import __version__
from vllm_prefixshare.core import PrefixShareError

ON_GPU = ("torch", "triton", "vllm", "flashinfer-python", "xformers")


def versions(*packages: str) -> dict[str, str]:
    """Versions of what a figure depends on, of what is installed here.

    Args:
        packages: in addition to Python and this one; ``ON_GPU`` by default.
    """
    found = {"vllm_prefixshare": __version__, "python": platform.python_version()}
    for name in packages or ON_GPU:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def write(path: Path | None, result: dict[str, object]) -> None:
    """Write ``result`` as JSON with today's date, if there is a ``path``."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        dated = {"date": date.today().isoformat(), **result}
        path.write_text(json.dumps(dated, indent=1) + "\n")


def resumed(path: Path | None, result: dict[str, object], rows: str) -> list[dict]:
    """The rows that an earlier run of a benchmark has written.

    Args:
        path: its file.
        result: this run's, whose command, GPU and versions must equal the file's.
        rows: key of the list of rows.

    Raises:
        PrefixShareError: there is no path, or the file is of another run.
    """
    if path is None:
        raise PrefixShareError("--resume goes on with the file of --out: name it.")
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text())
        run = {key: found[key] for key in ("command", "gpu", "versions")}
        kept: list[dict] = found[rows]
    except (OSError, ValueError, KeyError, TypeError):
        raise PrefixShareError(
            f"{path} has no results: leave --resume out to replace it."
        ) from None
    for key, value in run.items():
        if value != result[key]:
            raise PrefixShareError(
                f"{path} is of another {key} ({value}): leave --resume out to replace it."
            )
    return kept
