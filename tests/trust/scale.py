"""How much each test tries: CI's share by default, the full run of ``make trust`` by variables."""

import os
import sys

#: random event sequences over all paths; random forests for each kernel
SEQUENCES = int(os.environ.get("TRUST_SEQUENCES", "300"))
FORESTS = int(os.environ.get("TRUST_FORESTS", "40"))


def report(line: str) -> None:
    """Say what was really tried, past pytest's capture: figures for ``docs/fidelity.md``."""
    print(f"\ntrust: {line}", file=sys.__stderr__, flush=True)
