"""The CPU backend's metadata builder, driven as vLLM's V2 model runner does."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

if not current_platform.is_cpu():
    pytest.skip("needs vLLM's CPU platform", allow_module_level=True)

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from tests.support.variables import set_variables
from vllm_prefixshare.vllm_plugin.backends.cpu import backend as cpu
from vllm_prefixshare.vllm_plugin.observability.stats import STATS
from vllm_prefixshare.vllm_plugin.step import host_tables

HEADS, KV_HEADS, HEAD_DIM, BLOCK, MAX_REQS = 4, 2, 64, 32, 4


class Runner:
    """What builds metadata in ``GPUModelRunner``: its tables and one KV-cache group."""

    def __init__(self) -> None:
        config = VllmConfig()
        config.model_config = SimpleNamespace(
            dtype=torch.bfloat16, get_num_attention_heads=lambda parallel: HEADS
        )
        shape = HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS
        with set_current_vllm_config(config):
            impl = cpu.PrefixShareCPUImpl(*shape, None, None, "auto")
        layer = Attention.__new__(Attention)
        torch.nn.Module.__init__(layer)
        layer.impl, layer.num_heads = impl, HEADS
        config.compilation_config.static_forward_context = {"layer": layer}
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=torch.bfloat16
        )
        device = torch.device("cpu")
        self.builder = cpu.PrefixShareCPUMetadataBuilder(spec, ["layer"], config, device)
        self.buffers = InputBuffers(MAX_REQS, 64, device)
        self.tables = SimpleNamespace(
            max_num_reqs=MAX_REQS,
            input_block_tables=[torch.zeros(MAX_REQS, 8, dtype=torch.int32)],
        )
        host_tables.HOST_TABLES.keep_v2_tables(self.tables)

    def build(self, batch: InputBatch) -> cpu.PrefixShareCPUMetadata:
        """The metadata of a batch, as ``DefaultModelState.prepare_attn`` makes it."""
        num_reqs = batch.num_reqs
        common = CommonAttentionMetadata(
            query_start_loc=batch.query_start_loc,
            query_start_loc_cpu=torch.from_numpy(batch.query_start_loc_np),
            seq_lens=batch.seq_lens,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
            num_reqs=num_reqs,
            num_actual_tokens=batch.num_tokens,
            max_query_len=int(batch.num_scheduled_tokens.max()),
            max_seq_len=int(batch.seq_lens.max()),
            block_table_tensor=self.tables.input_block_tables[0][:num_reqs],
            slot_mapping=torch.full((batch.num_tokens,), -1),
        )
        return self.builder.build(0, common)

    def decodes(self, seq_len: int) -> InputBatch:
        """Two requests that share two blocks, each with one query."""
        table = self.tables.input_block_tables[0]
        table[:2, :4] = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]])
        for slot in (1, 0):
            ids = table[1 - slot, :4].tolist()
            host_tables.note_block_ids(self.tables, slot, (ids,), overwrite=True)
        host_tables.note_batch(self.tables, np.array([1, 0]))
        batch = InputBatch.make_dummy(2, 2, self.buffers)
        batch.seq_lens[:] = batch.seq_lens_cpu_upper_bound[:] = seq_len
        return batch

    def dummy(self) -> InputBatch:
        """The batch of an idle rank of data parallelism (``execute_dummy_batch``)."""
        self.tables.input_block_tables[0].zero_()
        host_tables.note_batch(self.tables, None)  # in get_dummy_block_tables
        return InputBatch.make_dummy(1, 1, self.buffers)


@pytest.fixture
def runner(monkeypatch) -> Runner:
    set_variables(monkeypatch, SHARE="always")
    runner = Runner()
    STATS.reset()
    return runner


def test_decodes_that_share_are_planned_and_counted(runner):
    assert runner.build(runner.decodes(3 * BLOCK + 5)).executor is not None
    assert STATS.decode_steps == STATS.shared_steps == STATS.plans == 1
    assert STATS.kv_tokens_stock == 2 * (3 * BLOCK + 5)
    assert STATS.kv_tokens_stock - STATS.kv_tokens_read == 2 * BLOCK


def test_dummy_batches_of_an_idle_rank_are_not_counted(runner):
    for _ in range(3):
        assert runner.build(runner.dummy()).executor is None
    assert STATS.decode_steps == STATS.plans == STATS.kv_tokens_read == 0
    runner.build(runner.decodes(3 * BLOCK + 5))
    runner.build(runner.dummy())
    assert STATS.decode_steps == 1
