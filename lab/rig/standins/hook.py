"""One import hook: run a named function right after a named module was executed, in every process.

A function registered for module ``a.b`` runs once, after the body of ``a.b`` and before the statement that
imported it goes on. So names are replaced before the importing module binds them. Functions of one module run
in the order in which they were registered. An exception in one of them ends the import.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

__all__ = ["Hook", "after", "empty", "install", "registered"]

Hook = Callable[[ModuleType], None]

_HOOKS: dict[str, list[Hook]] = {}
_EMPTY: set[str] = set()


class _Nothing(importlib.abc.Loader):
    """Makes a module without any content."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        return None


class _Loader(importlib.abc.Loader):
    """The found loader, with the hooks run after it; every other attribute is the found loader's own."""

    def __init__(self, inner: importlib.abc.Loader, name: str) -> None:
        self._inner = inner
        self._name = name

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        for hook in _HOOKS.get(self._name, ()):
            hook(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._busy: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in _EMPTY:
            return importlib.machinery.ModuleSpec(fullname, _Nothing())
        if fullname not in _HOOKS or fullname in self._busy:
            return None
        self._busy.add(fullname)
        try:
            for finder in sys.meta_path:
                if finder is self:
                    continue
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    break
            else:
                return None
        finally:
            self._busy.discard(fullname)
        if spec.loader is not None:
            spec.loader = _Loader(spec.loader, fullname)
        return spec


_FINDER = _Finder()


def after(name: str) -> Callable[[Hook], Hook]:
    """Decorate a function of one module: it runs right after the module ``name`` was executed.

    Where the module is already imported the function runs at once, so that a late registration is never silent.
    """

    def register(hook: Hook) -> Hook:
        _HOOKS.setdefault(name, []).append(hook)
        module = sys.modules.get(name)
        if module is not None:
            hook(module)
        return hook

    return register


def empty(name: str) -> None:
    """Answer an import of ``name`` by an empty module: for a compiled library whose loading alone needs a driver."""
    _EMPTY.add(name)


def registered() -> frozenset[str]:
    """Names of the modules that have at least one function waiting for them."""
    return frozenset(_HOOKS)


def install() -> None:
    """Put the finder first in ``sys.meta_path``; a second call changes nothing."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
