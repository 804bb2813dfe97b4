"""The benchmarks' worker extension: ``worker_extension_cls="bench_worker.BenchWorker"``."""

import time
import zlib
from typing import Any

from vllm_prefixshare.integration.stats import STATS, PrefixShareWorkerExtension

#: Standard deviation of attention scores. With 3, the softmax over a long random context picks a
#: few tokens, as in trained models. With 1, the output would be the mean of all tokens, which is
#: nearly zero.
SCORE_DEVIATION = 3.0


class BenchWorker(PrefixShareWorkerExtension):
    """Methods for ``llm.collective_rpc``. It includes the statistics, because a worker takes one
    extension.
    """

    def randomize_weights(self, seed: int = 0) -> int:
        """Draw all weights of a Llama or Gemma model again, in place, so that captured CUDA
        graphs stay valid. The same seed, shapes and device give the same weights; each rank of
        tensor parallelism has weights of its own. With equal ones every token of its part of the
        vocabulary would be as likely as one of another's.

        vLLM's ``load_format="dummy"`` draws all weights, norms included, from ±0.001. Attention
        then adds less to
        the residual stream than bfloat16 can represent: every kernel, right or wrong, gives the
        same tokens. A comparison needs weights as large as trained ones.

        Returns:
            The number of weights drawn.

        Raises:
            ValueError: a parameter that such a model does not have, or that is packed, as vLLM
            does on CPUs.
        """
        worker: Any = self
        config, parallel = worker.model_config, worker.parallel_config
        num_qo_heads = config.get_num_attention_heads(parallel)
        num_kv_heads = config.get_num_kv_heads(parallel)
        qk_share = (num_qo_heads + num_kv_heads) / (num_qo_heads + 2 * num_kv_heads)
        drawn = 0
        # where ranks hold the same KV heads, their projections are the same
        same_kv = parallel.tensor_parallel_size > config.get_total_num_kv_heads()
        for name, weight in worker.get_model().named_parameters():
            rank = 0 if same_kv and "qkv_proj" in name else worker.rank
            _draw(name, weight.data, qk_share, seed + rank)
            drawn += weight.numel()
        return drawn

    def metadata_times(self) -> list[float]:
        """Host microseconds in which the first KV-cache group built its attention metadata, for
        each decode-only step that made no plan, since the last call. The first call starts the
        measurement.
        """
        worker: Any = self
        builder = worker.model_runner.attn_groups[0][0].get_metadata_builder()
        times: list[float] = getattr(builder, "bench_times", [])
        builder.bench_times = []
        if "build" not in vars(builder):
            builder.build = _timed(builder.build, builder)
        return times

    def step_times(self) -> list[float]:
        """Milliseconds of each step in which a request had several query tokens, since the last
        call: from the scheduler's output to the hidden states, with nothing else on the GPU. The
        first call starts the measurement, which makes the host wait for the GPU.
        """
        worker: Any = self
        runner = worker.model_runner
        times: list[float] = getattr(runner, "bench_times", [])
        runner.bench_times = []
        if "execute_model" not in vars(runner):
            runner.execute_model = _timed_step(runner.execute_model, runner)
        return times


def _timed_step(execute_model: Any, runner: Any) -> Any:
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else bool

    def timed(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        wait()
        began = time.perf_counter()
        result = execute_model(scheduled, *args, **kwargs)
        wait()
        seconds = time.perf_counter() - began
        if max(scheduled.num_scheduled_tokens.values(), default=0) > 1:
            runner.bench_times.append(seconds * 1e3)
        return result

    return timed


def _timed(build: Any, builder: Any) -> Any:
    def timed(*args: Any, **kwargs: Any) -> Any:
        plans = STATS.plans
        began = time.perf_counter()
        metadata = build(*args, **kwargs)
        seconds = time.perf_counter() - began
        if metadata.max_query_len == 1 and STATS.plans == plans:
            builder.bench_times.append(seconds * 1e6)
        return metadata

    return timed


def _draw(name: str, weight: Any, qk_share: float, seed: int) -> None:
    """Draw one weight.

    weight: ``[out, in]``, or ``[hidden]`` of a norm. qk_share: the part of the rows of a fused QKV
        projection that makes queries and keys.
    """
    import torch

    if name.endswith("norm.weight"):
        weight.fill_(1.0)
        return
    if weight.ndim != 2:
        shape = tuple(weight.shape)
        raise ValueError(f"parameter {name} of shape {shape}: not such a model, or packed")
    generator = torch.Generator(weight.device).manual_seed(seed + zlib.crc32(name.encode()))
    # embeddings are looked up; every other weight keeps the variance of its input
    deviation = 1.0 if "embed_tokens" in name else weight.shape[1] ** -0.5
    weight.normal_(0.0, deviation, generator=generator)
    if "qkv_proj" in name:  # a score is a product of a query and a key
        weight[: round(weight.shape[0] * qk_share)] *= SCORE_DEVIATION**0.5
