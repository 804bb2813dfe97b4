"""Chooses the backend in every way that vLLM offers, in a process where no plugin was loaded yet,
beside the environment variable, with the version of an old release, and with its name misspelt in a
dictionary. Prints the outcome of each as JSON: ``python -m tests.support.backend_choices MODEL``.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def by_environment(model: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    os.environ["VLLM_ATTENTION_BACKEND"] = "PREFIX_SHARE"
    return EngineArgs(model=model)


def by_argument(**given: Any) -> Callable[[str], Any]:
    def engine_args(model: str) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        return EngineArgs(model=model, **given)

    return engine_args


def by_dictionary_of_llm(model: str) -> Any:
    """Choose as ``vllm.LLM`` does, which makes the record before ``EngineArgs`` loads plugins."""
    from vllm.config.attention import AttentionConfig

    config = AttentionConfig(**{"backend": "prefix_share"})
    return by_argument(attention_config=config)(model)


def by_command_line(*arguments: str) -> Callable[[str], Any]:
    def engine_args(model: str) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform

        # a CUDA build without a GPU has no platform, but the parser reads its device
        current_platform.device_type = current_platform.device_type or "cpu"
        try:
            from vllm.utils.argparse_utils import FlexibleArgumentParser
        except ImportError:
            from vllm.utils import FlexibleArgumentParser
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        return AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", model, *arguments]))

    return engine_args


PER_KIND = {"full_attention": "PREFIX_SHARE"}
WAYS: dict[str, Callable[[str], Any]] = {
    "attention_config of LLM": by_dictionary_of_llm,  # must be first: nothing is loaded before it
    "attention_config": by_argument(attention_config={"backend": "PREFIX_SHARE"}),
    "backend_per_kind": by_argument(attention_config={"backend_per_kind": PER_KIND}),
    "attention_backend": by_argument(attention_backend="Prefix_Share"),
    "--attention-backend": by_command_line("--attention-backend", "prefix_share"),
    "--attention-config": by_command_line("--attention-config", '{"backend": "PREFIX_SHARE"}'),
    "-ac.backend": by_command_line("-ac.backend", "PREFIX_SHARE"),
    "-ac.backend_per_kind": by_command_line("-ac.backend_per_kind.full_attention", "PREFIX_SHARE"),
    "VLLM_ATTENTION_BACKEND": by_environment,  # must be last: the variable stays set
}


#: Another backend in an argument, while VLLM_ATTENTION_BACKEND=PREFIX_SHARE.
BESIDE_THE_VARIABLE: dict[str, Callable[[str], Any]] = {
    "attention_backend": by_argument(attention_backend="CPU_ATTN"),
    "attention_backend auto": by_argument(attention_backend="auto"),
    "attention_config": by_argument(attention_config={"backend": "CPU_ATTN"}),
    "backend_per_kind": by_argument(
        attention_config={"backend_per_kind": {"full_attention": "CPU_ATTN"}}
    ),
}


def outcome(way: Callable[[str], Any], model: str) -> dict[str, str]:
    """The backends in vLLM's final configuration, of all layers and of full attention, or the
    error.
    """
    try:
        chosen = way(model).create_engine_config().attention_config
    except Exception as e:
        return {"error": type(e).__name__, "sentence": str(e)}
    full = chosen.backend_per_kind.get("full_attention", chosen.backend)
    return {
        name: getattr(b, "name", "none") for name, b in (("all", chosen.backend), ("full", full))
    }


def misspelt() -> list[str]:
    """What vLLM says to a misspelt name in each field of a dictionary."""
    from vllm.config.attention import AttentionConfig

    said = []
    for given in ({"backend": "PREFIXSHARE"}, {"backend_per_kind": {"mamba": "prefixshare"}}):
        try:
            said.append(str(AttentionConfig(**given)))
        except ValueError as e:
            said.append(str(e))
    return said


if __name__ == "__main__":
    here = {name: outcome(way, sys.argv[1]) for name, way in WAYS.items()}
    beside = {name: outcome(way, sys.argv[1]) for name, way in BESIDE_THE_VARIABLE.items()}

    from packaging.version import Version

    from vllm_prefixshare.vllm_plugin import compat

    del os.environ["VLLM_ATTENTION_BACKEND"]
    compat.vllm_version = lambda: Version("0.25.1")
    compat.check_release.cache_clear()
    too_old = {name: outcome(way, sys.argv[1]) for name, way in WAYS.items()}
    found = {"here": here, "beside": beside, "too_old": too_old, "misspelt": misspelt()}
    print("\n" + json.dumps(found))
