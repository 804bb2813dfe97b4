"""Every environment variable of the project, in one place and typed."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_prefixshare.records import PrefixShareError

PREFIX = "VLLM_PREFIXSHARE_"


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value.lower() not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return value.lower()

    return parse


def _flag(value: str) -> bool:
    if value not in ("0", "1"):
        raise ValueError("0 or 1")
    return value == "1"


def _optional_path(value: str) -> Path | None:
    return Path(value).expanduser() if value else None


def _folder(value: str) -> Path:
    if not value:
        raise ValueError("a folder, or unset it")
    return Path(value).expanduser()


#: name -> (parser, default as text, meaning)
VARIABLES: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "VLLM_PREFIXSHARE_DIVIDER": (
        str.lower,
        "auto",
        "how KV segments are divided into work tiles; auto: what measures best here",
    ),
    "VLLM_PREFIXSHARE_KERNEL": (
        _choice("auto", "hopper", "portable"),
        "auto",
        "kernel on a GPU; auto: hopper where it can serve, else portable",
    ),
    "VLLM_PREFIXSHARE_SHARE": (
        _choice("auto", "always", "never"),
        "auto",
        "auto: share where the cost table says it pays; always; never",
    ),
    "VLLM_PREFIXSHARE_COST_TABLE": (_optional_path, "", "cost table to use, a JSON file"),
    "VLLM_PREFIXSHARE_CACHE": (
        _folder,
        "~/.cache/vllm_prefixshare",
        "folder for the embedded model, compiled code and measured cost tables",
    ),
    "VLLM_PREFIXSHARE_STRICT": (_flag, "0", "1: refuse instead of falling back to the parent"),
    "VLLM_PREFIXSHARE_CHECK_PLANS": (_flag, "0", "1: verify every new plan (slow, for debugging)"),
}


def get(name: str) -> Any:
    """The parsed value of ``name``, or its default.

    Raises:
        PrefixShareError: the value cannot be parsed.
    """
    parse, default, _ = VARIABLES[name]
    value = os.environ.get(name, default)
    try:
        return parse(value)
    except (ValueError, RuntimeError) as e:
        raise PrefixShareError(f"{name}={value!r} is not valid: set it to {e}.") from None


def check_environment() -> None:
    """Refuse unknown ``VLLM_PREFIXSHARE_*`` variables and unparsable values.

    Raises:
        PrefixShareError: naming the variable and the known ones.
    """
    for name in os.environ:
        if name.startswith(PREFIX) and name not in VARIABLES:
            raise PrefixShareError(
                f"{name} is not a known variable: unset it, or use one of {', '.join(VARIABLES)}."
            )
    for name in VARIABLES:
        get(name)
