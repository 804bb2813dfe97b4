"""The settings of a process: its ``VLLM_PREFIXSHARE_*`` variables, read and checked once."""

import logging
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vllm_prefixshare.core import PrefixShareError

PREFIX = "VLLM_PREFIXSHARE_"
#: features that ran in few engines or none: active only where the user asks for them
EXPERIMENTAL = ("alibi", "head_dim")
#: parts of the host work on a prompt that requests with a common prefix share
PROMPT_PARTS = ("tokenization", "detokenization", "hashes", "lookup", "copies")


@dataclass(frozen=True, slots=True)
class Settings:
    """Values from the environment; ``VARIABLES`` has the meaning of each field.

    divider: None for the one measured fastest with the kernel.
    order_bound: seconds; None for a bound that fits the engine.
    prompts: the active parts of ``PROMPT_PARTS``; None for all of them with PREFIX_SHARE and none
        with another backend.
    """

    kernel: Literal["auto", "hopper", "portable"]
    divider: str | None
    share: Literal["auto", "always", "never"]
    cost_table: Path | None
    order: Literal["auto", "prefix", "off"]
    order_bound: float | None
    cache: Path
    strict: bool
    check_plans: bool
    trace: Path | None
    metrics: Path | None
    experimental: frozenset[str]
    prompts: frozenset[str] | None
    prompts_cache_mib: int


class Variable(NamedTuple):
    """A variable of the environment.

    parse: turns text into the field's value; its ValueError says what the text should be.
    fallback: makes the value where the variable is not set and its default is not valid.
    """

    parse: Callable[[str], Any]
    default: str
    meaning: str
    fallback: Callable[[], Any] | None = None


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value.lower() not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return value.lower()

    return parse


def _divider(value: str) -> str | None:
    return None if value.lower() == "auto" else value.lower()


def _flag(value: str) -> bool:
    if value not in ("0", "1"):
        raise ValueError("0 or 1")
    return value == "1"


def _optional_seconds(value: str) -> float | None:
    try:
        seconds = float(value) if value else None
    except ValueError:
        seconds = math.nan
    if seconds is not None and not seconds >= 0:  # not a number is refused, too
        raise ValueError("seconds, 0 or more, or unset it")
    return seconds


def _path(value: str) -> Path:
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise ValueError("a path without ~, as no such home folder is known") from None


def _optional_path(value: str) -> Path | None:
    return _path(value) if value else None


def _experimental(value: str) -> frozenset[str]:
    names = frozenset(name.strip().lower() for name in value.split(",") if name.strip())
    if not names <= set(EXPERIMENTAL):
        raise ValueError(f"some of {','.join(EXPERIMENTAL)}, or unset it")
    return names


def _prompt_parts(value: str) -> frozenset[str] | None:
    names = frozenset(name.strip().lower() for name in value.split(",") if name.strip())
    if names == {"auto"}:
        return None
    if names in ({"on"}, {"off"}):
        return frozenset(PROMPT_PARTS) if "on" in names else frozenset()
    if not names or not names <= set(PROMPT_PARTS):
        raise ValueError(f"auto, on, off, or some of {','.join(PROMPT_PARTS)}")
    return names


