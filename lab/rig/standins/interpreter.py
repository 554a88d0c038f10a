"""Stand-ins inside Triton's interpreter: its float conversion, and one kernel at a time.

The conversion does not round as the hardware does. When rounding carries over a value's mantissa, it keeps the old
exponent: the result is half of what it should be. Of fp8 values of a normal distribution that is one in sixteen. It
also rounds halves up instead of to even, and cuts bf16 off instead of rounding. A GPU rounds to nearest even and, for
fp8, clamps to the largest finite value.

While a kernel runs, the interpreter patches the language module for the whole process. Two threads that launch
kernels (the scheduler and the transfer's packing) then take each other's patches away.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["convert", "one_at_a_time", "rounded_conversion"]

# A kernel may launch another one.
_LAUNCHING = threading.RLock()

_TYPES = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def convert(values: Tensor, target: torch.dtype) -> Tensor:
    """Convert floats: to nearest even; beyond an fp8 type's range to its largest finite value; NaN stays NaN."""
    if target in _FP8:
        largest = torch.finfo(target).max
        return values.float().clamp(-largest, largest).to(target)
    return values.to(target)


def rounded_conversion(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the conversion: the formats above and rounding to nearest by PyTorch, anything else as before.

    The wrapped function takes an array of any shape in the input type's bits, the two Triton types and a rounding
    mode, and returns unsigned integers with the output type's bits, in the same shape.
    """

    def _convert_float(input: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
        source, target = _TYPES.get(input_dtype.name), _TYPES.get(output_dtype.name)
        if source is None or target is None or getattr(rounding_mode, "name", None) == "RTZ":
            return original(input, input_dtype, output_dtype, rounding_mode)
        flat = np.frombuffer(bytearray(input.tobytes()), dtype=np.uint8)
        bits = torch.from_numpy(flat).view(source)
        raw = convert(bits, target).view(torch.uint8).numpy()
        return raw.view(getattr(np, f"uint{output_dtype.primitive_bitwidth}")).reshape(input.shape)

    return _convert_float


def one_at_a_time(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a launch: the next thread waits until this one's kernel is done."""

    def __call__(*args: Any, **kwargs: Any) -> Any:
        with _LAUNCHING:
            return original(*args, **kwargs)

    return __call__
