"""Kernels to compare, behind one interface: make the peer once, prepare it for each workload.

Plans and metadata are made in ``prepare``, outside of the timed region; a launch is only the
attention of one layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from benchmarks.support.trees import BlockNode, Workload
from vllm_prefixshare import LayerExtras
from vllm_prefixshare.planning.forest.token_tree import ancestor_masks


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
        """Raise ``UnavailableError`` unless ``peer.serves`` has what the case needs: the layer's
        features, "fp8" where it is quantised, "mla" where its KV cache is latent, "windows" where
        it has a sliding window, "queries" where requests have several, and "token trees". Peers
        without ``serves`` serve none of them.
        """
        served = getattr(peer, "serves", ())
        if self.workload.query_len > 1 and "queries" not in served:
            raise UnavailableError("one query a request only")
        needs = {
            **dict.fromkeys(self.features, True),
            "fp8": self.k_cache.element_size() == 1,
            "mla": self.kv_lora_rank is not None,
            "windows": self.sliding_window is not None,
            "token trees": self.workload.query_parents is not None,
        }
        for name, needed in needs.items():
            if needed and name not in served:
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

    def seen_queries(self) -> torch.Tensor:
        """Which query tokens of its request each one sees, itself included: bool ``[query_len,
        query_len]``, on the host.
        """
        w = self.workload
        if w.query_parents is None:
            return torch.ones(w.query_len, w.query_len, dtype=torch.bool).tril()
        bits = ancestor_masks(w.query_parents, np.array([0, w.query_len], np.int32))
        j = np.arange(w.query_len)
        return torch.from_numpy((bits[:, j // 32] >> (j % 32)) & 1 == 1)

    def token_ids(self, row: int, start: int, end: int) -> torch.Tensor:
        """int64 slots of the tokens ``[start, end)`` of a request, in a cache viewed as one token
        per slot.
        """
        size = self.workload.block_size
        at = torch.arange(start, end)
        return torch.from_numpy(self.workload.block_table[row]).long()[at // size] * size + (
            at % size
        )

    def node_slots(self, node: BlockNode) -> torch.Tensor:
        """int64 slots of a node's tokens, as in ``token_ids``."""
        w = self.workload
        end = min(node.end * w.block_size, int(w.seq_lens[node.first : node.last].min()))
        return self.token_ids(node.first, node.start * w.block_size, end)


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

    def require_gpu(self) -> None:
        """Raise ``UnavailableError`` on a CPU."""
        if self.device.type != "cuda":
            raise UnavailableError("needs a GPU")


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
