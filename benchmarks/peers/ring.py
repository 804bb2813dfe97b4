"""Ring attention at decode: the baseline that Tree Attention is measured against (its section
5.3): KV shards go from rank to rank, and each rank attends over all of them in turn.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from numpy.typing import ArrayLike

from vllm_prefixshare.core import PrefixShareError, host_integers
from vllm_prefixshare.distributed.ranks import Ranks
from vllm_prefixshare.distributed.tree_reduction import shape_of
from vllm_prefixshare.merging import merge_states
from vllm_prefixshare.wrapper import PrefixShareDecodeWrapper


class RingRanks(Ranks):
    """Ranks in a ring."""

    def pass_on(self, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[], None]]:
        """Send tensors to the next rank and receive the previous rank's, of the same shapes.

        Returns:
            The tensors received, and a function to call before reading them.
        """
        received = [torch.empty_like(t) for t in tensors]
        to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        operations = []
        for tag, (mine, theirs) in enumerate(zip(tensors, received, strict=True)):
            operations.append(dist.P2POp(dist.isend, mine, to, self.group, tag))
            operations.append(dist.P2POp(dist.irecv, theirs, source, self.group, tag))
        works = dist.batch_isend_irecv(operations)
        self.bytes_sent += sum(t.nbytes for t in tensors)

        def wait() -> None:
            for work in works:
                work.wait()

        return received, wait


class RingDecode:
    """The result of ``tree_reduction.TreeDecode``, by passing the shards around a ring. The next
    shard is sent while one is attended to.

    Args:
        make_wrapper: makes an operator; each rank has one for every rank's shard.
        timeout: see ``Ranks``.

    Raises:
        PrefixShareError: see ``Ranks``; operators that ``tree_reduction.shape_of`` rejects.
    """

    def __init__(
        self,
        make_wrapper: Callable[[], PrefixShareDecodeWrapper],
        *,
        timeout: float = 30.0,
    ) -> None:
        first = make_wrapper()
        describe = {**shape_of(first), "reduction": "ring"}
        self.ranks = RingRanks(first.device, describe, timeout=timeout)
        self._wrappers = [first, *(make_wrapper() for _ in range(self.ranks.size - 1))]
        self._tables: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._agreed: object = None

    def plan(self, block_table: ArrayLike, seq_lens: ArrayLike) -> None:
        """Tell every rank where the tokens of this shard lie, and plan all shards. Call it at
        each step: the baseline does not follow sequences that grow.

        Args:
            block_table, seq_lens: as in ``TreeDecode.plan``.

        Raises:
            PrefixShareError: as ``PrefixShareDecodeWrapper.plan``; ranks disagree.
        """
        table = host_integers(block_table, "block_table", 2)
        said = self.ranks.exchange((table, host_integers(seq_lens, "seq_lens", 1)))
        counts = [len(lens) for _, lens in said]
        if len(set(counts)) > 1:
            raise PrefixShareError(
                f"ranks disagree: the number of requests is {counts}: make it the same on all."
            )
        self._tables = []  # empty if a shard is rejected
        device = self._wrappers[0].device
        for wrapper, shard in zip(self._wrappers, said, strict=True):
            wrapper.plan(*shard)
        for table, lens in said:
            where, length = (torch.from_numpy(x).to(device) for x in (table, lens))
            self._tables.append((where, length))

    def run(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one layer over all ranks' tokens, under the tables last planned. In a CUDA
        graph it serves this plan only.

        Args:
            q: ``[num_reqs, num_qo_heads, head_dim]``, the same on every rank.
            k_cache, v_cache: the shard, contiguous, with the same shape on every rank.

        Returns:
            As ``TreeDecode.run``.

        Raises:
            PrefixShareError: as ``PrefixShareDecodeWrapper.run``; ranks disagree.
        """
        planned = self._wrappers[0].last_plan.num_reqs
        if len(q) != planned:
            raise PrefixShareError(f"q must have {planned} rows, got {len(q)}.")
        if not self._tables:
            raise PrefixShareError("there is no plan yet: call plan(block_table, seq_lens) first.")
        kind = list(k_cache.shape), list(v_cache.shape), str(k_cache.dtype), str(v_cache.dtype)
        if kind != self._agreed:
            self.ranks.agree({"the KV cache": kind})
            self._agreed = kind
        caches = [k_cache.contiguous(), v_cache.contiguous()]
        states: list[tuple[torch.Tensor, torch.Tensor]] = []
        for turn in range(self.ranks.size):
            last = turn == self.ranks.size - 1
            coming, wait = ([], None) if last else self.ranks.pass_on(caches)
            source = (self.ranks.rank - turn) % self.ranks.size
            wrapper, tables = self._wrappers[source], self._tables[source]
            states.append(wrapper.run(q, caches[0], caches[1], *tables, return_lse=True))
            if wait is not None:
                wait()
            caches = coming
        outs, lses = zip(*states, strict=True)
        return merge_states(outs, lses)
