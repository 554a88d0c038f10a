"""The float conversion against the definition of rounding to nearest even, value by value."""

from __future__ import annotations

import math
import threading
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lab.rig.standins import interpreter

_FP32 = SimpleNamespace(name="fp32", primitive_bitwidth=32)
_FP8 = SimpleNamespace(name="fp8e4nv", primitive_bitwidth=8)
_BF16 = SimpleNamespace(name="bf16", primitive_bitwidth=16)


def _original(*_: Any) -> Any:
    raise AssertionError("the interpreter's own conversion must not be called")


_convert = interpreter.rounded_conversion(_original)


def _fp8_values() -> list[tuple[int, float]]:
    """Every non-negative finite e4m3 pattern with its value, from the format's definition."""
    out = []
    for bits in range(0x7F):
        exponent, mantissa = bits >> 3, bits & 7
        value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        out.append((bits, value))
    return out


def test_every_value_between_two_fp8_numbers_goes_to_the_nearer_and_a_half_to_the_even_one() -> None:
    values = _fp8_values()
    for (low, low_value), (high, high_value) in pairwise(values):
        middle = (low_value + high_value) / 2
        probe = np.array([low_value, middle * (1 - 1e-6), middle, middle * (1 + 1e-6), high_value], dtype=np.float32)
        got = _convert(probe, _FP32, _FP8, None).tolist()
        even = low if low % 2 == 0 else high
        assert got == [low, low, even, high, high]


def test_the_carry_of_rounding_is_kept() -> None:
    # 15.6 lies between 15 (mantissa 111) and 16 (the next exponent). Losing the carry would give 8.
    assert _convert(np.array([15.6], dtype=np.float32), _FP32, _FP8, None).view(np.uint8).tolist() == [0x58]


def test_a_value_beyond_the_range_becomes_the_largest_finite_one() -> None:
    got = _convert(np.array([449.0, 1e6, -1e6, math.inf], dtype=np.float32), _FP32, _FP8, None).tolist()
    assert got == [0x7E, 0x7E, 0xFE, 0x7E]


def test_bf16_is_rounded_and_not_cut_off() -> None:
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    got = _convert(x, _FP32, _BF16, None)
    wide = (got.astype(np.uint32) << 16).view(np.float32)
    low = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    assert got.dtype == np.uint16
    assert bool((np.abs(wide - x) <= np.abs(x - low) + 1e-12).all())
    assert bool((wide != low).any())


def test_widening_keeps_every_value_and_the_shape() -> None:
    patterns = np.arange(0x7F, dtype=np.uint8).reshape(1, 127)
    wide = _convert(patterns, _FP8, _FP32, None).view(np.float32)
    assert wide.shape == (1, 127)
    assert wide[0].tolist() == [value for _, value in _fp8_values()]


@pytest.mark.parametrize("case", ["format", "rounding"])
def test_other_formats_and_rounding_to_zero_go_to_the_interpreter(case: str) -> None:
    seen = []
    convert = interpreter.rounded_conversion(lambda *call: seen.append(call))
    other = SimpleNamespace(name="fp8e4b15", primitive_bitwidth=8)
    convert(
        np.zeros(1, dtype=np.float32),
        _FP32,
        other if case == "format" else _FP8,
        SimpleNamespace(name="RTZ") if case == "rounding" else None,
    )
    assert len(seen) == 1


def test_not_a_number_stays_one() -> None:
    assert bool(interpreter.convert(torch.tensor([math.nan]), torch.float8_e4m3fn).float().isnan().all())


def test_two_threads_never_launch_at_the_same_time_but_one_may_launch_inside_its_own() -> None:
    inside, most = [0], [0]
    ready = threading.Barrier(2, timeout=10)

    def kernel(depth: int) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        # Long enough for the other thread to get in if it could.
        threading.Event().wait(0.02)
        inside[0] -= 1
        if depth:
            launch(depth - 1)

    launch = interpreter.one_at_a_time(kernel)

    def run() -> None:
        ready.wait()
        launch(1)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert most[0] == 1
