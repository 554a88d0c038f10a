"""Loaded by every engine process on the GPU machine: answers imports of packages that are named but never used there.

``PATCHBUNDLE_RIG_GHOSTS`` names them, comma separated. A ghost module hands out classes that do nothing, so that the
import of a module which merely mentions the package succeeds. Nothing that runs on the rig's path calls one.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

GHOSTS = frozenset(filter(None, os.environ.get("PATCHBUNDLE_RIG_GHOSTS", "").split(",")))


def _hidden(name: str) -> bool:
    """Whether a missing special name must stay missing: Python asks for many of them to see what an object can."""
    return name.startswith("__") and "mlir" not in name


class _GhostMeta(type):
    def __getattr__(cls, name: str) -> Any:
        if _hidden(name):
            raise AttributeError(name)
        return _ghost(name)

    def __getitem__(cls, key: object) -> Any:
        return cls

    def __or__(cls, other: object) -> Any:
        return cls

    def __ror__(cls, other: object) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __mro_entries__(cls, bases: object) -> tuple[type, ...]:
        return ()


class _Ghost(metaclass=_GhostMeta):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return importlib.import_module("pydantic_core.core_schema").any_schema()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # As a decorator a ghost hands back what it decorates.
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if _hidden(name):
            raise AttributeError(name)
        return _Ghost()


def _ghost(name: str) -> Any:
    return _GhostMeta(name, (_Ghost,), {})


class _GhostModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if _hidden(name):
            raise AttributeError(name)
        return _ghost(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        parts = fullname.split(".")
        if any(".".join(parts[:depth]) in GHOSTS for depth in range(1, len(parts) + 1)):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _GhostModule(spec.name)
        module.__path__ = []
        vars(module)["__version__"] = "0.0.0"
        module.__file__ = "<ghost>"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to execute."""


def _install() -> None:
    sys.meta_path.insert(0, _Finder())
    stock = importlib.metadata.version

    def version(distribution_name: str) -> str:
        if distribution_name.replace("-", "_") in GHOSTS or distribution_name in GHOSTS:
            return "0.0.0"
        return stock(distribution_name)

    importlib.metadata.version = version


_install()
for _name in filter(None, os.environ.get("PATCHBUNDLE_RIG_HOOKS", "").split(",")):
    importlib.import_module(_name)
