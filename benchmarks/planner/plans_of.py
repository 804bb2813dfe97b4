"""Makes plans with the ``vllm_prefixshare`` that is on the path, for ``benchmarks.planner.plans``.

Reads pickled requests from standard input: the arguments of ``PrefixShareDecodeWrapper`` and those
of its ``plan``. Writes each plan's fields to standard output, pickled; what anybody prints goes to
standard error.
"""

import os
import pickle
import sys
from dataclasses import fields


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    from vllm_prefixshare import PrefixShareDecodeWrapper

    wrappers: dict[str, PrefixShareDecodeWrapper] = {}
    while True:
        try:
            arguments, batch = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        key = repr(arguments)
        if key not in wrappers:
            wrappers = {key: PrefixShareDecodeWrapper(**arguments)}
        plan = wrappers[key].plan(*batch)
        pickle.dump({f.name: getattr(plan, f.name) for f in fields(plan)}, answers)
        answers.flush()


if __name__ == "__main__":
    main()
