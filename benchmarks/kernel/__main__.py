"""``python -m benchmarks.kernel``."""

import sys

from benchmarks.kernel.bench import main

sys.exit(main())
