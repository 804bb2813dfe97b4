"""The one-shot reduction without a GPU: under Triton's interpreter, each rank in a process of its
own and all in memory that they share, and compiled under every Triton for GPUs of three kinds.
"""

import json
import os
import re
import time

import pytest
import torch
import torch.multiprocessing as multiprocessing

from tests.support import tritons
from vllm_prefixshare import merge_states

CAPABILITIES = ((8, 0), (9, 0), (12, 0))
HEADS, HEAD_DIM = 4, 80
#: of each launch: one program, several, and again; all use the same memory
TOKENS = (1, 40, 2, 40, 3)
DEADLINE = 120  # seconds; imports take most of them


def states(tokens: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A state for each rank; the last query has no token on the last rank, the first on none."""
    generator = torch.Generator().manual_seed(tokens)
    outs = torch.randn(size, tokens, HEADS, HEAD_DIM, generator=generator).bfloat16()
    lses = torch.randn(size, tokens, HEADS, generator=generator) * 5
    for ranks, query in ((slice(-1, None), -1), (slice(None), 0)):
        lses[ranks, query], outs[ranks, query] = -torch.inf, torch.nan
    return outs, lses


def rank_in_interpreter(rank, memory, late, tokens_of_launches, patience, results) -> None:
    """Launch with the states of this rank, ``late`` seconds between sending and reading."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    from vllm_prefixshare.kernels import one_shot

    def nanoseconds() -> int:  # which is read between sending and reading
        time.sleep(late)
        return time.monotonic_ns()

    one_shot._nanoseconds = nanoseconds
    addresses = torch.tensor([m.data_ptr() for m in memory])
    rounds = torch.zeros(one_shot.PROGRAMS, dtype=torch.int32)
    gave_up = torch.zeros(1, dtype=torch.int32)
    max_rows = max(TOKENS) * HEADS
    found = []
    for tokens in tokens_of_launches:
        outs, lses = (x[rank] for x in states(tokens, len(memory)))
        mine = rounds, gave_up, rank, max_rows
        out, lse = one_shot.one_shot(outs, lses, addresses, *mine, patience)
        found.append((out.float().numpy(), lse.numpy()))
    results.send((found, gave_up.item(), rounds.tolist()))


def in_processes(launches: list[tuple[int, ...]], late: dict[int, float], patience: float = 60.0):
    """What each rank found, whether it gave up, and its rounds.

    Args:
        launches: for each rank the tokens of its launches.
    """
    from vllm_prefixshare.kernels.one_shot import one_shot_bytes

    size = len(launches)
    # not forked as engines are: Triton reads TRITON_INTERPRET when it is imported
    context = multiprocessing.get_context("spawn")
    num_bytes = one_shot_bytes(size, max(TOKENS) * HEADS, HEAD_DIM, 2)
    memory = [torch.zeros(num_bytes, dtype=torch.uint8).share_memory_() for _ in range(size)]
    pipes, processes = [], []
    try:
        for rank, tokens in enumerate(launches):
            receiver, sender = context.Pipe(duplex=False)
            arguments = rank, memory, late.get(rank, 0.0), tokens, patience, sender
            processes.append(context.Process(target=rank_in_interpreter, args=arguments))
            processes[-1].start()
            sender.close()
            pipes.append(receiver)
        for pipe in pipes:
            assert pipe.poll(DEADLINE), "a rank hangs"
        return [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize(("size", "late"), [(2, {1: 0.1}), (3, {0: 0.1})])
def test_a_rank_that_is_late_reads_what_was_sent_to_it(size, late):
    """The others have gone on to the next launch, of another number of rows."""
    ranks = in_processes([TOKENS] * size, late)
    for launch, tokens in enumerate(TOKENS):
        outs, lses = states(tokens, size)
        wanted, wanted_lse = merge_states(outs, lses)
        for found, gave_up, _ in ranks:
            out, lse = map(torch.from_numpy, found[launch])
            torch.testing.assert_close(lse, wanted_lse, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(out, wanted.float(), rtol=1e-2, atol=1e-2)
            assert torch.equal(out, torch.from_numpy(ranks[0][0][launch][0])), "the same bits"
            assert gave_up == 0


def test_a_rank_whose_other_has_ended_gives_up():
    """Once a program has given up it does nothing: what it would wait for will not come."""
    began = time.monotonic()
    (_, gave_up, rounds), (_, others, _) = in_processes([(1, 5, 5), (1,)], {}, patience=5.0)
    assert (gave_up, others) == (1, 0)
    assert rounds[:3] == [-1, -1, 0]
    assert time.monotonic() - began < DEADLINE


def compile_all() -> None:
    """Compile the kernel for three ranks, with the first Triton on the path; prints a JSON list."""
    from vllm_prefixshare.kernels.aot.dispatch import only_compile
    from vllm_prefixshare.kernels.aot.gpu_target import stand_in
    from vllm_prefixshare.kernels.one_shot import PROGRAMS, one_shot

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
                    one_shot(*state, memories, rounds, gave_up, rank, 70 * 32, 1.0)
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
    program = "from tests.unit.kernels.test_one_shot import compile_all; compile_all()"
    done = tritons.run(version, "-c", program, timeout=600)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == 2 * len(CAPABILITIES)
    for row in rows:
        assert row["binaries"] == 1
        assert row["shared"] <= 1024
        assert row["wide"] >= 3, "a load and a store to send, a load to merge, of 16 bytes"
        assert row["release"] == row["acquire"] == 3, "one for each rank"
