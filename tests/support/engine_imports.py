"""What an engine imports, in the environment of one: see ``engine.fork_engines``."""

import gc
import os

from tests.support.engine import DEFAULT_ENVIRONMENT

os.environ.update({**DEFAULT_ENVIRONMENT, **os.environ})

import vllm.entrypoints.llm  # noqa: F401

gc.freeze()  # engines look for no garbage in what they share
