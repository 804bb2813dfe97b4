"""Kernels to compare, behind one interface: make the peer once, prepare it for each workload.

Plans and metadata are made in ``prepare``, outside of the timed region; a launch is only the
attention of one layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.support.trees import Workload
from vllm_prefixshare import LayerExtras


class UnavailableError(Exception):
    """The peer cannot run here, or cannot serve this workload; the message gives the reason."""


@dataclass(frozen=True)
class Case:
    """A workload on the device, for one layer.

    q: ``[num_reqs * query_len, num_qo_heads, head_dim]``.
    k_cache, v_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``; of a latent KV cache V
        is a view of K's first numbers.
    block_table, seq_lens: int32, ``[num_reqs, max_blocks]`` and ``[num_reqs]``.
    out_dtype: dtype of the output, where queries are quantised. extras: extra features of the
        layer; their scales are float32 ``[num_kv_heads]``.
    sliding_window: tokens that each query sees; None for all.
    """

    workload: Workload
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    out_dtype: torch.dtype
    extras: LayerExtras
    sliding_window: int | None = None

    @property
    def features(self) -> tuple[str, ...]:
        """The layer's features, of those in ``config.FEATURES``."""
        x = self.extras
        has = {
            "sinks": x.sinks is not None,
            "soft_cap": x.soft_cap != 0,
            "alibi": x.alibi_slopes is not None,
        }
        return tuple(name for name, there in has.items() if there)

    def require_served_by(self, peer: "Peer") -> None:
        """Raise ``UnavailableError`` unless ``peer.serves`` has the layer's features, and "fp8"
        where the layer is quantised, "mla" where its KV cache is latent, and "windows" where it
        has a sliding window. Peers without ``serves`` serve none of them.
        """
        quantised = ("fp8",) if self.k_cache.element_size() == 1 else ()
        latent = ("mla",) if self.kv_lora_rank else ()
        windows = () if self.sliding_window is None else ("windows",)
        for name in (*self.features, *quantised, *latent, *windows):
            if name not in getattr(peer, "serves", ()):
                raise UnavailableError(f"no {name}")

    @property
    def num_qo_heads(self) -> int:
        return self.q.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k_cache.shape[2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[2]

    @property
    def v_head_dim(self) -> int:
        return self.v_cache.shape[3]

    @property
    def kv_lora_rank(self) -> int | None:
        return self.v_head_dim if self.v_head_dim != self.head_dim else None

    @property
    def sm_scale(self) -> float:
        return (192 if self.kv_lora_rank else self.head_dim) ** -0.5

    def query_start_loc(self) -> torch.Tensor:
        """int32 ``[num_reqs + 1]`` on the device."""
        steps = torch.arange(self.workload.num_reqs + 1, dtype=torch.int32, device=self.q.device)
        return steps * self.workload.query_len

    def require_one_query(self) -> None:
        if self.workload.query_len > 1:
            raise UnavailableError("one query a request only")

    def token_ids(self, row: int, start: int, end: int) -> torch.Tensor:
        """int64 slots of the tokens ``[start, end)`` of a request, in a cache viewed as one token
        per slot.
        """
        size = self.workload.block_size
        at = torch.arange(start, end)
        return torch.from_numpy(self.workload.block_table[row]).long()[at // size] * size + (
            at % size
        )


@dataclass(frozen=True)
class Launch:
    """One way to run a peer: ``call`` queues the kernels and returns the output, like ``q``.
    plan_ms: host time of what ``prepare`` plans in each step, where it was taken.
    """

    call: Callable[[], torch.Tensor]
    note: str = ""
    graph: bool = True
    plan_ms: float | None = None


class Peer(Protocol):
    """A kernel to compare. ``__init__`` raises ``UnavailableError`` where the peer is not
    installed.
    """

    def prepare(self, case: Case) -> list[Launch]:
        """The ways to run this case; the fastest one counts.

        Raises:
            UnavailableError: the peer cannot serve the case.
        """
        ...


@dataclass(frozen=True)
class Options:
    """Options of all peers: the device, and the user's checkouts of some peers."""

    device: torch.device
    dtype: torch.dtype
    checkouts: dict[str, Path | None]
    divider: str | None = None


#: name on the command line and in results -> (module, class, title)
PEERS = {
    "ours": ("ours", "Ours", "ours"),
    "tokens": ("ours", "Tokens", "ours, each token"),
    "portable": ("ours", "Portable", "ours, portable"),
    "invariant": ("ours", "Invariant", "ours, invariant"),
    "portable_invariant": ("ours", "PortableInvariant", "ours, portable, invariant"),
    "fa3_invariant": ("vllm_fa3", "FA3Invariant", "FA3, invariant"),
    "fa2": ("vllm_fa3", "FA2", "FA2"),
    "fa3": ("vllm_fa3", "FA3", "FA3"),
    "fa3_cascade": ("vllm_fa3", "FA3Cascade", "FA3 cascade"),
    "flashmla": ("vllm_flashmla", "FlashMLA", "FlashMLA"),
    "flashinfer": ("flashinfer_peers", "FlashInfer", "FlashInfer"),
    "flashinfer_cascade": ("flashinfer_peers", "FlashInferCascade", "FI multi-level"),
    "xformers": ("xformers_peer", "XFormers", "xformers"),
    "medusa": ("medusa", "Medusa", "Medusa"),
    "fasttree": ("fasttree", "FastTree", "FastTree"),
    "deft": ("deft", "DeFT", "DeFT"),
    "pat": ("pat", "PAT", "PAT"),
}


def make(name: str, options: Options) -> Peer:
    """Make a peer by name.

    Raises:
        UnavailableError: the peer does not import, build or support the device.
    """
    module, cls, _ = PEERS[name]
    try:
        return getattr(import_module(f"{__name__}.{module}"), cls)(options)
    except UnavailableError:
        raise
    except Exception as e:  # other projects' code: an import or a build may raise anything
        raise UnavailableError(first_line(e)) from e


def first_line(error: BaseException) -> str:
    """The first line of an exception."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
