"""What a hook is, and how it wraps a function of vLLM."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

Function = Callable[..., Any]
_MARK = "_vllm_prefixshare_hook"


@dataclass(frozen=True, slots=True)
class Hook:
    """One change to vLLM.

    module, name: what changes; ``name`` may have dots.
    why: the need. until: when the hook can go.
    install: makes the change, given the module; a second call changes nothing. It raises
        AttributeError where this vLLM has no such name. Where a patch calls plugins at this place,
        it adds the function to call (see ``extend``) and wraps nothing.
    replaced: whether this vLLM has a patch that does the same, given the module.
    parts: parts of the shared host work that need it. They are left to a vLLM that has no such
        name; where there are none, the backend is rejected there (``compat.check_release``).
    """

    module: str
    name: str
    why: str
    until: str
    install: Callable[[ModuleType], None]
    replaced: Callable[[ModuleType], bool] = lambda module: False
    parts: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """The full name of what changes."""
        return f"{self.module}.{self.name}"


def wrap(owner: Any, name: str, wrapper: Callable[[Function], Function]) -> None:
    """Replace the function or classmethod ``owner.name`` by ``wrapper`` of it, once."""
    static = inspect.getattr_static(owner, name)
    is_classmethod = isinstance(static, classmethod)
    original = static.__func__ if is_classmethod else static
    if getattr(original, _MARK, False):
        return
    wrapped = functools.wraps(original)(wrapper(original))
    setattr(wrapped, _MARK, True)
    setattr(owner, name, classmethod(wrapped) if is_classmethod else wrapped)


def extend(module: ModuleType, name: str, entry: object) -> bool:
    """Add ``entry`` to the list ``module.name``, once.

    Returns:
        Whether there is such a list: a vLLM with the patch that calls its entries.
    """
    entries = getattr(module, name, None)
    if entries is None:
        return False
    if entry not in entries:
        entries.append(entry)
    return True


def after(note: Callable[[Any], None]) -> Callable[[Function], Function]:
    """Wrapper that calls ``note(self)`` after the original."""

    def wrapper(original: Function) -> Function:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            note(self)
            return result

        return wrapped

    return wrapper


def before(note: Callable[..., None]) -> Callable[[Function], Function]:
    """Wrapper that calls ``note`` with the arguments of the original before it."""

    def wrapper(original: Function) -> Function:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            note(*args, **kwargs)
            return original(*args, **kwargs)

        return wrapped

    return wrapper
