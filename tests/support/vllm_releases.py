"""The Python files of other vLLM releases than the installed one."""

import os
from pathlib import Path

from tests.support.released_wheels import unpacked
from vllm_prefixshare.settings import settings

#: version -> SHA-256 of its wheel for x86-64: the newest patch release of each
RELEASES = {
    "0.29.0": "09d48617fc2be9c6cdcd5db480651ab0d84817b257204f2cc2e3ecbb70bbb635",
    "0.30.0": "ef52ee58c410ead0b8afb190838fa4cbcb52075596f67862a03859d984966ac4",
    "0.31.0": "39132b433967f0962d03d8a5f633b9bee6b32708f566c7d5637b79f8d0ef3433",
    "0.32.0": "5e2ecdc5b0baf72921c288486417ca82778456a448e4fe60b62ee43c0dfc8611",
    "0.33.0": "4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa",
}
#: Releases that `make test` runs: those that Ray, verl, OpenRLHF and TRL pin, and the newest.
USUAL = ("0.29.0", "0.33.0")
ALL = os.environ.get("PREFIXSHARE_RELEASES") == "all"
CHOSEN = RELEASES if ALL else USUAL


def python_files(version: str) -> Path:
    """A folder with the Python files of this release."""
    return unpacked(
        settings().cache / "vllm-releases" / version,
        f"vllm=={version}",
        [RELEASES[version]],
        ["--python-version=3.12", "--platform=manylinux_2_28_x86_64"],
        lambda name: name.endswith((".py", "METADATA")),
    )
