"""Base of both CPU executors: how plans are made, and checks of a layer's tensors."""

from typing import Any, NamedTuple

import torch

from vllm_prefixshare.config import AttentionConfig, PlannerConfig
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.kernels.extras import LayerExtras, checked_extras
from vllm_prefixshare.kernels.geometry import CPU
from vllm_prefixshare.kernels.interface import HostBatch
from vllm_prefixshare.planning.plan import DecodePlan


class CpuTensors(NamedTuple):
    """A layer's arguments of ``interface.Executor.run`` that a CPU executor reads, checked."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    sm_scale: float
    extras: LayerExtras


class CpuExecutor:
    """The part of ``interface.Executor`` that does not depend on how a tile is computed.

    Args:
        attention: shape of the layer.
        num_workers: work lists that a plan is divided into; the executors walk all of them.
    """

    name: str
    query_len = None
    takes_token_trees = False
    trusts_estimates = True
    row_tiles = 1

    def __init__(self, attention: AttentionConfig, num_workers: int = 1) -> None:
        self.attention = attention
        self.num_workers = num_workers
        self._num_tokens = 0
        self._all_rows = True
        self._checked: set[tuple[object, ...]] = set()

    def planner_config(
        self, divider: str | None = None, share: str = "always", **options: Any
    ) -> PlannerConfig:
        """As ``interface.Executor.planner_config``."""
        options["sliding_window"] = self.attention.sliding_window
        return PlannerConfig(
            divider or "flashforge", share, self.num_workers, geometry=CPU, **options
        )

    def prepare(self, plan: DecodePlan, batch: HostBatch) -> None:
        """As ``interface.Executor.prepare``: looks up block ids and lengths."""
        prepared = int(batch.query_start_loc[-1]), batch.rows is None
        if prepared != (self._num_tokens, self._all_rows):
            self._num_tokens, self._all_rows = prepared
            self._checked.clear()

    def reserve(self, plan: DecodePlan, room: float = 2.0) -> None:
        """As ``interface.Executor.reserve``; here memory grows when it is needed."""

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: object,
        seq_lens: object,
        out: torch.Tensor,
        sm_scale: float,
        *,
        lse: torch.Tensor | None = None,
        extras: LayerExtras | None = None,
    ) -> torch.Tensor:
        """As ``interface.Executor.run``; only the tokens of the prepared rows are written."""
        self._check(q, k_cache, v_cache, out, lse)
        given = checked_extras(extras, self.attention, q.device)
        self._compute(CpuTensors(q, k_cache, v_cache, out, lse, sm_scale, given))
        return out

    def _compute(self, t: CpuTensors) -> None:
        """Write ``t.out`` and ``t.lse`` under the prepared plan."""
        raise NotImplementedError

    def _check(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Refuse tensors of another shape, dtype or device; each combination is checked once."""
        given = [x for x in (q, k_cache, v_cache, out, lse) if x is not None]
        signature = *((x.shape, x.dtype, x.device) for x in given), lse is None or lse.stride()
        if signature in self._checked:
            return
        a = self.attention
        expected = (self._num_tokens, a.num_qo_heads, a.head_dim)
        # q may have more tokens, after the prepared ones, where some rows are not computed
        shape = tuple(q.shape)
        if shape != expected and (
            self._all_rows or shape[1:] != expected[1:] or shape[0] < expected[0]
        ):
            raise PrefixShareError(f"q must be {list(expected)}, got {list(shape)}.")
        for name, cache, dim in (
            ("k_cache", k_cache, a.head_dim),
            ("v_cache", v_cache, a.v_head_dim),
        ):
            block = (a.block_size, a.num_kv_heads, dim)
            if cache.dim() != 4 or tuple(cache.shape[1:]) != block:
                raise PrefixShareError(
                    f"{name} must be [num_blocks, {', '.join(map(str, block))}], "
                    f"got {list(cache.shape)}."
                )
        caches = ("k_cache", k_cache, a.of_cache), ("v_cache", v_cache, a.of_cache)
        for name, x, dtype in (("q", q, a.of_queries), *caches):
            if str(x.dtype) != f"torch.{dtype}" or x.device.type != "cpu":
                raise PrefixShareError(
                    f"{name} must be {dtype} on the cpu, got {x.dtype} on {x.device}."
                )
        shape = (*q.shape[:2], a.v_head_dim)
        if out.shape != shape or str(out.dtype) != f"torch.{a.dtype}" or out.device != q.device:
            raise PrefixShareError(
                f"out must be like q, torch.{a.dtype} {list(shape)}, got {out.dtype} "
                f"{list(out.shape)}."
            )
        if lse is not None and (
            lse.shape != q.shape[:2]
            or lse.dtype != torch.float32
            or lse.device != q.device
            or not lse.is_contiguous()
        ):
            raise PrefixShareError(
                f"lse must be contiguous float32 {list(q.shape[:2])}, "
                f"got {lse.dtype} {list(lse.shape)}."
            )
        self._checked.add(signature)