def _mebibytes(value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= 1 << 20:
        raise ValueError("a number of MiB from 1 to 1048576")
    return int(value)


def _folder(value: str) -> Path:
    if not value:
        raise ValueError("a folder, or unset it")
    return _path(value)


def _temporary_cache() -> Path:
    """A cache folder for a user without a home; it is the same in all processes of the user."""
    folder = Path(tempfile.gettempdir()) / f"vllm_prefixshare-{os.getuid()}"
    logging.getLogger("vllm.prefixshare").warning(
        "This user has no home folder, so compiled code is kept in %s: set VLLM_PREFIXSHARE_CACHE "
        "to keep it elsewhere.",
        folder,
    )
    return folder


VARIABLES: dict[str, Variable] = {
    "VLLM_PREFIXSHARE_DIVIDER": Variable(
        _divider,
        "auto",
        "how KV segments are divided into work tiles; auto: what measures best here",
    ),
    "VLLM_PREFIXSHARE_KERNEL": Variable(
        _choice("auto", "hopper", "portable"),
        "auto",
        "kernel on a GPU; auto: hopper where it can serve, else portable",
    ),
    "VLLM_PREFIXSHARE_SHARE": Variable(
        _choice("auto", "always", "never"),
        "auto",
        "auto: share where the cost table says it pays; always; never",
    ),
    "VLLM_PREFIXSHARE_COST_TABLE": Variable(_optional_path, "", "cost table to use, a JSON file"),
    "VLLM_PREFIXSHARE_ORDER": Variable(
        _choice("auto", "prefix", "off"),
        "auto",
        "start waiting requests by what they share; auto: for vllm.LLM, not for servers",
    ),
    "VLLM_PREFIXSHARE_ORDER_BOUND": Variable(
        _optional_seconds,
        "",
        "seconds that a request may lose to later ones; unset: 2 on servers, no bound for vllm.LLM",
    ),
    "VLLM_PREFIXSHARE_CACHE": Variable(
        _folder,
        "~/.cache/vllm_prefixshare",
        "folder for the embedded model, compiled code and measured cost tables",
        _temporary_cache,
    ),
    "VLLM_PREFIXSHARE_STRICT": Variable(
        _flag, "0", "1: the engine does not start if a layer cannot be served"
    ),
    "VLLM_PREFIXSHARE_CHECK_PLANS": Variable(
        _flag, "0", "1: verify every new plan (slow, for debugging)"
    ),
    "VLLM_PREFIXSHARE_TRACE": Variable(
        _optional_path, "", "record the batch of every new plan in this file, for inspect"
    ),
    "VLLM_PREFIXSHARE_METRICS": Variable(
        _optional_path,
        "",
        "folder through which the server's /metrics reads the workers' counters; empty: a "
        "temporary one",
    ),
    "VLLM_PREFIXSHARE_EXPERIMENTAL": Variable(
        _experimental,
        "",
        "features to use on a GPU though few engines or none have run them: "
        + ", ".join(EXPERIMENTAL),
    ),
    "VLLM_PREFIXSHARE_PROMPTS": Variable(
        _prompt_parts,
        "auto",
        "host work on a shared prefix that is done once: auto (all parts with PREFIX_SHARE), on "
        f"(with any backend), off, or some of {','.join(PROMPT_PARTS)}",
    ),
    "VLLM_PREFIXSHARE_PROMPTS_CACHE_MIB": Variable(
        _mebibytes, "256", "maximum MiB that the caches of shared host work hold in each process"
    ),
}


def read(environment: Mapping[str, str]) -> Settings:
    """The settings in ``environment``.

    Raises:
        PrefixShareError: an unknown ``VLLM_PREFIXSHARE_*`` variable, or a value not parsed.
    """
    for name in environment:
        if name.startswith(PREFIX) and name not in VARIABLES:
            raise PrefixShareError(
                f"{name} is not a known variable: unset it, or use one of {', '.join(VARIABLES)}."
            )
    values: dict[str, Any] = {}
    for name, variable in VARIABLES.items():
        text = environment.get(name, variable.default)
        try:
            value = variable.parse(text)
        except ValueError as e:
            if name in environment or variable.fallback is None:
                raise PrefixShareError(f"{name}={text!r} is not valid: set it to {e}.") from None
            value = variable.fallback()
        values[name.removeprefix(PREFIX).lower()] = value
    return Settings(**values)


@cache
def settings() -> Settings:
    """The settings of this process. Later changes of the environment have no effect.

    Raises:
        PrefixShareError: see ``read``.
    """
    return read(os.environ)
