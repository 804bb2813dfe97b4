"""What a hook is, and how it wraps a function of vLLM."""

import functools
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from vllm_prefixshare.vllm_plugin.prompts.parts import is_switched_on

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
    patch: names, as "module:name", that a vLLM has if and only if it has the patches that do the
        same. There the hook is not installed.
    parts: parts of the shared host work that need it. They are left to a vLLM that has no such
        name; where there are none, the backend is rejected there (``compat.check_release``).
    switch: a static method, as "module:Class.name", that a patched vLLM asks whether to do the work
        of the only part. There it is replaced by the setting, and the hook is not installed.
    """

    module: str
    name: str
    why: str
    until: str
    install: Callable[[ModuleType], None]
    patch: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    switch: str = ""

    @property
    def target(self) -> str:
        """The full name of what changes."""
        return f"{self.module}.{self.name}"

    @property
    def is_replaced(self) -> bool:
        """Whether this vLLM has a patch that does the same."""
        names = (*self.patch, self.switch) if self.switch else self.patch
        return bool(names) and all(map(_exists, names))

    def apply(self, module: ModuleType) -> None:
        """Install the hook, or leave the work to the patch of this vLLM.

        Raises:
            AttributeError: this vLLM has no such name.
        """
        if not self.is_replaced:
            self.install(module)
        elif self.switch:
            owner, _, name = self.switch.rpartition(".")
            is_wanted = functools.partial(is_switched_on, *self.parts)
            setattr(pkgutil.resolve_name(owner), name, staticmethod(is_wanted))


def _exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


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
