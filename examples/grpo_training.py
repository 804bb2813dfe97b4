"""GRPO with TRL: the same training with PREFIX_SHARE and with vLLM's default backend.

TRL runs vLLM in its own process, gives it the new weights after each step and samples the next
groups with them. The reward is higher the closer an answer is to 20 characters. Both runs have the
same seed, so their rewards and divergences lie over each other:

- KL: from the trained model to the model at the start, in nats per token.
- gap: between the log-probabilities of the sampled tokens in the engine and in the trainer, mean in
  nats. It is rounding if the engine has the trainer's weights.

On a GPU the engine sleeps while TRL trains (level 2: its weights and KV cache are released).

    python examples/grpo_training.py --plot training.png
    python examples/grpo_training.py --model MODEL --steps 50 --samples 16 --learning-rate 1e-6
"""

import argparse
import importlib.util
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import common  # in this folder

from vllm_prefixshare import PrefixShareError

INSTRUCTIONS = """\
You answer the questions of visitors to a harbour. An answer is one friendly sentence. It is about
what the visitor asks, and it does not repeat the question.

"""
THINGS = ("sea", "lighthouse", "boats", "fish", "storm", "bridge", "museum", "gulls")
#: columns of the table: names of TRL's metrics
METRICS = {"reward": "reward", "KL": "kl", "gap": "sampling/sampling_logp_difference/mean"}


def reward(completions: list[str], **_: Any) -> list[float]:
    """1 for an answer of 20 characters, less by 1 / 50 for each character more or fewer."""
    return [max(0.0, 1 - abs(len(text.strip()) - 20) / 50) for text in completions]


def train(args: argparse.Namespace, backend: str) -> dict[str, Any]:
    """Train in this process, which prints to ``args.log``.

    Returns:
        the metrics of each step, by column, and ``prefix_share_stats`` of PREFIX_SHARE.
    """
    with args.log.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update({**common.ENVIRONMENT, **os.environ, "VLLM_PREFIXSHARE_SHARE": "always"})
    os.environ.pop("VLLM_ATTENTION_BACKEND", None)
    if backend == common.OURS:
        os.environ["VLLM_ATTENTION_BACKEND"] = backend
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _train(args, backend, folder)
    except PrefixShareError:
        raise
    except Exception as e:
        traceback.print_exc()  # the exception itself may not fit through a pipe
        raise RuntimeError(f"{type(e).__name__}: {str(e).partition(chr(10))[0]}") from None


def _train(args: argparse.Namespace, backend: str, folder: str) -> dict[str, Any]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    adapt_engine()
    prompts = [f"{INSTRUCTIONS}Question: What about the {thing}?\nAnswer:" for thing in THINGS]
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        args=GRPOConfig(
            output_dir=folder,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_enable_sleep_mode=not common.on_cpu(),
            vllm_max_model_length=256,
            generation_kwargs={"stop": ["\n"]},
            num_generations=args.samples,
            per_device_train_batch_size=args.samples * args.groups,
            max_completion_length=args.max_tokens,
            max_steps=args.steps,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant",
            loss_type="grpo",
            beta=0.04,  # as Shao et al. 2024; TRL measures KL only if it is not 0
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            seed=0,
            **({"use_cpu": True, "bf16": False} if common.on_cpu() else {}),
            model_init_kwargs={"dtype": "float32"},
        ),
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    found = {name: [step[metric] for step in steps] for name, metric in METRICS.items()}
    if backend == common.OURS:
        llm = trainer.vllm_generation.llm
        found["stats"] = llm.collective_rpc("prefix_share_stats")[0]
    return found


