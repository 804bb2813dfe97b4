"""Teacher forcing in decode: a logits processor that allows a request one token per step.

vLLM's ``prompt_logprobs`` come from prefill. Here a given text is decoded token by token, and the
log-probabilities that vLLM reports are those before the processor.

    LLM(..., logits_processors=[engine_steps.FORCED_TOKENS])
    SamplingParams(temperature=0, max_tokens=len(tokens), logprobs=1, ignore_eos=True,
                   extra_args={"forced_tokens": tokens})

vLLM's V2 model runner supports no logits processors: set VLLM_USE_V2_MODEL_RUNNER=0.
"""

from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class ForcedTokens(AdapterLogitsProcessor):
    """Serves requests with ``extra_args["forced_tokens"]``, a list of token ids."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        """A function of (output token ids so far, logits ``[vocab]``), or None."""
        forced = (params.extra_args or {}).get("forced_tokens")
        if forced is None:
            return None

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            token = forced[len(output_ids)]
            chosen = torch.full_like(logits, float("-inf"))
            chosen[token] = 0
            return chosen

        return force
