"""Tables on standard output, and files."""

from collections.abc import Sequence
from pathlib import Path

from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.utils.trusted_files import write_whole


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


def write_file(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all. What is no plain file, such as /dev/stdout,
    or a link to a file, is written to and not replaced.

    Raises:
        PrefixShareError: it cannot be written.
    """
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_bytes(data)
        else:
            write_whole(path, data)
    except OSError as e:
        raise PrefixShareError(f"{path} cannot be written ({e}): name another file.") from None
