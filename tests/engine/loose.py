"""Load a large file of an engine whose many imports do not matter to the functions under test."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from tests.engine.load import load

TOPS = ("sglang", "sgl_kernel", "flashinfer", "deep_gemm", "msgspec")


class _Empty:
    def __init_subclass__(cls, **options: Any) -> None:
        pass


class _Anything(ModuleType):
    """A module that has every name: an empty class where it looks like one, a "no" for a question, else a mock."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        words = name.lstrip("_")
        found: Any = mock.MagicMock(name=name)
        if words[:1].isupper() and not words.isupper():
            found = type(name, (_Empty,), {})
        elif name.startswith(("_is_", "_use_")):
            found = False
        elif name.startswith(("is_", "use_")):
            found = mock.Mock(name=name, return_value=False)
        setattr(self, name, found)
        return found


def widened(module: ModuleType) -> ModuleType:
    """``module`` with every other name as well."""
    wide = _Anything(module.__name__)
    wide.__path__ = []
    vars(wide).update({name: value for name, value in vars(module).items() if not name.startswith("__")})
    return wide


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in TOPS:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def anything(known: Mapping[str, ModuleType]) -> Iterator[None]:
    """Within the block every import below `TOPS` works: ``known`` modules are themselves, all others are empty."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in TOPS}
    for name in before:
        del sys.modules[name]
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        for name, module in sorted(known.items()):
            parent, _, own = name.rpartition(".")
            if parent:
                setattr(
                    importlib.import_module(parent) if parent not in sys.modules else sys.modules[parent], own, module
                )
            sys.modules[name] = module
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in TOPS]:
            del sys.modules[name]
        sys.modules.update(before)


def load_loosely(root: Path, path: str, known: Mapping[str, ModuleType]) -> ModuleType:
    """Execute the file ``path`` of the tree ``root``; imports that ``known`` does not answer give empty modules."""
    with anything(known):
        return load(root, path)
