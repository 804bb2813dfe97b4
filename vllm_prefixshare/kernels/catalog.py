"""What is known of each GPU kernel without torch and Triton: which shapes it serves, its tiles, and
the limits of its plans.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from vllm_prefixshare.config import (
    AttentionConfig,
    TileGeometry,
    part_size,
    require_launchable,
)
from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.kernels.geometry import HOPPER, MLA_HOPPER, PORTABLE
from vllm_prefixshare.kernels.hopper.layout import (
    MAX_HEAD_DIM,
    MIN_PIECE,
    hopper_serves,
    kv_tile,
)

if TYPE_CHECKING:
    import torch

#: layouts store the rows of a tile that read a part in 16 bits, one of them a sign
MAX_ENCODABLE_ROWS = 32767
#: KiB of shared memory that a thread block may have (CUDA's programming guide, "Technical
#: specifications per compute capability")
SHARED_MEMORY = {
    (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227,
    (10, 0): 227, (10, 3): 227, (11, 0): 227, (12, 0): 99, (12, 1): 99,
}  # fmt: skip


class Gpu(NamedTuple):
    """Properties of a GPU that kernels depend on.

    capability: compute capability, as in ``(9, 0)``.
    multi_processor_count: number of multiprocessors.
    shared_memory: bytes of shared memory that a thread block may have.
    """

    capability: tuple[int, int]
    multi_processor_count: int
    shared_memory: int

    @classmethod
    def of(cls, device: "torch.device") -> "Gpu":
        """The GPU behind a CUDA device."""
        import torch

        found = torch.cuda.get_device_properties(device)
        return cls(
            (found.major, found.minor),
            found.multi_processor_count,
            found.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        )


class KernelLimits(NamedTuple):
    """What plans for a kernel are made with, for one layer and GPU.

    geometry, num_workers, max_tile_requests, max_tile_runs: see ``PlannerConfig``.
    divider: name of the divider that measures best with this kernel.
    """

    geometry: TileGeometry
    num_workers: int
    max_tile_requests: int
    max_tile_runs: int = 1 << 30
    divider: str = "depth_first"


@dataclass(frozen=True, slots=True)
class QTile:
    """Tile sizes and occupancy of a kernel.

    rows: query rows of a tile; a power of two of at least 16.
    kv_tile: tokens that one step of the inner loop multiplies.
    warps, stages: warps of a CTA; KV tiles in flight.
    blocks_per_sm: CTAs that share a multiprocessor.
    columns: maximum number of columns of queries, K and V in one product; a power of two.
    hoist: which loops LICM may hoist out of (0 none, 1 KV loops, 2 all). A hoisted value takes a
        register throughout the loop.
    """

    rows: int
    kv_tile: int
    warps: int
    stages: int
    blocks_per_sm: int
    columns: int = 64
    hoist: int = 2

    def num_workers(self, multiprocessors: int, num_kv_heads: int, rows_per_request: int) -> int:
        """Work queues whose CTAs fill the GPU."""
        per_worker = num_kv_heads * self.chunks(rows_per_request)
        workers = max(1, multiprocessors * self.blocks_per_sm // per_worker)
        # even: two windows with equally many KV splits read their shared KV in lockstep
        return workers - workers % 2 if workers > 2 else workers

    def chunks(self, rows_per_request: int) -> int:
        """Tiles that the query rows of a request fill."""
        return -(-rows_per_request // self.rows)


class HopperShape(NamedTuple):
    """Compile-time shape of the Hopper kernel, which takes it as one argument: fields only, because
    Triton keeps binaries by the text of their arguments.

    rows: query rows of a request on one KV head. chunks: CTAs for them, 128 rows each.
    padded_dim: ``head_dim`` rounded up to a power of two.
    window: tokens that a query sees, its own included; 0 for all.
    piece: tokens of a block that TMA fetches at once, a power of two.
    kv_tile: tokens that one iteration of the inner loop multiplies. stages: KV tiles in shared
        memory.
    max_tile_requests, max_tile_runs: maximum number of requests, and of KV ranges, of a work tile;
        KV ranges are a power of two.
    """

    num_qo_heads: int
    num_kv_heads: int
    query_len: int
    rows: int
    chunks: int
    head_dim: int
    padded_dim: int
    block_size: int
    window: int
    piece: int
    kv_tile: int
    stages: int
    max_tile_requests: int
    max_tile_runs: int


def hopper_shape(attention: AttentionConfig, query_len: int) -> HopperShape:
    """Compile-time shape of the kernel for a layer."""
    rows = query_len * attention.gqa_group_size
    padded_dim = 1 << (attention.head_dim - 1).bit_length()
    stages = {64: 4, 128: 3, 256: 2}
    if attention.kv_dtype is not None:  # half the bytes, and room for V twice in float16
        stages = {64: 6, 128: 4, 256: 3}
    max_tile_requests = max(1, 2 * (64 // rows))  # the same number in each half
    return HopperShape(
        attention.num_qo_heads,
        attention.num_kv_heads,
        query_len,
        rows,
        -(-rows // 128),
        attention.head_dim,
        padded_dim,
        attention.block_size,
        attention.sliding_window or 0,
        part_size(attention.block_size),
        kv_tile(attention.head_dim),
        stages[padded_dim],
        max_tile_requests,
        # each request has a private range, and n requests share at most n - 1 nodes
        max(32, 1 << (2 * max_tile_requests - 1).bit_length()),
    )


def q_tile(head_dim: int, gpu: Gpu, quantised: bool = False) -> QTile:
    """The Q tile for a GPU: two thread blocks on a multiprocessor where it has room for them,
    so that one multiplies while the other computes its softmax.

    A product takes no more columns than there are rows. Else Triton gives each warp all rows and
    some of the columns where it has ``mma`` (not ``wgmma``), and weights and sums pass through
    shared memory.

    Args:
        quantised: the KV cache has one byte per element. Widening takes registers: with ``mma``
            (not ``wgmma``) 64 tokens would spill; more where bits are shifted for it.
    """
    large = gpu.shared_memory >= 160 << 10  # data-centre GPUs; the others have 99 KiB
    stages = 3 if gpu.shared_memory >= 227 << 10 else 2
    if head_dim > 256:  # more rows or tokens spill
        tokens = 32 if large else 16
        tile = QTile(32, tokens, 8, 2, 1, 512) if quantised else QTile(32, tokens, 4, 2, 1)
    elif head_dim > 128:
        if quantised and shifts_bits(gpu):
            tile = QTile(64, 32, 8, 2, 1, 256)
        elif quantised:
            tile = QTile(64, 32, 4, stages, 2)
        else:
            tile = QTile(64, 32, 4, 2, 2) if large else QTile(64, 32, 4, 3, 1)
    elif quantised and stages < 3:
        tile = QTile(64, 32, 4, 3, 2)
    else:
        if gpu.capability[0] in (10, 11) and not quantised and head_dim > 64:
            stages = 2  # products there take some memory: three leave no room for two blocks
        tile = QTile(64, 64, 4, stages, 2) if large else QTile(64, 64, 4, 2, 1)
    return replace(tile, hoist=hoisting(gpu.capability, head_dim))


def shifts_bits(gpu: Gpu) -> bool:
    """Whether Triton has no e4m3 for a GPU, so that the kernel widens the bits."""
    return gpu.capability < (8, 9)


def hoisting(capability: tuple[int, int], head_dim: int) -> int:
    """``QTile.hoist`` for a GPU, by what its code spills (docs/notes/portable-kernel.md). Where
    less is moved, most binaries for Blackwell spill nothing, under any Triton, for up to a
    twentieth more instructions in 12.0's loops over KV tiles; but heads of 256 spill more on 12.0.
    Code for other GPUs would spill more under some Tritons.
    """
    if capability[0] == 12 and 128 < head_dim <= 256:
        return 2
    return {10: 1, 12: 0}.get(capability[0], 2)


#: Tile of the MLA kernel: 64 rows of outputs fill half of the registers, two KV tiles and the
#: queries fill shared memory.
LATENT_TILE = QTile(rows=64, kv_tile=64, warps=4, stages=2, blocks_per_sm=1)


def requests_of_a_tile(rows: int) -> int:
    """Maximum number of requests of a tile, at least 1. rows: query rows of a request, its heads
    times its query tokens.
    """
    return max(1, LATENT_TILE.rows // rows)


def hopper_limits(attention: AttentionConfig, query_len: int, gpu: Gpu) -> KernelLimits:
    """Limits of plans for the Hopper kernel."""
    shape = hopper_shape(attention, query_len)
    workers = max(1, gpu.multi_processor_count // (shape.num_kv_heads * shape.chunks))
    return KernelLimits(HOPPER, workers, shape.max_tile_requests, shape.max_tile_runs)


def portable_limits(attention: AttentionConfig, query_len: int, gpu: Gpu) -> KernelLimits:
    """Limits of plans for the portable kernel."""
    tile = q_tile(attention.head_dim, gpu, attention.kv_dtype is not None)
    rows = query_len * attention.gqa_group_size
    workers = tile.num_workers(gpu.multi_processor_count, attention.num_kv_heads, rows)
    return KernelLimits(PORTABLE, workers, max(1, tile.rows // rows))


def latent_limits(attention: AttentionConfig, query_len: int, gpu: Gpu) -> KernelLimits:
    """Limits of plans for the MLA kernel."""
    rows = query_len * attention.num_qo_heads
    workers = LATENT_TILE.num_workers(gpu.multi_processor_count, 1, rows)
    return KernelLimits(MLA_HOPPER, workers, requests_of_a_tile(rows))


class CatalogEntry(NamedTuple):
    """What is known of a kernel.

    class_name: its class in the module ``launch`` of its folder.
    limits: limits of its plans, by layer, maximum number of query tokens and GPU.
    fast_windows: in a sliding window it is as fast as FlashAttention if nothing is shared.
    """

    class_name: str
    limits: Callable[[AttentionConfig, int, Gpu], KernelLimits]
    fast_windows: bool = False


#: By the name of the kernel's folder.
CATALOG = {
    "hopper": CatalogEntry("HopperKernel", hopper_limits, fast_windows=True),
    "portable": CatalogEntry("PortableKernel", portable_limits),
    "mla_hopper": CatalogEntry("LatentHopperKernel", latent_limits),
}


def candidates(
    attention: AttentionConfig, gpu: Gpu, kernel: str = "auto", query_len: int = 1
) -> list[str]:
    """Kernels that serve this shape on this GPU, best first; if one is named, only that.

    Raises:
        PrefixShareError: there is none.
    """
    require_launchable(kernel, query_len)
    if attention.dtype not in ("bfloat16", "float16"):
        raise PrefixShareError(
            f"dtype must be bfloat16 or float16 on a GPU, got {attention.dtype}."
        )
    major, minor = gpu.capability
    if major < 8:
        raise PrefixShareError(
            f"This GPU has compute capability {major}.{minor}, 8.0 is the minimum: choose another "
            "attention backend."
        )
    if attention.kv_lora_rank is not None:
        return _latent_candidates(attention, gpu, kernel, query_len)
    serving = ["hopper"] if hopper_serves(attention, gpu.capability) else []
    serving.append("portable")
    if kernel == "auto":
        return serving
    if kernel not in serving:
        raise PrefixShareError(
            "kernel 'hopper' needs compute capability 9.0 and blocks of a multiple of "
            f"{MIN_PIECE} tokens, got {major}.{minor} and {attention.block_size}, and has no "
            f"ALiBi, no head_dim above {MAX_HEAD_DIM} and no quantised KV cache with other "
            "queries: use kernel='auto'."
        )
    return [kernel]


def _latent_candidates(
    attention: AttentionConfig, gpu: Gpu, kernel: str, query_len: int
) -> list[str]:
    rows = query_len * attention.num_qo_heads
    if rows > MAX_ENCODABLE_ROWS:
        raise PrefixShareError(
            "the kernel for a latent KV cache (kv_lora_rank) takes at most "
            f"{MAX_ENCODABLE_ROWS} rows of a request, its heads times max_query_len, got {rows}."
        )
    if kernel == "portable" or gpu.capability != (9, 0):
        raise PrefixShareError(
            "a latent KV cache (kv_lora_rank) has a kernel for compute capability 9.0 only, got "
            f"{gpu.capability[0]}.{gpu.capability[1]} and kernel={kernel!r}."
        )
    if attention.block_size % 8:  # rows of a swizzled box
        raise PrefixShareError(
            "the kernel for a latent KV cache (kv_lora_rank) takes blocks of a multiple of 8 "
            f"tokens, got {attention.block_size}."
        )
    return ["mla_hopper"]
