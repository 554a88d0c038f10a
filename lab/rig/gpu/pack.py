"""Make the archive with which a GPU machine without a network boots the real 0.5.17 engine, stock and patched.

``python -m lab.rig.gpu.pack OUT`` writes ``OUT/engine-0.5.17-gpu.tar.xz`` (about 50 MB: wheels for Python 3.12, the
kernels of sm_90 alone; kept when it was made from the same list) and ``OUT/patched-0.5.17.tar.xz`` (the files that the
series changes or adds). What a GPU machine compiled may lie beside them as ``OUT/kernels-0.5.17-gpu.tar.xz``, which
``lab.rig.gpu.engine --save-kernels`` writes there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from lab.rig import cache, trees
from lab.rig.errors import RigError

LIST = Path(__file__).with_name("requirements-gpu-0.5.17.txt")
ENGINE = "engine-0.5.17-gpu.tar.xz"
PATCHED = "patched-0.5.17.tar.xz"
KERNELS = "kernels-0.5.17-gpu.tar.xz"
MADE_FROM = "made-from.txt"
RECEIPT = "receipt.json"
NEEDED = 8_000_000_000
# Not needed on sm_90 with the sparse paths: FlashAttention-3 (1.1 GB), InfLLM, sm_100 kernels, the multimodal package.
LEFT_OUT = (
    "bin",
    "sgl_kernel/flash_ops.abi3.so",
    "sgl_kernel/infllm_ops*",
    "sgl_kernel/sm100",
    "sglang/multimodal_gen",
    "sglang/test",
    # Of the bundled headers only what a compilation includes.
    *(f"flashinfer/data/cutlass/{name}" for name in ("docs", "examples", "media", "python", "test")),
    *(f"flashinfer/data/cccl/{name}" for name in ("benchmarks", "ci", "docs", "examples", "python")),
    *(f"flashinfer/data/cccl/*/{name}" for name in ("benchmarks", "examples", "test")),
)
_GLIBC = (34, 31, 28, 27, 24, 17, 12, 5)


def _platforms() -> list[str]:
    names = [f"manylinux_2_{number}_x86_64" for number in _GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64", "any"]
    return [word for name in names for word in ("--platform", name)]


def install(library: Path) -> None:
    """Install the hashed list into the folder ``library``, for the GPU machine's Python.

    Raises:
        RigError: kind ``pack``, with pip's last lines.
    """
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--no-compile"]
    argv += ["--target", str(library), "--python-version", "3.12", "--implementation", "cp"]
    argv += ["--abi", "cp312", "--abi", "abi3", "--abi", "none", "--only-binary=:all:", *_platforms(), "-r", str(LIST)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise RigError("pack", "pip could not install the list", tuple(done.stderr.splitlines()[-15:]))
    for pattern in LEFT_OUT:
        for path in library.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def changed(stock: Path, patched: Path) -> list[str]:
    """Files of ``patched`` that are not in ``stock`` or differ from it, relative, sorted."""
    found = []
    for path in sorted((patched / "sglang").rglob("*")):
        name = path.relative_to(patched).as_posix()
        if path.is_file() and "__pycache__" not in path.parts:
            other = stock / name
            if not other.is_file() or other.read_bytes() != path.read_bytes():
                found.append(name)
    return found


def archive(folder: Path, names: list[str], target: Path) -> None:
    """Write the files ``names`` of ``folder`` to ``target``, beside it first; owners and times are left out."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        return info

    fresh = target.with_suffix(".new")
    with tarfile.open(fresh, "w:xz", preset=6) as out:
        for name in names:
            out.add(folder / name, arcname=name, filter=plain)
    fresh.rename(target)


def content(packed: Path) -> str:
    """SHA-256 of the names and bytes in an archive of :func:`archive`.

    The receipt is left out: it names the patches of every role, and so changes with those that are not in the tree.
    """
    found = hashlib.sha256()
    with tarfile.open(packed, "r:xz") as source:
        for member in sorted(source, key=lambda one: one.name):
            made = source.extractfile(member)
            if made is not None and not member.name.endswith(f"/{RECEIPT}"):
                found.update(f"{member.name}\0{hashlib.sha256(made.read()).hexdigest()}\n".encode())
    return found.hexdigest()


def files(folder: Path) -> list[str]:
    """All files below ``folder``, relative, sorted."""
    return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]


def digest() -> str:
    """SHA-256 of what decides the engine's archive: the list, what is left out, for which Python and platforms."""
    text = LIST.read_bytes() + repr((LEFT_OUT, _platforms())).encode()
    return hashlib.sha256(text).hexdigest()


def pack_engine(out: Path) -> None:
    """Write the engine's archive, unless one that was made from the same list is there.

    Raises:
        RigError: kinds ``disk``, ``pack``.
    """
    note = out / MADE_FROM
    if (out / ENGINE).is_file() and note.is_file() and note.read_text(encoding="ascii").strip() == digest():
        return
    cache.need_disk(out, NEEDED, "gpu-pack")
    library = out / "library"
    shutil.rmtree(library, ignore_errors=True)
    install(library)
    archive(library, files(library), out / ENGINE)
    shutil.rmtree(library)
    note.write_text(digest() + "\n", encoding="ascii")


def main() -> int:
    """Entry point of ``make gpu-pack``."""
    parser = argparse.ArgumentParser(description="archive of the engine for one GPU machine without a network")
    parser.add_argument("out", type=Path)
    parser.add_argument("--patched-root", type=Path, help="the patched tree; made from this repository if not given")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    try:
        pack_engine(out)
        patched = arguments.patched_root or trees.patched("decode", print)
        archive(patched, changed(trees.stock("decode", print), patched), out / PATCHED)
    except RigError as error:
        print(*error.tail, f"{error.kind}: {error}", sep="\n", file=sys.stderr)
        return 1
    for name in (ENGINE, PATCHED, KERNELS):
        if (out / name).is_file():
            print(f"{out / name}: {os.stat(out / name).st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
