"""The Ray example that needs GPUs: one model on two of them, by vLLM's Ray executor.

python -m pytest -m gpu tests/gpu/test_gpu_ray.py
"""

import os
import subprocess
import sys

from tests.examples.test_examples import EXAMPLES
from tests.examples.test_ray import RAY_CLUSTER, small_options, table
from tests.support.engine import DEFAULT_ENVIRONMENT
from tests.support.gpu_layer import TWO_GPUS, on_gpu_with

pytestmark = [*on_gpu_with("vllm", "ray"), TWO_GPUS]


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