def adapt_engine() -> None:
    """Change the engine that TRL starts.

    Every sample gets its own seed: with one generator for the batch, a sample would depend on its
    row, and the rows of two backends are in different orders. On a CPU vLLM packs a layer's weights
    when it has loaded them, so compiled code would hold the first weights for ever, and TRL's
    update would find none to write into.
    """
    from trl.generation import vllm_generation

    fixed = {"dtype": "float32", "block_size": 32, "enforce_eager": True} if common.on_cpu() else {}

    class SeededLLM(vllm_generation.LLM):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments, **fixed)
            self.seeds = itertools.count()

        def generate(self, prompts: list[Any], sampling_params: Any, **rest: Any) -> list[Any]:
            each = [sampling_params.clone() for _ in prompts]
            for params in each:
                params.seed = next(self.seeds)
            return super().generate(prompts, each, **rest)

    vllm_generation.LLM = SeededLLM
    if common.on_cpu():
        vllm_generation.VLLMGeneration.sync_weights = sync_on_cpu


def sync_on_cpu(generation: Any) -> None:
    """Give the engine the trainer's weights. It pauses and forgets its KV cache as for a sleep, but
    vLLM on a CPU releases no memory.
    """
    llm = generation.llm
    llm.sleep(level=1)
    weights = generation.model.named_parameters()
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    llm.apply_model(pack_head)
    llm.wake_up()


def pack_head(model: Any) -> None:
    """Pack the output layer again: vLLM's reload skips one that is tied to the embedding."""
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def show(found: dict[str, dict[str, Any]]) -> int:
    """Print both runs step by step.

    Returns:
        exit status: 1 if the gap with PREFIX_SHARE is larger than the baseline's.
    """
    print(f"\n{'':4}" + "".join(f"{name:>26}" for name in METRICS))
    print("step" + f"{common.OURS:>14}{common.BASELINE:>12}" * len(METRICS))
    ours, baseline = found[common.OURS], found[common.BASELINE]
    for step, _ in enumerate(ours["reward"]):
        cells = (f"{ours[name][step]:14.2g}{baseline[name][step]:12.2g}" for name in METRICS)
        print(f"{step + 1:4}" + "".join(cells))
    common.show_reads(ours["stats"])
    gaps = {backend: sum(run["gap"]) / len(run["gap"]) for backend, run in found.items()}
    close = gaps[common.OURS] <= 2 * gaps[common.BASELINE] + 1e-4
    print(
        f"from engine to trainer: {gaps[common.OURS]:.1e} nats with {common.OURS}, "
        f"{gaps[common.BASELINE]:.1e} with the baseline"
    )
    return 0 if close else 1


def plot(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw both runs over each other, one picture for each column of the table."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.5), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(METRICS)), METRICS, strict=True):
        for (backend, run), style in zip(found.items(), ("-", "--"), strict=True):
            axes.plot(range(1, 1 + len(run[name])), run[name], style, label=backend)
        axes.set(title=name, xlabel="step")
        axes.legend()
    figure.savefig(path)


def main() -> int:
    """Run the example; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="name on the Hugging Face Hub, or folder")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--groups", type=int, default=2, help="prompts of each step")
    parser.add_argument("--samples", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--max-tokens", type=int, default=16, help="length of a sample")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--plot", type=Path, help="write a picture here")
    parser.add_argument("--log", type=Path, help="what TRL and vLLM print (default: a new file)")
    args = parser.parse_args()
    common.at_least(args, 1, "steps", "groups", "max_tokens")
    common.at_least(args, 2, "samples")
    if args.plot:
        common.check_writable(args.plot, "--plot")
    if importlib.util.find_spec("trl") is None:
        raise PrefixShareError("TRL is not installed: run `make trl`, or `pip install '.[trl]'`.")
    common.fill_in(args)
    print(f"what TRL and vLLM print goes to {args.log}", flush=True)
    found = {}
    spawn = multiprocessing.get_context("spawn")
    for backend in (common.OURS, common.BASELINE):  # one process each: vLLM reads settings once
        started = time.monotonic()
        with ProcessPoolExecutor(1, spawn) as pool:
            try:
                found[backend] = pool.submit(train, args, backend).result()
            except RuntimeError as e:
                sys.exit(f"grpo_training: training failed ({e}); see {args.log}")
        print(f"trained with {backend} in {time.monotonic() - started:.0f} s", flush=True)
    if args.plot:
        plot(found, args.plot)
    return show(found)


if __name__ == "__main__":
    common.run_example(main)
