"""The dividers by name."""

from dataclasses import dataclass

from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.planning.dividers.baselines import (
    deft_flatten,
    deft_flatten_chunk,
    deft_node,
    deft_node_chunk,
    fasttree,
    fixed,
    per_request,
)
from vllm_prefixshare.planning.dividers.batch_invariant import batch_invariant
from vllm_prefixshare.planning.dividers.depth_first import depth_first
from vllm_prefixshare.planning.dividers.flashforge import flashforge
from vllm_prefixshare.planning.dividers.problem import Divide


@dataclass(frozen=True, slots=True)
class Divider:
    """A divider strategy.

    divide: the strategy; the divider has its name.
    shares: it reads common KV once for several requests.
    decides_sharing: what the policy ``auto`` would decide beforehand, tree by tree, is left to it.
    tiles_span_nodes: a work tile reads several nodes of the tree, so that what a tree gains by
        sharing is priced per token and not per query group.
    cuts_at_fixed_places: it cuts KV at multiples of ``PlannerConfig.kv_chunk_size`` and nowhere
        else: a request's output bits do not depend on the batch.
    """

    divide: Divide
    shares: bool = True
    decides_sharing: bool = False
    tiles_span_nodes: bool = False
    cuts_at_fixed_places: bool = False

    @property
    def name(self) -> str:
        """Name in ``DIVIDERS``."""
        return self.divide.__name__


DIVIDERS = {
    divider.name: divider
    for divider in (
        Divider(flashforge),
        Divider(fasttree),
        Divider(deft_node),
        Divider(deft_node_chunk),
        Divider(deft_flatten),
        Divider(deft_flatten_chunk),
        Divider(fixed),
        Divider(per_request, shares=False),
        # Unshared KV is read by the same kernel, and shared and private KV are weighed at every
        # cut: deciding beforehand as well takes a third of a plan's time and drops no tree.
        Divider(depth_first, decides_sharing=True, tiles_span_nodes=True),
        # Cuts of KV that is not shared would exceed the room for tiles.
        Divider(batch_invariant, decides_sharing=True, cuts_at_fixed_places=True),
    )
}


def get_divider(name: str) -> Divider:
    """The divider called ``name``.

    Raises:
        PrefixShareError: unknown name; the sentence lists the known ones.
    """
    if not isinstance(name, str) or name not in DIVIDERS:
        raise PrefixShareError(f"divider {name!r} is unknown: use one of {', '.join(DIVIDERS)}.")
    return DIVIDERS[name]
