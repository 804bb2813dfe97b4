"""Questions about documents over Ray Serve, which sends those about one document to one replica.

Ray's router compares the text of a request with what each replica was sent before. So the requests
of a document meet on one replica, where PREFIX_SHARE reads the document's KV once for all of them.
Each replica's counters are on the ``/metrics`` of its Ray node, by ``ReplicaId``.

    python examples/ray_cluster/serve_qa.py                      two replicas on this machine
    python examples/ray_cluster/serve_qa.py --address auto --model FOLDER --documents FOLDER
"""

import argparse
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import shared  # in this folder
from shared import Reads, common

MODEL = "model"
ROUTER = "routers.ByPrefixUnlessTold"  # in this folder
PREFIX = "ray_vllm_prefixshare_"


def application(args: argparse.Namespace) -> Any:
    """An OpenAI server with ``args.replicas`` engines, behind the router."""
    from ray.llm._internal.common.callbacks.base import CallbackBase
    from ray.serve.config import RequestRouterConfig
    from ray.serve.llm import LLMConfig, build_openai_app

    class NothingToDownload(CallbackBase):
        """The model is a folder. Ray starts a process for each replica that would download it."""

        async def on_before_node_init(self) -> None:
            self.ctx.run_init_node = False

    config = LLMConfig(
        model_loading_config={"model_id": MODEL, "model_source": args.model},
        engine_kwargs=shared.engine_kwargs(args),
        callback_config={"callback_class": NothingToDownload},
        accelerator_config={"kind": "cpu" if common.on_cpu() else "gpu"},
        placement_group_config=shared.placement(),
        deployment_config={
            "num_replicas": args.replicas,
            "request_router_config": RequestRouterConfig(request_router_class=ROUTER),
        },
    )
    return build_openai_app({"llm_configs": [config]})


def ask(url: str, prompt: str, tokens: int, user: str) -> str:
    """The answer of the server."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "user": user}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return " ".join(json.load(answer)["choices"][0]["text"].split())


def ask_all(
    url: str, documents: dict[str, str], questions: list[str], tokens: int, user: str
) -> list[str]:
    """The answers to all questions about all documents, asked at the same time.

    The first question of each document comes before the others, as in a conversation: a router can
    only know what was asked before.
    """
    prompts = [
        [shared.prompt(text, question) for question in questions] for text in documents.values()
    ]
    for first, *_ in prompts:
        ask(url, first, 1, user)
    mixed = [prompt for column in zip(*prompts, strict=True) for prompt in column]
    with ThreadPoolExecutor(len(mixed)) as clients:
        return list(clients.map(lambda prompt: ask(url, prompt, tokens, user), mixed))


def counters() -> dict[str, Reads]:
    """What each replica has read so far, from ``/metrics`` of all Ray nodes."""
    import ray
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[str, float]] = {}
    for node in ray.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=60) as answer:
            text = answer.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith(PREFIX):
                    replica = found.setdefault(sample.labels["ReplicaId"], {})
                    replica[sample.name.removeprefix(PREFIX)] = sample.value
    return {
        # a counter that has not counted yet may be missing
        replica: Reads(*(values.get(f"kv_tokens_{x}_total", 0.0) for x in ("read", "saved")))
        for replica, values in found.items()
        if replica and "kv_tokens_read_total" in values
    }


def settled(seconds: float) -> dict[str, Reads]:
    """The counters once they stay as they are for some seconds: Ray brings them to ``/metrics``
    now and then.
    """
    found: dict[str, Reads] = {}
    for _ in range(20):
        time.sleep(seconds)
        before, found = found, counters()
        if found and before == found:
            break
    return found


def since(before: dict[str, Reads], now: dict[str, Reads]) -> dict[str, Reads]:
    """What each replica has read in between."""
    old = {replica: before.get(replica, Reads(0, 0)) for replica in now}
    return {
        replica: Reads(reads.read - old[replica].read, reads.saved - old[replica].saved)
        for replica, reads in now.items()
    }


def main() -> int:
    """Run the example; the exit status."""
    parser = shared.options(__doc__)
    shared.replica_options(parser)
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    common.at_least(args, 1, "replicas", "port")
    documents = shared.read_documents(args.documents)
    questions = shared.read_questions(args.questions)
    shared.check_options(args, "ray.serve.llm")

    import ray
    from ray import serve
    from routers import ANYWHERE  # in this folder; it needs Ray

    shared.start_ray(args, {})
    shared.check_gpus(args, "replicas")
    serve.start(http_options={"port": args.port})
    url = f"http://127.0.0.1:{args.port}"
    began = time.perf_counter()
    serve.run(application(args), name="qa", route_prefix="/")
    print(f"{args.replicas} replicas after {time.perf_counter() - began:.0f} s", flush=True)
    reads: dict[str, dict[str, Reads]] = {}
    before: dict[str, Reads] = {}
    runs = {"by prefix": "", "Ray's router": ANYWHERE} if args.compare else {"by prefix": ""}
    for name, user in runs.items():
        began = time.perf_counter()
        answers = ask_all(url, documents, questions, args.max_tokens, user)
        print(f"{name}: {len(answers)} answers in {time.perf_counter() - began:.0f} s", flush=True)
        now = settled(3 if args.address is None else 12)
        reads[name], before = since(before, now), now
    serve.shutdown()
    ray.shutdown()
    return shared.show_table(reads)


if __name__ == "__main__":
    common.run_example(main)
