"""Makes ``tests.support`` importable: benchmarks run from a checkout and use its helpers."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
