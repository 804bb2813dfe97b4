"""Beam search over a long prompt, whose beams share it."""

from vllm import LLM
from vllm.sampling_params import BeamSearchParams

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # a name on the Hugging Face Hub, or a folder
PROMPT = "The lighthouse was built in 1874. It is 38 metres high. " * 40 + "The lighthouse is"


def main() -> None:
    llm = LLM(model=MODEL, attention_backend="PREFIX_SHARE")
    params = BeamSearchParams(beam_width=8, max_tokens=12)
    (output,) = llm.beam_search([{"prompt": PROMPT}], params)
    for beam in output.sequences[:3]:
        print(f"{beam.cum_logprob:.2f}", beam.text[len(PROMPT) :])


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
