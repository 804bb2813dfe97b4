"""The tile geometry of each kernel, which its plans are made for."""

from vllm_prefixshare.config import TileGeometry

#: Measured with the Hopper kernel on an H200. The prices are far below a tile's on any GPU.
GPU = TileGeometry(
    half_rows=64,  # one consumer warpgroup
    kv_tile=128,
    query_cut_size=0,
    spread=False,
    spread_gain=0.03,
    lockstep_gain=0.03,
    uncached_lockstep_gain=0.08,
    cached_tokens=90,
    partial_write_us=1.0,
    merge_launch_us=3.0,
    min_merge_us=0.3,
    max_merge_us=0.7,
)
HOPPER = GPU._replace(query_cut_size=GPU.kv_tile)
PORTABLE = GPU._replace(spread=True)
MLA_HOPPER = GPU
#: CPU executors have no tile sizes: every divider plans as for a GPU.
CPU = GPU
