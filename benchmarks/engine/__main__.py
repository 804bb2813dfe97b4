"""``python -m benchmarks.engine``."""

import sys

from benchmarks.engine.bench import main

sys.exit(main())
