"""New weights for a live engine, as a trainer gives them between two steps."""

import shutil
from pathlib import Path
from typing import Any


def write_changed_copy(model: Path, folder: Path) -> Path:
    """Write a copy of the checkpoint ``model`` with other weights, embedding included.

    Returns:
        folder, created if missing.
    """
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    path = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: tensor * (1 + 0.1 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})
    return folder


def update_weights(llm: Any, checkpoint: Path, level: int) -> None:
    """Load the weights of ``checkpoint`` into a live engine while it sleeps. On a CPU vLLM pauses
    the engine and forgets its KV cache, but releases no memory.

    Args:
        llm: the engine, on GPUs with ``enable_sleep_mode``.
        checkpoint: of the same shape as the engine's model.
        level: level of the sleep; from 2 on vLLM discards the old weights.
    """
    llm.sleep(level)
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint)})
    llm.wake_up(tags=["kv_cache"])


def pack_output_layer(llm: Any) -> None:
    """Pack the output layer again, on a CPU: vLLM's reload leaves it out where it is tied to the
    embedding.
    """
    llm.apply_model(_pack)


def _pack(model: Any) -> None:
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
