"""The words of a work tile in ``tile_info``, as the host writes and the portable kernel reads them.

FIRST_RUN, END_RUN: runs of whole KV tiles. FIRST_PART: of the lists that fill KV tiles together.
PLANNED_KV_TILES, NEW_KV_TILES: KV tiles of the parts that were planned, and of those for tokens
that come after the plan.
"""

FIRST_SLOT, NUM_REQS, FIRST_RUN, END_RUN, FIRST_PART, PLANNED_KV_TILES, NEW_KV_TILES = range(7)
WORDS = 8  # from tile to tile: 32 bytes, a sector of memory
