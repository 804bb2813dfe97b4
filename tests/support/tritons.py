"""Other releases of Triton than the installed one, each with its own assembler."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support import processes
from tests.support.released_wheels import unpacked
from vllm_prefixshare.settings import settings

#: version -> SHA-256 of its wheels for CPython 3.11 and 3.12 on x86-64
RELEASES = {
    "3.6.0": (
        "e8e323d608e3a9bfcc2d9efcc90ceefb764a82b99dea12a86d643c72539ad5d3",
        "74caf5e34b66d9f3a429af689c1c7128daba1d8208df60e81106b115c00d6fca",
    ),
    "3.7.1": (
        "6744957e9fd610a29680ec2346057d0c86948ed3812468670719f391e94b44a5",
        "7e40869937a68206ec70d7f25bb7ec6433cb083f9135e1f36dbd318dc449a728",
    ),
    "3.8.0": (
        "68988ac85d5e7086baeda0ddc175af9667db7529b3c5e11a5c0601b8bef2200a",
        "e91ffa46d095b252248297292dd22bcbacd53a125a0c2eefbbbf74925a320bc3",
    ),
    "3.9.0": (
        "1622118a038b0c6e16fa4a0305da62c8b3c15904ee1cc4d4e65846a25969e41e",
        "5e52ab4e2f1d64f0ac494c9aa723697b793f81a91c4cae4c36608ca0bc4267bf",
    ),
}


def folder(version: str) -> Path:
    """The folder of this unpacked release."""
    place = settings().cache / "triton" / version
    found = unpacked(place, f"triton=={version}", RELEASES[version])
    for tool in found.glob("triton/backends/nvidia/bin/*"):
        tool.chmod(0o755)
    return found


def run(version: str, *command: str, timeout: float = 3600) -> subprocess.CompletedProcess[str]:
    """Run this Python with the given release of Triton, from the root of the repository."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(folder(version)), str(root)])
    variables = {"PYTHONPATH": path, "PREFIXSHARE_EXPECT_TRITON": version}
    command = (sys.executable, *command)
    return processes.run(command, status=None, cwd=root, timeout=timeout, **variables)
