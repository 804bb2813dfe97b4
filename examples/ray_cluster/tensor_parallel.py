r"""One model over several GPUs with vLLM's Ray executor, and PREFIX_SHARE in every rank.

    python examples/ray_cluster/tensor_parallel.py --model FOLDER --tensor-parallel-size 2
    python examples/ray_cluster/tensor_parallel.py --model FOLDER --address auto \
        --tensor-parallel-size 16

It needs GPUs, because vLLM's Ray executor does. All ranks share alike, so the table has what the
first one read.
"""

import os

import shared  # in this folder
from shared import Reads, common

from vllm_prefixshare import PrefixShareError


def open_to_processes() -> None:
    """Let the processes that vLLM starts reach the Ray of this one.

    vLLM forks its engine core by default. A forked process would have this one's connection to Ray
    without the threads that serve it, and wait for ever.
    """
    import ray

    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"


def main() -> int:
    """Run the example; the exit status."""
    parser = shared.options(__doc__)
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    args = parser.parse_args()
    common.at_least(args, 1, "tensor_parallel_size")
    if common.on_cpu():
        raise PrefixShareError("vLLM's Ray executor needs GPUs, and this vLLM is for CPUs.")
    documents = shared.read_documents(args.documents)
    questions = shared.read_questions(args.questions)
    shared.check_options(args, "ray")
    shared.start_ray(args, {})
    shared.check_gpus(args, "tensor_parallel_size")
    open_to_processes()

    from vllm import LLM, SamplingParams

    llm = LLM(
        args.model,
        tensor_parallel_size=args.tensor_parallel_size,
        distributed_executor_backend="ray",
        **shared.engine_kwargs(args),
    )
    prompts = [
        shared.prompt(text, question) for text in documents.values() for question in questions
    ]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=args.max_tokens))
    for question, output in zip(questions, outputs, strict=False):
        print(f"{question} {' '.join(output.outputs[0].text.split())}")
    first, *others = llm.collective_rpc("prefix_share_stats")
    if any(rank["kv_tokens_read"] != first["kv_tokens_read"] for rank in others):
        raise PrefixShareError("the ranks read different numbers of KV tokens: please report it.")
    reads = Reads(first["kv_tokens_read"], first["kv_tokens_saved"])
    return shared.show_table({f"{len(others) + 1} ranks": {"each": reads}})


if __name__ == "__main__":
    common.run_example(main)
