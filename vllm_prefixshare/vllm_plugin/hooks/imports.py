"""Calls a function when a module is imported."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class ImportWatcher(MetaPathFinder):
    """Finds modules as Python's own finder does, and calls ``loaded(module)`` at the end of the
    import of each module in ``names``.
    """

    def __init__(self, names: set[str], loaded: Callable[[ModuleType], None]) -> None:
        self._names = names
        self._loaded = loaded

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module in ``names``, which runs ``loaded`` after the import; else None."""
        if name not in self._names:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        exec_module = spec.loader.exec_module

        def exec_and_tell(module: ModuleType) -> None:
            exec_module(module)
            self._loaded(module)

        spec.loader.exec_module = exec_and_tell  # type: ignore[method-assign]
        return spec


def watch_imports(names: set[str], loaded: Callable[[ModuleType], None]) -> None:
    """Call ``loaded(module)`` for each of ``names`` that is imported from now on. There is one
    watcher in a process: a second call changes nothing.
    """
    if not any(isinstance(finder, ImportWatcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, ImportWatcher(names, loaded))
