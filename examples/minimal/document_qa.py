"""Questions about one document, offline."""

from vllm import LLM, SamplingParams

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # a name on the Hugging Face Hub, or a folder
DOCUMENT = "The lighthouse was built in 1874. It is 38 metres high. " * 40
QUESTIONS = ["When was the lighthouse built?", "How high is the lighthouse?"] * 16


def main() -> None:
    llm = LLM(model=MODEL, attention_backend="PREFIX_SHARE")
    chats = [[{"role": "user", "content": DOCUMENT + question}] for question in QUESTIONS]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=24))
    for question, output in zip(QUESTIONS[:2], outputs, strict=False):
        print(question, output.outputs[0].text)
    stats = llm.collective_rpc("prefix_share_stats")[0]
    print(f"share factor: {stats['share_factor']:.1f}")


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
