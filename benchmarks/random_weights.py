"""Random weights of a scale at which attention decides tokens.

vLLM's ``load_format="dummy"`` draws all weights, norms included, from ±0.001. Attention then adds
less to the residual stream than bfloat16 can hold: every kernel, right or wrong, gives the same
tokens. A comparison needs weights as large as trained ones.
"""

import zlib
from typing import Any

from vllm_prefixshare.integration.stats import PrefixShareWorkerExtension

#: Standard deviation of attention scores. With 3 the softmax over a long random context rests
#: on a few tokens, as in trained models; with 1 it would be their mean, which is nearly zero.
SCORE_DEVIATION = 3.0


class RandomWeights(PrefixShareWorkerExtension):
    """Mixed into vLLM's worker: ``llm.collective_rpc("randomize_weights")``.

    It has the statistics method too, because a worker takes one extension only.
    """

    def randomize_weights(self, seed: int = 0) -> int:
        """Draw all weights of a Llama model anew, in place, so that captured CUDA graphs stay
        valid. The same seed, shapes and device give the same weights.

        Returns:
            How many weights were drawn.

        Raises:
            ValueError: a parameter that a Llama model does not have, or that is packed, as
                vLLM does on CPUs.
        """
        worker: Any = self
        config, parallel = worker.model_config, worker.parallel_config
        num_qo_heads = config.get_num_attention_heads(parallel)
        num_kv_heads = config.get_num_kv_heads(parallel)
        qk_share = (num_qo_heads + num_kv_heads) / (num_qo_heads + 2 * num_kv_heads)
        drawn = 0
        for name, weight in worker.get_model().named_parameters():
            _draw(name, weight.data, qk_share, seed)
            drawn += weight.numel()
        return drawn


def _draw(name: str, weight: Any, qk_share: float, seed: int) -> None:
    """weight: ``[out, in]``, or ``[hidden]`` of a norm. qk_share: the part of the rows of a
    fused QKV projection that make queries and keys."""
    import torch

    if name.endswith("norm.weight"):
        weight.fill_(1.0)
        return
    if weight.ndim != 2:
        shape = tuple(weight.shape)
        raise ValueError(f"parameter {name} of shape {shape}: not a Llama model, or packed")
    generator = torch.Generator(weight.device).manual_seed(seed + zlib.crc32(name.encode()))
    # embeddings are looked up, all others keep the variance of what they multiply
    deviation = 1.0 if "embed_tokens" in name else weight.shape[1] ** -0.5
    weight.normal_(0.0, deviation, generator=generator)
    if "qkv_proj" in name:  # a score is a product of a query and a key
        weight[: round(weight.shape[0] * qk_share)] *= SCORE_DEVIATION**0.5
