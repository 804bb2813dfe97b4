"""The words of a work tile in ``tile_info``, as the host writes and the Hopper kernel reads them.

NEXT_TILE: 1 + the worker's next tile, 0 if there is none. LOW_REQS: requests of the low half.
LEAVES_PARTIALS: 1 if any request of the tile has a partial result, else 0.
"""

NUM_REQS, NUM_RUNS, WIDE_RUNS, LOW_RUNS, NEXT_TILE, LOW_REQS, LEAVES_PARTIALS = range(7)
WORDS = 8  # from tile to tile: 32 bytes, a sector of memory
