"""Tables on standard output."""

from collections.abc import Sequence


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print columns as wide as their longest cell, the first one aligned left, others right.

    Args:
        rows: the header first. A row may have fewer cells, of which the last one is not aligned.
    """
    full = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    for row in rows:
        first, *others = row
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=False)]
        print("  ".join(cells))
