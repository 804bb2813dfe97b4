"""Finds the user's own checkouts of research kernels."""

import sys

from benchmarks.peers import Options, UnavailableError


def use_checkout(options: Options, name: str, marker: str) -> None:
    """Put the folder of ``--NAME PATH`` that holds ``marker`` on ``sys.path``.

    Raises:
        UnavailableError: the option is missing, or its folder is not such a checkout.
    """
    options.require_gpu()
    root = options.checkouts[name]
    if root is None:
        raise UnavailableError(f"no checkout: give --{name} PATH")
    for folder in (root, *sorted(p for p in root.glob("*") if p.is_dir())):
        if (folder / marker).exists():
            sys.path.insert(0, str(folder.resolve()))
            return
    raise UnavailableError(f"{root} holds no {marker}")
