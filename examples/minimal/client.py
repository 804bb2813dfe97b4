"""Questions to a server over the OpenAI API, sent at the same time.

Start the server first, and wait until it is ready:

    vllm serve HuggingFaceTB/SmolLM2-135M-Instruct --attention-backend PREFIX_SHARE
"""

from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

DOCUMENT = "The lighthouse was built in 1874. It is 38 metres high. " * 40
QUESTIONS = ["When was the lighthouse built?", "How high is the lighthouse?"] * 8

client = OpenAI(base_url="http://localhost:8000/v1", api_key="EMPTY")
model = client.models.list().data[0].id


def ask(question: str) -> str:
    messages = [{"role": "user", "content": DOCUMENT + question}]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=24)
    return f"{question} {answer.choices[0].message.content}"


with ThreadPoolExecutor(len(QUESTIONS)) as pool:
    print(*list(pool.map(ask, QUESTIONS))[:2], sep="\n")
