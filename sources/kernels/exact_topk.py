"""The exact, deterministic top-k of score rows: the call from Python.

The contract stands at the top of ``exact_topk.cu``, beside this module. Everything that can be told without waiting
for the device is checked here, before the launch, and named in the error.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from sglang.srt.research.kernels import build
from torch import Tensor

SOURCE = Path(__file__).with_name("exact_topk.cu")
# The build refuses any other bytes. This module is itself pinned, so the pair can only change together.
SOURCE_SHA256 = "7795cc1cb893fc5ee401cfd146521690bb0ae2bee8e78ea66dc5f102cef075a2"

LARGEST_K = 2048
PATHS = {"auto": 0, "resident": 1, "stream": 2, "split": 3}


class TopkArgumentError(ValueError):
    """A call that the kernel does not serve. Raised before anything is launched."""


class _Arguments(ctypes.Structure):
    """``struct Arguments`` of the kernel source."""

    _fields_ = (
        ("scores", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("segments", ctypes.c_void_p),
        ("segment_table", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("rows", ctypes.c_longlong),
        ("width", ctypes.c_longlong),
        ("stride", ctypes.c_longlong),
        ("table_rows", ctypes.c_longlong),
        ("table_width", ctypes.c_longlong),
        ("table_stride", ctypes.c_longlong),
        ("workspace_bytes", ctypes.c_longlong),
        ("segment_count", ctypes.c_int),
        ("k", ctypes.c_int),
        ("page_shift", ctypes.c_int),
        ("mode", ctypes.c_int),
        ("bf16", ctypes.c_int),
        ("path", ctypes.c_int),
        ("split", ctypes.c_int),
        ("sample_rank", ctypes.c_int),
        ("processors", ctypes.c_int),
    )


_libraries: dict[tuple[int, int], Any] = {}  # by compute capability
_processors: dict[int, int] = {}  # by device: its multiprocessors; present once the device is prepared


def prepare(device: torch.device | str | int) -> None:
    """Build and load the kernel for ``device`` and make it ready there. Call it before any capture.

    Raises:
        TopkArgumentError: not a CUDA device, or a capture is going on.
        sglang.srt.research.kernels.build.KernelBuildError: wrong source, card or compiler, or a failed build.
        RuntimeError: the device refused.
    """
    device = torch.device(device) if not isinstance(device, int) else torch.device("cuda", device)
    if device.type != "cuda" or torch.version.hip is not None:
        raise TopkArgumentError(f"exact top-k needs a CUDA device, not {device}")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index in _processors:
        return
    if torch.cuda.is_current_stream_capturing():
        raise TopkArgumentError(
            "exact top-k is not built yet and cannot be built during a graph capture: prepare() first"
        )
    capability = torch.cuda.get_device_capability(index)
    if capability not in _libraries:
        loaded = build.library(SOURCE, SOURCE_SHA256, capability)
        if loaded.exact_topk_argument_bytes() != ctypes.sizeof(_Arguments):
            raise build.KernelBuildError("exact_topk.cu and exact_topk.py disagree about the arguments")
        loaded.exact_topk_workspace.restype = ctypes.c_longlong
        loaded.exact_topk_error.restype = ctypes.c_char_p
        loaded.exact_topk_launch.argtypes = (ctypes.POINTER(_Arguments), ctypes.c_void_p)
        _libraries[capability] = loaded
    with torch.cuda.device(index):
        _succeed(_libraries[capability], _libraries[capability].exact_topk_prepare())
    _processors[index] = torch.cuda.get_device_properties(index).multi_processor_count


def _succeed(loaded: Any, error: int) -> None:
    if error == -1:
        raise TopkArgumentError("exact top-k: rows, width or k beyond what the kernel can count")
    if error == -2:
        raise TopkArgumentError("exact top-k: the workspace is too small")
    if error == -3:
        raise TopkArgumentError("exact top-k: the resident path does not take rows this wide")
    if error:
        raise RuntimeError(f"exact top-k: CUDA error {error}, {loaded.exact_topk_error(error).decode()}")


def select(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    *,
    starts: Tensor | None = None,
    offsets: Tensor | None = None,
    table: Tensor | None = None,
    page_size: int = 1,
    segments: Tensor | None = None,
    segment_table: Tensor | None = None,
    table_may_be_short: bool = False,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    path: str = "auto",
    split: int = 0,
    sample_rank: int = 0,
) -> Tensor:
    """Choose the ``k`` best columns of each row, ties to the lowest column, ascending, -1 behind them.

    Works on the current stream, waits for nothing, and allocates only what is not given.

    Args:
        scores: float32 or bfloat16 ``[rows, width]``, columns adjacent, any row stride; never written.
        lengths: int32 ``[rows]``, columns of each row's window; negative is 0; cut at ``width - start``.
        k: 1 to 2048.
        starts: int32 ``[rows]``, first column of each window; without it 0.
        offsets: int32 ``[rows]``; given, each column relative to its start gets its row's offset added.
        table: int32 ``[table rows, pages]``, pages adjacent; given, each column becomes the slot
            ``table[r, column // page_size] * page_size + column % page_size``.
        page_size: columns in a page of ``table``, a power of two.
        segments: int32 ``[n + 1]``, ascending; rows ``segments[j]`` up to ``segments[j + 1]`` use table row j.
            Without it row i uses table row i. A row in no segment becomes -1 throughout.
        segment_table: int32 ``[n]``, the table row of each segment; without it j.
        table_may_be_short: the caller knows that no length reaches beyond the table although the scores are wider.
            A column beyond the table becomes -1; the table is never read there.
        out: int32 ``[rows, k]``, contiguous; made if not given.
        workspace: uint8, 16-byte aligned, at least :func:`workspace_bytes` long; made if not given. Two launches that
            can run at the same time need two.
        path, split, sample_rank: for tests and measurements. They change the way, never the result.

    Returns:
        int32 ``[rows, k]``.

    Raises:
        TopkArgumentError: an argument is not as said here, or the kernel is not built and a capture is going on.
        sglang.srt.research.kernels.build.KernelBuildError: the kernel cannot be built.
        RuntimeError: the launch failed.
    """
    _check_scores(scores, lengths, k, starts, offsets)
    if table is not None:
        _check_table(scores, table, page_size, segments, segment_table, table_may_be_short, offsets)
    elif page_size != 1 or segments is not None or segment_table is not None:
        raise TopkArgumentError("exact top-k: page_size, segments and segment_table mean nothing without a table")
    if path not in PATHS or split < 0 or sample_rank < 0:
        raise TopkArgumentError(f"exact top-k: {path=} {split=} {sample_rank=}")
    rows, width = scores.shape
    index = scores.device.index
    if index not in _processors:
        prepare(scores.device)
    if out is None:
        out = torch.empty((rows, k), dtype=torch.int32, device=scores.device)
    else:
        _check_ints(scores, "out", out, (rows, k))
        if not out.is_contiguous():
            raise TopkArgumentError("exact top-k: out must be contiguous")
    arguments = _Arguments(
        scores=scores.data_ptr(),
        lengths=lengths.data_ptr(),
        starts=_pointer(starts),
        offsets=_pointer(offsets),
        table=_pointer(table),
        segments=_pointer(segments),
        segment_table=_pointer(segment_table),
        out=out.data_ptr(),
        rows=rows,
        width=width,
        stride=scores.stride(0),
        table_rows=0 if table is None else table.shape[0],
        table_width=0 if table is None else table.shape[1],
        table_stride=0 if table is None else table.stride(0),
        segment_count=0 if segments is None else segments.shape[0] - 1,
        k=k,
        page_shift=page_size.bit_length() - 1,
        mode=2 if table is not None else 1 if offsets is not None else 0,
        bf16=int(scores.dtype == torch.bfloat16),
        path=PATHS[path],
        split=split,
        sample_rank=sample_rank,
        processors=_processors[index],
    )
    loaded = _libraries[torch.cuda.get_device_capability(index)]
    needed = loaded.exact_topk_workspace(ctypes.byref(arguments))
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.uint8, device=scores.device)
    elif workspace.dtype != torch.uint8 or workspace.device != scores.device or not workspace.is_contiguous():
        raise TopkArgumentError("exact top-k: workspace must be contiguous uint8 on the device of the scores")
    elif workspace.numel() < needed or workspace.data_ptr() % 16:
        raise TopkArgumentError(
            f"exact top-k: workspace too small or not aligned: {workspace.numel()} bytes at {workspace.data_ptr():#x}, "
            f"{needed} needed at a multiple of 16"
        )
    arguments.workspace = workspace.data_ptr()
    arguments.workspace_bytes = workspace.numel()
    with torch.cuda.device(index):
        stream = torch.cuda.current_stream(index).cuda_stream
        _succeed(loaded, loaded.exact_topk_launch(ctypes.byref(arguments), stream))
    return out


def workspace_bytes(scores: Tensor, k: int, *, starts: Tensor | None = None, path: str = "auto", split: int = 0) -> int:
    """Tell how many bytes of workspace :func:`select` needs for ``scores``, whatever the lengths.

    Raises:
        TopkArgumentError: as :func:`select`.
    """
    if scores.dim() != 2 or scores.device.type != "cuda" or path not in PATHS:
        raise TopkArgumentError(f"exact top-k: scores {tuple(scores.shape)} on {scores.device}, {path=}")
    prepare(scores.device)
    arguments = _Arguments(
        scores=scores.data_ptr(),
        starts=_pointer(starts),
        rows=scores.shape[0],
        width=scores.shape[1],
        stride=scores.stride(0),
        k=k,
        bf16=int(scores.dtype == torch.bfloat16),
        path=PATHS[path],
        split=split,
        processors=_processors[scores.device.index],
    )
    loaded = _libraries[torch.cuda.get_device_capability(scores.device.index)]
    return int(loaded.exact_topk_workspace(ctypes.byref(arguments)))


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check_scores(scores: Tensor, lengths: Tensor, k: int, starts: Tensor | None, offsets: Tensor | None) -> None:
    if scores.dim() != 2 or scores.dtype not in (torch.float32, torch.bfloat16):
        raise TopkArgumentError(
            f"exact top-k: scores must be float32 or bfloat16 [rows, width], not {scores.dtype} {tuple(scores.shape)}"
        )
    if scores.device.type != "cuda":
        raise TopkArgumentError(f"exact top-k: scores must be on a CUDA device, not {scores.device}")
    if scores.shape[1] > 1 and scores.stride(1) != 1:
        raise TopkArgumentError(f"exact top-k: the columns of scores must be adjacent, not {scores.stride(1)} apart")
    if scores.stride(0) < 0 or scores.shape[1] >= 2**31 - 256:
        raise TopkArgumentError(f"exact top-k: row stride {scores.stride(0)}, width {scores.shape[1]}")
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= LARGEST_K:
        raise TopkArgumentError(f"exact top-k: k must be 1 to {LARGEST_K}, not {k!r}")
    rows = scores.shape[:1]
    _check_ints(scores, "lengths", lengths, rows)
    for name, tensor in (("starts", starts), ("offsets", offsets)):
        if tensor is not None:
            _check_ints(scores, name, tensor, rows)


def _check_ints(scores: Tensor, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype != torch.int32 or tensor.device != scores.device or tuple(tensor.shape) != tuple(shape):
        raise TopkArgumentError(
            f"exact top-k: {name} must be int32 {tuple(shape)} on {scores.device}, "
            f"not {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        )
    if tensor.dim() == 1 and tensor.shape[0] > 1 and tensor.stride(0) != 1:
        raise TopkArgumentError(f"exact top-k: {name} must be contiguous")


def _check_table(
    scores: Tensor,
    table: Tensor,
    page_size: int,
    segments: Tensor | None,
    segment_table: Tensor | None,
    table_may_be_short: bool,
    offsets: Tensor | None,
) -> None:
    if offsets is not None:
        raise TopkArgumentError("exact top-k: either offsets or a table, not both")
    if page_size < 1 or page_size & (page_size - 1):
        raise TopkArgumentError(f"exact top-k: page_size must be a power of two, not {page_size}")
    if table.dim() != 2:
        raise TopkArgumentError(f"exact top-k: table must be [table rows, pages], not {tuple(table.shape)}")
    _check_ints(scores, "table", table, tuple(table.shape))
    if table.shape[1] > 1 and table.stride(1) != 1:
        raise TopkArgumentError("exact top-k: the pages of a table row must be adjacent")
    if not table_may_be_short and table.shape[1] * page_size < scores.shape[1]:
        raise TopkArgumentError(
            f"exact top-k: a table of {table.shape[1]} pages of {page_size} is short of {scores.shape[1]} columns"
        )
    if segments is None:
        if segment_table is not None:
            raise TopkArgumentError("exact top-k: segment_table needs segments")
        if table.shape[0] < scores.shape[0]:
            raise TopkArgumentError(f"exact top-k: {scores.shape[0]} rows, but {table.shape[0]} table rows")
        return
    if segments.dim() != 1 or segments.shape[0] < 1:
        raise TopkArgumentError(f"exact top-k: segments must be [n + 1], not {tuple(segments.shape)}")
    _check_ints(scores, "segments", segments, tuple(segments.shape))
    count = segments.shape[0] - 1
    if segment_table is not None:
        _check_ints(scores, "segment_table", segment_table, (count,))
    elif table.shape[0] < count:
        raise TopkArgumentError(f"exact top-k: {count} segments, but {table.shape[0]} table rows")
