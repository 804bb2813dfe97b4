"""The dividers by name."""

from vllm_prefixshare.planning.dividers.baselines import (
    deft_flatten,
    deft_node,
    deft_node_chunk,
    fasttree,
    fixed,
    per_request,
)
from vllm_prefixshare.planning.dividers.batch_invariant import batch_invariant
from vllm_prefixshare.planning.dividers.depth_first import depth_first
from vllm_prefixshare.planning.dividers.flashforge import flashforge
from vllm_prefixshare.planning.dividers.problem import Divider
from vllm_prefixshare.records import PrefixShareError

DIVIDERS: dict[str, Divider] = {
    f.__name__: f
    for f in (
        flashforge,
        fasttree,
        deft_node,
        deft_node_chunk,
        deft_flatten,
        fixed,
        per_request,
        depth_first,
        batch_invariant,
    )
}


def get_divider(name: str) -> Divider:
    """The strategy called ``name``.

    Raises:
        PrefixShareError: unknown name; the sentence lists the known ones.
    """
    if not isinstance(name, str) or name not in DIVIDERS:
        raise PrefixShareError(f"divider {name!r} is unknown: use one of {', '.join(DIVIDERS)}.")
    return DIVIDERS[name]
