"""``python -m benchmarks.whole_call``."""

import sys

from benchmarks.whole_call.bench import main

sys.exit(main())
