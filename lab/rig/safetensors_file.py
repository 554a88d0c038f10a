"""Write a safetensors file with numpy alone.

The format is eight bytes of header length (little endian), a JSON header, then the raw tensors. It is written here
so that a tiny model needs neither torch nor the safetensors package: the bytes depend on the seed alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


def bfloat16_bits(values: Array) -> npt.NDArray[np.uint16]:
    """Round float32 ``values`` to bfloat16 (nearest, ties to even) and return the 16-bit patterns.

    Raises:
        ValueError: a value is not finite; a tiny model never holds one.
    """
    if not np.isfinite(values).all():
        raise ValueError("a weight is not finite")
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def write(path: Path, tensors: Mapping[str, Array], float32: frozenset[str] = frozenset()) -> None:
    """Write ``tensors`` to ``path``, as bfloat16 except for the names in ``float32``."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    blobs: list[bytes] = []
    offset = 0
    for name in sorted(tensors):
        value = np.ascontiguousarray(tensors[name], dtype=np.float32)
        blob = value.tobytes() if name in float32 else bfloat16_bits(value).tobytes()
        header[name] = {
            "dtype": "F32" if name in float32 else "BF16",
            "shape": list(value.shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for blob in blobs:
            out.write(blob)


def read_header(path: Path) -> dict[str, dict[str, object]]:
    """Return the tensors' entries of the file ``path``.

    Raises:
        ValueError: the file is shorter than its header says, or its header is no JSON object.
    """
    size = path.stat().st_size
    with path.open("rb") as source:
        length = int.from_bytes(source.read(8), "little")
        if length > size - 8:
            raise ValueError(f"{path.name}: header of {length} bytes in a file of {size}")
        try:
            header = json.loads(source.read(length))
        except ValueError as error:
            raise ValueError(f"{path.name}: header is not JSON") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path.name}: header is not an object")
    header.pop("__metadata__", None)
    end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    if end != size - 8 - length:
        raise ValueError(f"{path.name}: {size - 8 - length} bytes of data, {end} announced")
    return header
