"""The Ray example that needs GPUs: one model on two of them, by vLLM's Ray executor.

python -m pytest -m gpu tests/gpu/test_gpu_ray.py
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from tests.examples.test_examples import EXAMPLES
from tests.examples.test_ray import RAY_CLUSTER, small_options, table
from tests.support.engine import DEFAULT_ENVIRONMENT
from tests.support.gpu_layer import ON_GPU

NEEDED = [name for name in ("vllm", "ray") if importlib.util.find_spec(name) is None]
pytestmark = [
    *ON_GPU,
    pytest.mark.skipif(bool(NEEDED), reason=f"needs {', '.join(NEEDED)}"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"
    ),
]


def test_both_ranks_share(tmp_path):
    options = {**small_options(tmp_path), "--dtype": "bfloat16"}
    printed = tmp_path / "printed"
    with printed.open("w") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, RAY_CLUSTER / "tensor_parallel.py"),
                *(str(word) for option in options.items() for word in option),
            ],
            env={
                **os.environ,
                **DEFAULT_ENVIRONMENT,
                "PYTHONPATH": os.pathsep.join(map(str, [EXAMPLES.parent, *sys.path])),
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        status = process.wait(timeout=300)
    finally:
        process.kill()
        print(printed.read_text()[-8000:])
    assert status == 0
    # the script refuses ranks whose counts differ
    (each, _) = table(printed.read_text())["2 ranks"]
    assert each[2] > 2, "four questions about each document"
