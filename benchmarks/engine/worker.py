"""The benchmarks' worker extension, ``support.program.WORKER``."""

import time
import zlib
from typing import Any, NamedTuple

from benchmarks.engine.breakdown import StepProfiler
from vllm_prefixshare.vllm_plugin.observability.stats import STATS, PrefixShareWorkerExtension

#: Standard deviation of attention scores. With 3, the softmax over a long random context picks a
#: few tokens, as in trained models. With 1, the output would be the mean of all tokens, which is
#: nearly zero.
SCORE_DEVIATION = 3.0
#: what MLA layers make of ``kv_b_proj`` when weights are loaded
ABSORBED = (".W_UK_T", ".W_UV")


class Drawing(NamedTuple):
    """What a weight's name does not say.

    qk_share: the part of the rows of a fused QKV projection that makes queries and keys.
    qk_norms: whether queries and keys are normed, so that only their norms change the scores.
    one_plus: whether a norm scales by 1 + weight, as Gemma's and Qwen3-Next's do.
    """

    qk_share: float
    qk_norms: bool
    one_plus: bool


class BenchWorker(PrefixShareWorkerExtension):
    """Methods for ``llm.collective_rpc``. It includes the statistics, because a worker takes one
    extension.
    """

    def randomize_weights(self, seed: int = 0) -> int:
        """Draw all weights of a model of ``shapes.py`` again, in place, so that captured
        CUDA graphs stay valid. The same seed, shapes and device give the same weights; each rank of
        tensor parallelism has weights of its own. With equal ones every token of its part of the
        vocabulary would be as likely as one of another's.

        vLLM's ``load_format="dummy"`` draws all weights, norms included, from ±0.001. Attention
        then adds less to the residual stream than bfloat16 can represent: every kernel, right or
        wrong, gives the same tokens. A comparison needs weights as large as trained ones.

        Returns:
            The number of weights drawn.

        Raises:
            ValueError: a parameter that such a model does not have, or that is packed, as vLLM
            does on CPUs.
        """
        from vllm.model_executor.layers.linear import ReplicatedLinear

        worker: Any = self
        config, parallel = worker.model_config, worker.parallel_config
        num_qo_heads = config.get_num_attention_heads(parallel)
        num_kv_heads = config.get_num_kv_heads(parallel)
        qk_share = (num_qo_heads + num_kv_heads) / (num_qo_heads + 2 * num_kv_heads)
        drawn = 0
        # where ranks hold the same KV heads, their projections are the same; so are the routers of
        # experts, and the projections to latents
        same_kv = parallel.tensor_parallel_size > config.get_total_num_kv_heads()
        model = worker.get_model()
        for name, weight in model.named_parameters():
            if name.endswith(ABSORBED):
                continue
            module = model.get_submodule(name.rpartition(".")[0])
            parent = model.get_submodule(name.rsplit(".", 2)[0])
            drawing = Drawing(
                qk_share,
                qk_norms=hasattr(parent, "q_norm"),
                one_plus=type(module).__name__.startswith("Gemma"),
            )
            same = isinstance(module, ReplicatedLinear) or (same_kv and "qkv_proj" in name)
            rank = 0 if same else worker.rank
            _draw(name, weight.data, drawing, seed + rank)
            drawn += weight.numel()
        _absorb(model)
        return drawn

    def metadata_times(self) -> list[float]:
        """Host microseconds in which the first KV-cache group of full attention built its
        metadata, for each decode-only step that made no plan, since the last call. The first call
        starts the measurement.
        """
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        worker: Any = self
        groups = [group for kind in worker.model_runner.attn_groups for group in kind]
        # a group of gated delta nets has other metadata
        full = [group for group in groups if isinstance(group.kv_cache_spec, FullAttentionSpec)]
        builder = (full or groups)[0].get_metadata_builder()
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

    def begin_breakdown(self, num_reqs: int) -> None:
        """Profile the GPU's kernels in some of the next steps in which each of ``num_reqs``
        requests has one query token.
        """
        worker: Any = self
        runner = worker.model_runner
        runner.bench_profiler = StepProfiler(runner, num_reqs)

    def end_breakdown(self) -> dict[str, Any]:
        """What was profiled since ``begin_breakdown``: see ``StepProfiler.end``."""
        worker: Any = self
        found: dict[str, Any] = worker.model_runner.bench_profiler.end()
        return found


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
    # FlashInfer's metadata has no max_query_len, what all of them are built from has
    def timed(common_prefix_len: int, common_attn_metadata: Any, *args: Any, **options: Any) -> Any:
        plans = STATS.plans
        began = time.perf_counter()
        metadata = build(common_prefix_len, common_attn_metadata, *args, **options)
        seconds = time.perf_counter() - began
        if common_attn_metadata.max_query_len == 1 and STATS.plans == plans:
            builder.bench_times.append(seconds * 1e6)
        return metadata

    return timed


def _draw(name: str, weight: Any, drawing: Drawing, seed: int) -> None:
    """Draw one weight: ``[out, in]``, ``[experts, out, in]`` or ``[channels, 1, width]``, or what
    a norm, a bias, sinks or the decay of a gated delta net have.
    """
    import torch

    generator = torch.Generator(weight.device).manual_seed(seed + zlib.crc32(name.encode()))
    kind = name.rpartition(".")[2]
    if name.endswith("norm.weight"):
        in_scores = drawing.qk_norms and name.endswith(("q_norm.weight", "k_norm.weight"))
        weight.fill_((SCORE_DEVIATION**0.5 if in_scores else 1.0) - drawing.one_plus)
    elif kind == "dt_bias":  # it and A_log as transformers starts them
        weight.fill_(1.0)
    elif kind == "A_log":
        weight.uniform_(1.0, 16.0, generator=generator).log_()
    elif kind == "sinks":
        weight.normal_(0.0, SCORE_DEVIATION, generator=generator)
    elif kind.endswith("bias"):
        weight.zero_()
    elif weight.ndim < 2:
        shape = tuple(weight.shape)
        raise ValueError(f"parameter {name} of shape {shape}: not such a model, or packed")
    else:
        # embeddings are looked up; every other weight keeps the variance of its input
        deviation = 1.0 if "embed" in name else weight.shape[-1] ** -0.5
        weight.normal_(0.0, deviation, generator=generator)
        if "qkv_proj" in name and not drawing.qk_norms:  # a score is a product of query and key
            weight[: round(weight.shape[0] * drawing.qk_share)] *= SCORE_DEVIATION**0.5
        elif name.endswith((".q_proj.weight", ".q_b_proj.weight")):  # keys come of latents
            weight *= SCORE_DEVIATION


def _absorb(model: Any) -> None:
    """Copy the projections of latents to where MLA layers keep them for decode, which vLLM does
    when it loads weights. Where those are views, this changes nothing.
    """
    for module in model.modules():
        if getattr(module, "W_UK_T", None) is None:
            continue
        weight = module.kv_b_proj.weight.data
        heads = weight.view(module.W_UK_T.shape[0], -1, weight.shape[1])
        keys, values = heads.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
        module.W_UK_T.data.copy_(keys)
        module.W_UV.data.copy_(values.transpose(1, 2))
