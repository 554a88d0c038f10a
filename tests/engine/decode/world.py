"""Whole modules of a decode tree on a machine without the engine's packages.

Named modules are the tree's own files. Every other module of the engine, and every package that is not installed here,
is answered by stand-ins that import and that do nothing. Trees live side by side: each has modules of its own, put into
`sys.modules` only while a test is inside :meth:`World.entered`.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from tests.engine.decode import stubs
from tests.engine.load import stub

GATES = {
    "dcp": "SGLANG_RESEARCH_DCP_RETRACT",
    "settle": "SGLANG_RESEARCH_SETTLE_BEFORE_RETRACT",
    "draft": "SGLANG_RESEARCH_RETRACT_DRAFT_KV",
    "seed": "SGLANG_RESEARCH_DRAFT_SEED_RECOMPUTE",
}
PACKAGES = (
    "PIL",
    "einops",
    "huggingface_hub",
    "msgspec",
    "psutil",
    "pybase64",
    "requests",
    "sgl_kernel",
    "torchvision",
    "transformers",
    "zmq",
)
SCHEDULING = (
    "disaggregation.decode",
    "disaggregation.decode_schedule_batch_mixin",
    "disaggregation.utils",
    "managers.overlap_utils",
    "managers.schedule_batch",
    "managers.scheduler",
    "managers.scheduler_components.batch_result_processor",
    "managers.scheduler_components.new_token_ratio_tracker",
    "managers.utils",
    "mem_cache.allocation",
    "mem_cache.allocation_sizing",
    "mem_cache.allocator.base",
    "mem_cache.allocator.paged",
    "mem_cache.base_prefix_cache",
    "mem_cache.chunk_cache",
    "mem_cache.common",
    "mem_cache.memory_pool",
    "speculative.eagle_disaggregation",
    "speculative.eagle_info",
    "speculative.eagle_utils",
    "speculative.eagle_worker_v2",
    "speculative.spec_info",
    "speculative.spec_utils",
    "model_executor.forward_batch_info",
    "sampling.sampling_params",
    "sglang.kernels.ops.memory.allocator",
    "sglang.kernels.ops.memory.common",
)
ALWAYS = ("environ", "runtime_context", "utils", "utils.common")


class _Kind(type):
    """Classes that answer everything with nothing, so that any use at a module's top goes through."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _kind(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        decorates = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if decorates and cls.__module__ == __name__ else super().__call__(*args, **kwargs)

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __contains__(cls, item: Any) -> bool:
        return False

    def __bool__(cls) -> bool:
        return False


class _Nothing(metaclass=_Kind):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _kind(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *args: Any) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False


def _kind(name: str) -> Any:
    return _Kind(name, (_Nothing,), {"__module__": __name__})


class _Struct:
    """A `msgspec.Struct` as far as it is used here: a class of named fields."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def __init_subclass__(cls, **options: Any) -> None:
        pass


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _kind(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: Path, real: Iterable[str], known: Mapping[str, ModuleType]) -> None:
        self.root, self.real, self.known = root, frozenset(real), known

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        top = name.partition(".")[0]
        if top != "sglang":
            missing = top in PACKAGES and importlib.machinery.PathFinder.find_spec(top) is None
            return importlib.machinery.ModuleSpec(name, self, is_package=True) if missing else None
        if name in self.real or name.startswith("sglang.srt.research"):
            place = self.root / name.replace(".", "/")
            file = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
            folder = [str(place)] if place.is_dir() else None
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=folder)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        made = _StandIn(spec.name)
        vars(made).update(
            {key: value for key, value in vars(self.known.get(spec.name, made)).items() if key[:2] != "__"}
        )
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


class World:
    """Modules of one tree in a process whose gates are the given ones.

    Attributes:
        root: the tree.
    """

    def __init__(self, root: Path, gates: Iterable[str] = (), real: Iterable[str] = SCHEDULING, **values: str) -> None:
        self.root = root
        clean = {name: value for name, value in os.environ.items() if name not in GATES.values()}
        self._environment = {**clean, **{GATES[gate]: "1" for gate in gates}, "TRITON_INTERPRET": "1", **values}
        names = {name if name.startswith("sglang.") else f"sglang.srt.{name}" for name in (*ALWAYS, *real)}
        known = {name: module for name, module in stubs.surroundings().items() if name not in names}
        known["msgspec"] = stub("msgspec", Struct=_Struct)
        self._finder = _Finder(root, names, known)
        self._modules: dict[str, ModuleType] = {}

    @contextmanager
    def entered(self) -> Iterator[World]:
        """Let imports, those inside functions too, find this tree."""

        def ours(name: str) -> bool:
            return name.partition(".")[0] in ("sglang", *PACKAGES)

        outside = {name: module for name, module in sys.modules.items() if ours(name)}
        for name in outside:
            del sys.modules[name]
        sys.modules.update(self._modules)
        sys.meta_path.insert(0, self._finder)
        try:
            with (
                mock.patch.dict(os.environ, self._environment, clear=True),
                mock.patch.object(torch, "compile", lambda *args, **kwargs: args[0] if args else lambda inner: inner),
            ):
                yield self
        finally:
            sys.meta_path.remove(self._finder)
            self._modules = {name: module for name, module in sys.modules.items() if ours(name)}
            for name in self._modules:
                del sys.modules[name]
            sys.modules.update(outside)

    def module(self, name: str) -> Any:
        """The module ``sglang.srt.NAME``; to be called inside :meth:`entered` for the first time."""
        full = f"sglang.srt.{name}"
        return self._modules.get(full) or importlib.import_module(full)


class Whole(World):
    """The same for a process of the engine's own environment: nothing is stood in for, the modules are the wheel's."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @contextmanager
    def entered(self) -> Iterator[World]:
        """Nothing to do: the tree is on the path, and the process was started with its gates."""
        yield self

    def module(self, name: str) -> Any:
        """The module ``sglang.srt.NAME``."""
        return importlib.import_module(name if name.startswith("sglang.") else f"sglang.srt.{name}")
