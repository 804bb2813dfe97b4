"""From block ids to a DecodePlan. NumPy, and Numba for the loops that a step waits for.

Read in this order: ``prefix_tree``, ``grouping``, ``dividers``, ``windows``, ``depth_first``,
``scheduler``, ``plan``; ``planner`` runs them for one batch after the other, as long as
``known_batch`` says that the last plan no longer holds. ``linked_tiles`` writes a plan for the
Hopper kernel, ``invariants`` checks one, ``token_tree`` is of queries that form a tree.
"""
