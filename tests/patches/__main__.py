"""Makes a patched vLLM for PYTHONPATH, in two steps where the machine with vLLM has no git.

python -m tests.patches files 0.33.0 FOLDER-WITH-PACKAGE-VLLM TARGET   # patched files alone
python -m tests.patches link TARGET                                    # links to the installed rest
"""

import argparse
import importlib.util
import shutil
from pathlib import Path

from tests.support.patch_series import VERSIONS, link_rest, patched_files


def installed() -> Path:
    """The folder that holds the installed package ``vllm``."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("vLLM is not installed: install the release that was patched.")
    return Path(spec.submodule_search_locations[0]).parent


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_subparsers(dest="step", required=True)
    files = steps.add_parser("files")
    files.add_argument("version", choices=VERSIONS)
    files.add_argument("source", type=Path)
    files.add_argument("target", type=Path)
    link = steps.add_parser("link")
    link.add_argument("target", type=Path)
    given = parser.parse_args()
    if given.step == "files":
        patched_files(given.version, given.source, given.target)
        shutil.rmtree(given.target / ".git")
    else:
        link_rest(installed(), given.target)
