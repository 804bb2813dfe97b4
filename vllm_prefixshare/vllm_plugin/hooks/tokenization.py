"""Text of prompts to tokens: vLLM's renderers ask the memo of `prompts.tokenization` first."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from inspect import iscoroutinefunction
from types import ModuleType
from typing import Any

from vllm_prefixshare.vllm_plugin.hooks.wrapping import Function, Hook, extend, wrap
from vllm_prefixshare.vllm_plugin.prompts import tokenization
from vllm_prefixshare.vllm_plugin.prompts.parts import (
    PartCounters,
    is_enabled,
    measured,
    report_once,
)
from vllm_prefixshare.vllm_plugin.prompts.token_ids import TokenIds
from vllm_prefixshare.vllm_plugin.prompts.tokenization import PART

#: What the request adds to its prompts after tokenizing, ``cache_salt`` included; None outside
#: the renderer's entry points, where the salt of a request is not known.
_extras: ContextVar[dict[str, Any] | None] = ContextVar("prompt_extras", default=None)


def hook_tokenization(module: ModuleType) -> None:
    """Install the part ``tokenization`` in `vllm.renderers.base`.

    Every text prompt goes through ``BaseRenderer._tokenize_prompt``: LLM.generate, LLM.chat,
    LLM.beam_search and the server's endpoints.
    """
    if extend(module, "text_tokenizers", _TEXT_TOKENIZER):
        return
    renderer = module.BaseRenderer
    wrap(renderer, "_tokenize_prompt", partial(_sharing, module))
    wrap(renderer, "__init__", partial(_starting, module))
    for name in ("render_cmpl", "render_chat", "render_cmpl_async", "render_chat_async"):
        wrap(renderer, name, _noting_extras)
    if hasattr(renderer, "validate_token_ids"):  # 0.32 on
        wrap(renderer, "validate_token_ids", _validating_extremes)


def _sharing(module: ModuleType, original: Function) -> Function:
    def _tokenize_prompt(self: Any, prompt: Any, params: Any) -> Any:
        if not is_enabled(PART):
            return original(self, prompt, params)
        with measured(PART) as counters:
            token_ids = _counted_token_ids(counters, self, prompt, params, _extras.get())
            if token_ids is None:
                return original(self, prompt, params)
            return module.TokensPrompt(prompt_token_ids=token_ids, **prompt)

    return _tokenize_prompt


class _TextTokenizer:
    """What a vLLM with the patch ``text-tokenizers`` asks before the model's tokenizer."""

    def start(self, renderer: Any) -> None:
        """Analyze the tokenizer while the engine starts."""
        if is_enabled(PART) and renderer.tokenizer is not None:
            tokenization.text_tokenizer(renderer.tokenizer, timeout=0)

    def tokenize(self, renderer: Any, prompt: Any, params: Any) -> TokenIds | None:
        """The ids of a prompt, or None to leave it to vLLM."""
        if not is_enabled(PART):
            return None
        with measured(PART) as counters:
            return _counted_token_ids(counters, renderer, prompt, params, params.prompt_extras)


_TEXT_TOKENIZER = _TextTokenizer()


def _counted_token_ids(
    counters: PartCounters,
    renderer: Any,
    prompt: Any,
    params: Any,
    extras: dict[str, Any] | None,
) -> TokenIds | None:
    """The ids of a prompt, or None to leave it to vLLM.

    Args:
        renderer: the ``BaseRenderer``.
        prompt: the ``TextPrompt``.
        params: the ``TokenizeParams``.
        extras: what the request adds to its prompts; None where it is not known.
    """
    counters.units += len(prompt["prompt"])
    shared = _shared_token_ids(renderer, prompt, params, extras)
    if shared is None:
        counters.fallbacks += 1
        return None
    token_ids, known_chars = shared
    counters.shared_units += known_chars
    counters.cache_bytes = tokenization.text_cache().bytes
    return token_ids


def _shared_token_ids(
    renderer: Any, prompt: Any, params: Any, extras: dict[str, Any] | None
) -> tuple[TokenIds, int] | None:
    """The ids of a prompt and how many of its characters were known, or None to leave it to
    vLLM.
    """
    text = prompt["prompt"]
    if len(text) < tokenization.MIN_CHARS or extras is None:
        return None
    salt = extras.get("cache_salt") or prompt.get("cache_salt")
    kwargs = params.get_encode_kwargs()
    if kwargs.keys() - {"truncation", "max_length", "add_special_tokens"}:
        return None
    if renderer._wants_offsets(prompt, params):
        return None
    tokenizer = renderer.get_tokenizer()
    memo = tokenization.text_tokenizer(tokenizer, len(text) * tokenization.SECONDS_PER_CHAR)
    if memo is None:
        return None
    add_special_tokens = kwargs["add_special_tokens"]
    try:
        token_ids, known_chars = memo.encode(text, add_special_tokens, salt)
    except (TypeError, UnicodeError):  # lone surrogates: vLLM's own error
        return None
    except Exception as e:
        report_once(PART, f"encoding a text failed: {e!r}"[:300])
        return None
    max_length = kwargs["max_length"] if kwargs["truncation"] else len(token_ids)
    if len(token_ids) > max_length:
        # copies in vLLM's pool keep the side that the tokenizer had at the start
        if tokenizer.truncation_side != memo.truncation_side:
            return None
        truncated = memo.truncated(token_ids, max_length, add_special_tokens)
        return None if truncated is None else (truncated, known_chars)
    return token_ids, known_chars


def _starting(module: ModuleType, original: Function) -> Function:
    """Analyze the tokenizer while the engine starts, and tokenize in the context of the request
    also where vLLM does it in a thread.
    """

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)

        def run_in(context: Any, prompt: Any, params: Any) -> Any:
            return context.run(self._tokenize_prompt, prompt, params)

        offload = module.make_async(run_in, executor=self._executor)
        self._tokenize_prompt_async = lambda prompt, params: offload(copy_context(), prompt, params)
        _TEXT_TOKENIZER.start(self)

    return init


def _noting_extras(original: Function) -> Function:
    """Note the extras of a request while it is rendered. ``original`` may be asynchronous."""

    def render(*args: Any, **kwargs: Any) -> Any:
        with _noted(kwargs.get("prompt_extras")):
            return original(*args, **kwargs)

    async def render_async(*args: Any, **kwargs: Any) -> Any:
        with _noted(kwargs.get("prompt_extras")):
            return await original(*args, **kwargs)

    return render_async if iscoroutinefunction(original) else render


@contextmanager
def _noted(extras: dict[str, Any] | None) -> Iterator[None]:
    token = _extras.set(extras or {})
    try:
        yield
    finally:
        _extras.reset(token)


def _validating_extremes(original: Function) -> Function:
    """VLLM compares the largest and the smallest id: take them from the array."""

    def validate_token_ids(self: Any, token_ids: Any, **kwargs: Any) -> None:
        if isinstance(token_ids, TokenIds) and token_ids:
            array = token_ids.array
            token_ids = [int(array.max()), int(array.min())]
        original(self, token_ids, **kwargs)

    return validate_token_ids


HOOKS = (
    Hook(
        "vllm.renderers.base",
        "BaseRenderer._tokenize_prompt",
        "prompts on the same document tokenize it again for each request",
        "vLLM keeps the token ids of texts",
        hook_tokenization,
        parts=("tokenization",),
    ),
)
