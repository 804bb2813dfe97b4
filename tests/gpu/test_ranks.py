"""Tree reduction and ring attention over NCCL, on two GPUs, against attention in float64.

python -m pytest -m gpu tests/gpu/test_ranks.py
"""

import hashlib
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from tests.batches import paged_batch
from tests.distributed.at_work import WAYS, own_part, whole
from vllm_prefixshare import PrefixShareDecodeWrapper
from vllm_prefixshare.distributed.ring import RingDecode
from vllm_prefixshare.distributed.shards import Shard
from vllm_prefixshare.distributed.tree_reduction import TreeDecode

from .layer import ON_GPU

RANKS = 2
pytestmark = [
    *ON_GPU,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.device_count() < RANKS, reason="needs two GPUs"
    ),
]
#: documents of 21 blocks; and one request of 5 tokens, which leaves a shard empty
CASES: dict[str, dict[str, Any]] = {
    "documents": {"document_blocks": 21, "private_blocks": 9},
    "one short request": {"documents": 1, "requests": 1},
}


def at_work(rank: int, port: int, results: Any) -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    device = torch.device("cuda", rank)

    def wrapper() -> PrefixShareDecodeWrapper:
        return PrefixShareDecodeWrapper(
            num_qo_heads=32, num_kv_heads=8, head_dim=128, block_size=16, device=device
        )

    decoders: dict[str, Any] = {
        way: RingDecode(wrapper) if way == "ring" else TreeDecode(wrapper(), reduction=way)
        for way in WAYS
    }
    found = {}
    for case, options in CASES.items():
        batch = paged_batch(**options, heads=(32, 8), head_dim=128, dtype=torch.bfloat16)
        if case == "one short request":
            batch.seq_lens[:] = 5
        wanted, wanted_lse = whole(batch)
        table, lens, caches = own_part(batch, rank, RANKS)
        # a GPU kernel multiplies whole blocks: tokens past a length must be finite
        on_gpu = [c.nan_to_num().to(device) for c in caches]
        q = batch.q.to(device)
        part = Shard(*on_gpu, *(torch.from_numpy(x).to(device) for x in (table, lens)))
        for way, decoder in decoders.items():
            decoder.plan(table, lens)
            out, lse = decoder.run(q, *(on_gpu if way == "ring" else [part]))
            error = (out.cpu().double() - wanted).norm() / wanted.norm()
            lse_error = (lse.cpu().double() - wanted_lse).abs().max()
            bits = hashlib.sha256(out.view(torch.int16).cpu().numpy().tobytes()).hexdigest()
            found[case, way] = float(error), float(lse_error), bits
    results.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks() -> dict[int, dict[Any, Any]]:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    # a free port, which the first rank opens again
    probe = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = probe.port
    del probe
    multiprocessing.spawn(at_work, (port, results), nprocs=RANKS)
    return dict(results.get() for _ in range(RANKS))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_every_rank_has_the_attention_over_all_tokens(ranks, case, way):
    for error, lse_error, _ in (found[case, way] for found in ranks.values()):
        assert error < 8e-3 and lse_error < 2e-2
    if way != "ring":  # ranks that continue decoding must choose the same token
        assert ranks[0][case, way][2] == ranks[1][case, way][2]
