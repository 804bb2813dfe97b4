"""Runs commands as a user's shell runs them."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support import processes

PROGRAM = "import sys; from vllm_prefixshare.cli.main import main; sys.exit(main())"


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``vllm-prefixshare`` with these arguments in a separate process."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return processes.run(command, status=None, timeout=300, **environment)


def write_model(folder: Path, **config: object) -> Path:
    """A folder with the ``config.json`` of a small model, with these changes."""
    shape = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", **shape, "num_hidden_layers": 4, **config})
    )
    return folder
