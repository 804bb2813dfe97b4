"""Questions about many documents with Ray Data: a document's questions go to one replica, together.

A row of the input is a document, in a block of its own; its questions become the rows of that
block, and Ray Data gives a block to one replica. There they are decoded together and read the
document's KV once. Shuffled questions, as a table of questions would have them, share little.

    python examples/ray_cluster/batch_qa.py                          two replicas on this machine
    python examples/ray_cluster/batch_qa.py --address auto --model FOLDER --documents FOLDER

Every replica counts what it reads in files of one folder: on a cluster, the folder must be seen by
all nodes (--counters). It writes once a second and when decodes stop, and ends with its last
answer, so its last second may be missing in the counts.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import shared  # in this folder
from shared import Reads, common

from vllm_prefixshare import PrefixShareError


def ask(dataset: Any, args: argparse.Namespace, questions: int) -> list[dict[str, Any]]:
    """Answer the rows of ``dataset``, which have a ``prompt``."""
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    sampling = {"max_tokens": args.max_tokens, "temperature": 0.0}
    config = vLLMEngineProcessorConfig(
        model_source=args.model,
        engine_kwargs=shared.engine_kwargs(args),
        placement_group_config=shared.placement(),
        concurrency=(args.replicas, args.replicas),
        batch_size=questions,
        max_concurrent_batches=args.at_once,  # documents that a replica works on
        max_tasks_in_flight_per_actor=args.at_once,
        chat_template_stage=False,  # vLLM tokenizes; each stage would be a process
        tokenize_stage=False,
        detokenize_stage=False,
        log_engine_metrics=False,
    )
    processor = build_processor(
        config,
        preprocess=lambda row: {**row, "sampling_params": sampling},
        postprocess=lambda row: {
            "document": row["document"],
            "question": row["question"],
            "answer": " ".join(row["generated_text"].split()),
        },
    )
    return list(processor(dataset).take_all())


def questions_of(documents: dict[str, str], questions: list[str]) -> Any:
    """A dataset of questions with a block for each document."""
    import ray

    def ask_all(row: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {
                "document": row["document"],
                "question": question,
                "prompt": shared.prompt(row["text"], question),
            }
            for question in questions
        ]

    rows = [{"document": name, "text": text} for name, text in documents.items()]
    return ray.data.from_items(rows, override_num_blocks=len(rows)).flat_map(ask_all)


def take_counters(folder: Path) -> dict[str, Reads]:
    """What the worker of each replica has counted in its file of ``folder``, which is then emptied.
    A replica's other processes have files without these counters.
    """
    from prometheus_client.multiprocess import MultiProcessCollector

    found: dict[str, Reads] = {}
    names = [f"vllm_prefixshare_kv_tokens_{x}_total" for x in ("read", "saved")]
    for file in sorted(folder.glob("counter_prefixshare-*.db")):
        families = MultiProcessCollector.merge([str(file)])
        values = {s.name: s.value for family in families for s in family.samples}
        if any(name in values for name in names):
            found[str(len(found) + 1)] = Reads(*(values.get(name, 0.0) for name in names))
    for file in folder.glob("*_prefixshare-*.db"):
        file.unlink()
    return found


def main() -> int:
    """Run the example; the exit status."""
    parser = shared.options(__doc__)
    shared.replica_options(parser)
    parser.add_argument("--at-once", type=int, default=1, help="documents at once on a replica")
    parser.add_argument("--counters", type=Path, help="folder for counters (default: a new one)")
    args = parser.parse_args()
    common.at_least(args, 1, "at_once", "replicas")
    documents = shared.read_documents(args.documents)
    questions = shared.read_questions(args.questions)
    if args.counters is not None and not args.counters.is_dir():
        raise PrefixShareError(f"--counters {args.counters} is not a folder.")
    shared.check_options(args, "ray.data.llm")

    import ray

    with tempfile.TemporaryDirectory(prefix="prefix-share-") as new:
        folder = args.counters or Path(new)
        settings = {
            "VLLM_PREFIXSHARE_METRICS": str(folder),
            "VLLM_PREFIXSHARE_ORDER": "prefix",  # where a replica has several documents at once
            "VLLM_PREFIXSHARE_ORDER_BOUND": "inf",  # nobody waits for a single answer
        }
        shared.start_ray(args, settings)
        shared.check_gpus(args, "replicas")
        context = ray.data.DataContext.get_current()
        context.wait_for_min_actors_s = 3600  # the first replica would take everything
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        dataset = questions_of(documents, questions)
        runs = {"by document": dataset}
        if args.compare:
            runs["shuffled"] = dataset.random_shuffle(seed=0)
        reads, answers = {}, {}
        for name, rows in runs.items():
            began = time.perf_counter()
            answers[name] = ask(rows, args, len(questions))
            reads[name] = take_counters(folder)
            seconds = time.perf_counter() - began
            print(f"{name}: {len(answers[name])} answers in {seconds:.0f} s, start-up included")
        ray.shutdown()
    for row in answers["by document"][: len(questions)]:
        print(f"{row['document']}: {row['question']} {row['answer']}")
    return shared.show_table(reads)


if __name__ == "__main__":
    common.run_example(main)
