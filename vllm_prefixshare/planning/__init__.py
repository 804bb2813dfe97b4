"""From block ids to a DecodePlan. NumPy, and Numba for the loops that a step waits for.

Read in this order: ``prefix_tree``, ``grouping``, ``dividers``, ``windows``, ``depth_first``,
``scheduler``, ``plan``; ``planner`` runs them for one batch after the other.
"""
