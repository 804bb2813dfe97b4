"""From block ids to a DecodePlan. NumPy and the standard library only.

Read in this order: ``prefix_tree``, ``grouping``, ``dividers``, ``scheduler``, ``plan``;
``planner`` runs them for one batch after the other.
"""
