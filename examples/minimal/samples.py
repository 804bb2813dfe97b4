"""Groups of samples for GRPO: 16 completions of each prompt, which share it at every step."""

from vllm import LLM, SamplingParams

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # a name on the Hugging Face Hub, or a folder
INSTRUCTIONS = "Solve the problem step by step and end with the answer as a number.\n" * 150
PROBLEMS = ["What is 17 + 25?", "A box holds 12 eggs. How many eggs are in 4 boxes?"]


def main() -> None:
    llm = LLM(model=MODEL, attention_backend="PREFIX_SHARE")
    params = SamplingParams(n=16, temperature=1.0, max_tokens=32, seed=0)
    for group in llm.generate([INSTRUCTIONS + problem for problem in PROBLEMS], params):
        print(len(group.outputs), "samples, the first:", group.outputs[0].text[:60].strip())
    stats = llm.collective_rpc("prefix_share_stats")[0]
    print(f"share factor: {stats['share_factor']:.1f}")


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
