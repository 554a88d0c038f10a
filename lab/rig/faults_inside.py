"""Runs inside an engine process in which a fault is to be planted: registers it with the import hook."""

from __future__ import annotations

from types import ModuleType

from lab.rig import faults_retract  # noqa: F401  registers its faults
from lab.rig.faults import chosen
from lab.rig.say import say
from lab.rig.standins.hook import after


def _register() -> None:
    fault = chosen()
    if fault is None:
        return

    @after(fault.module)
    def plant(module: ModuleType) -> None:
        fault.plant(module)
        say("planted", fault=fault.name)


_register()
