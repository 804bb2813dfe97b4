"""The one-shot reduction compiles under every Triton, for GPUs of three kinds and without one.

What it computes is tested on GPUs (``tests/gpu/test_one_shot.py``): its ranks wait for each other.
"""

import json
import re

import pytest
import torch

from tests.support import tritons

CAPABILITIES = ((8, 0), (9, 0), (12, 0))


def compile_all() -> None:
    """Compile the kernel for three ranks, with the first Triton on the path; prints a JSON list."""
    from vllm_prefixshare.kernels.launching import only_compile
    from vllm_prefixshare.kernels.one_shot import PROGRAMS, one_shot
    from vllm_prefixshare.kernels.precompile import stand_in

    def tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    rows = []
    for capability in CAPABILITIES:
        stand_in(capability)
        for dtype in (torch.bfloat16, torch.float32):
            rounds = tensor(PROGRAMS, dtype=torch.int32)
            memories = tensor(3, dtype=torch.int64)
            gave_up = tensor(1, dtype=torch.int32)
            with only_compile() as binaries:
                for tokens, rank in ((4, 0), (70, 2)):
                    state = (
                        tensor(tokens, 32, 128, dtype=dtype),
                        tensor(tokens, 32, dtype=torch.float32),
                    )
                    one_shot(*state, memories, rounds, gave_up, rank, 1.0)
            ptx = binaries[0].asm["ptx"]
            rows.append(
                {
                    "binaries": len({id(binary) for binary in binaries}),
                    "shared": binaries[0].metadata.shared,
                    "wide": len(re.findall(r"(?:ld|st)\.global\S*\.(?:v4\.b32|v2\.b64)", ptx)),
                    **{
                        how: len(re.findall(rf"\.sys\.{how}|\.{how}\.sys", ptx))
                        for how in ("release", "acquire")
                    },
                }
            )
    print(json.dumps(rows))


@pytest.mark.parametrize("version", tritons.RELEASES)
def test_one_binary_serves_every_batch_and_rank(version):
    program = "from tests.kernels.test_one_shot import compile_all; compile_all()"
    done = tritons.run(version, "-c", program, timeout=600)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == 2 * len(CAPABILITIES)
    for row in rows:
        assert row["binaries"] == 1
        assert row["shared"] <= 1024
        assert row["wide"] >= 3, "a load and a store to send, a load to merge, of 16 bytes"
        assert row["release"] == row["acquire"] == 3, "one for each rank"
