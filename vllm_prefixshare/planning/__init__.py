"""From a forest to a DecodePlan. NumPy, and Numba for the loops that a step waits for.

Read in this order: ``planner`` (one batch after the other), ``sharing``, ``grouping``,
``dividers``, ``plan`` (with the scheduler, ``longest_first``). ``invariants`` checks a plan.
"""
