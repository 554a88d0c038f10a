"""What happens in every engine process before its first line: leash, version, check, installation."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import inspect
import os
import signal
import sys
from types import ModuleType
from typing import Any

from lab.rig.standins import hook, targets
from lab.rig.standins.errors import StandInMoved, UnknownVersion
from lab.rig.standins.table import VERSIONS, StandIn, for_version

__all__ = ["apply", "install", "leash", "start"]

_PR_SET_PDEATHSIG = 1
_CHECKED = "PATCHBUNDLE_RIG_CHECKED"


def leash() -> None:
    """End this process when its parent ends."""
    if os.environ.get("PATCHBUNDLE_RIG_LEASH") != "1" or not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _version() -> str:
    """The engine version to stand in for.

    Raises:
        UnknownVersion: no engine, one that the table does not know, or another one than announced.
    """
    announced = os.environ.get("PATCHBUNDLE_RIG_ENGINE", "")
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise UnknownVersion("no sglang is installed in this Python") from None
    if announced and announced != found:
        raise UnknownVersion(f"PATCHBUNDLE_RIG_ENGINE announces sglang {announced}, installed is {found}")
    if found not in VERSIONS:
        raise UnknownVersion(f"no stand-ins for sglang {found}; known: {', '.join(VERSIONS)}")
    return found


def _holder(module: ModuleType, entry: StandIn) -> tuple[Any, str]:
    """The object that holds the target as an attribute, and the attribute's name."""
    *path, last = entry.name.split(".")
    holder: Any = module
    for part in path:
        if not hasattr(holder, part):
            raise StandInMoved(f"{entry.target}: no {part} in {getattr(holder, '__name__', holder)}")
        holder = getattr(holder, part)
    return holder, last


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def apply(entry: StandIn, module: ModuleType) -> None:
    """Put one stand-in in place, in a module that was just executed.

    Raises:
        StandInMoved: the target is missing, is there although it should not be, or takes other parameters.
    """
    source, _, attribute = entry.by.partition(":")
    ours: Any = getattr(importlib.import_module(f"lab.rig.standins.{source}"), attribute)
    holder, last = _holder(module, entry)
    exists = hasattr(holder, last)
    if entry.how == "add":
        if last in vars(holder):
            raise StandInMoved(f"{entry.target} exists; it was expected on a machine with a GPU only")
    elif not exists:
        raise StandInMoved(f"{entry.target} is missing")
    if entry.how == "wrap":
        theirs = getattr(holder, last)
        ours = ours(theirs)
        if inspect.isfunction(ours):
            functools.update_wrapper(ours, theirs)
    elif entry.how == "replace":
        expected, mine = _parameters(getattr(holder, last)), _parameters(ours)
        # A registered custom operation hides its parameters; the tree was checked before (targets).
        if expected not in (mine, ["args", "kwargs"]):
            raise StandInMoved(f"{entry.target} takes {expected}, its stand-in takes {mine}")
    setattr(holder, last, ours)


def install(version: str) -> None:
    """Register the stand-ins of one version; each goes in when its target's module has been executed."""

    def put(entry: StandIn) -> None:
        hook.after(entry.module)(lambda module: apply(entry, module))

    for entry in for_version(version):
        if entry.how == "empty":
            hook.empty(entry.module)
        else:
            put(entry)
    hook.install()


def start() -> None:
    """Prepare this process. Called by ``sitecustomize``.

    Raises:
        StandInError: the engine must not start.
    """
    leash()
    version = _version()
    if os.environ.get(_CHECKED) != version:
        targets.check(version, sys.path)
        os.environ[_CHECKED] = version
    install(version)
    for name in filter(None, os.environ.get("PATCHBUNDLE_RIG_HOOKS", "").split(",")):
        importlib.import_module(name.strip())
