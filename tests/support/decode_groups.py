"""Groups of prompts that decode together, where memory has no limit."""

from vllm_prefixshare.cli.decode_groups import DecodeGroup, decode_groups
from vllm_prefixshare.cli.estimated_model import GpuMemory
from vllm_prefixshare.cli.prefixes import PrefixBlocks


def one_group(blocks: PrefixBlocks, generated: int = 0) -> DecodeGroup:
    """All prompts, each with ``generated`` tokens next to the one to be computed."""
    prompts = blocks.prompts
    memory = GpuMemory(float("inf"), 0, [])
    (group,) = decode_groups(prompts, blocks, len(prompts), 2 * generated, memory)
    return group
