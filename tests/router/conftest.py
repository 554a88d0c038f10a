"""The built routers, and running benches: one router per case and set of flags, started when first asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lab.router.build import Builder, Result  # noqa: E402
from lab.router.harness import Bench  # noqa: E402

OpenBench = Callable[..., Bench]


@pytest.fixture(scope="session")
def built() -> dict[str, Result]:
    """Both builds, made now when they are not there."""
    builder = Builder()
    return {variant: builder.build(variant) for variant in ("stock", "patched")}


@pytest.fixture(scope="module")
def bench(built: dict[str, Result]) -> Iterator[OpenBench]:
    """A function that returns the running bench of a variant, an environment and options; all end with the module."""
    with ExitStack() as stack:
        running: dict[Any, Bench] = {}

        def open_bench(variant: str, environment: dict[str, str] | None = None, **options: Any) -> Bench:
            key = (variant, repr(sorted((environment or {}).items())), repr(sorted(options.items())))
            if key not in running:
                running[key] = stack.enter_context(Bench(built[variant], environment=environment, **options))
            return running[key]

        yield open_bench
