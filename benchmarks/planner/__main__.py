"""``python -m benchmarks.planner``."""

import sys

from benchmarks.planner.bench import main

sys.exit(main())
