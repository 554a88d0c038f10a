#!/usr/bin/env python3
"""A series on a large image against reading that image once.

The image: the real prefill wheel below layers of files that compress to about half their size, packed with gzip.
Reading it once is `gzip -dc LAYER | tar -t`, layer after layer. Both read from the page cache where it has room; the
arms take turns. Memory is the largest that the process ever held.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from benchmarks.report import Row, show  # noqa: E402
from lab import provenance  # noqa: E402
from patchbundle import bases, fetch  # noqa: E402

TAR = "application/vnd.oci.image.layer.v1.tar+gzip"
SITE = "usr/local/lib/python3.11/site-packages"
MIB = 1 << 20
# A process is said to have held what the one held that it was started by. So that one must be small, and this is not.
ASK = """
import json, os, sys
quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=quiet)
_, status, usage = os.wait4(pid, 0)
print(json.dumps([os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024]))
"""


def padding(size: int) -> bytes:
    """The members of a layer of so many bytes, without an end: files of a few kilobytes to some megabytes."""
    rng = random.Random(size)
    words = [rng.randbytes(6).hex().encode() for _ in range(4096)]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        number = 0
        while out.tell() < size:
            count = rng.choice([2_000, 20_000, 200_000, 2_000_000])
            data = rng.randbytes(count // 3) + b" ".join(rng.choices(words, k=count // 20))
            info = tarfile.TarInfo(f"usr/share/padding/{number // 500}/{number}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
            number += 1
        return out.getvalue()[: out.tell()]


def write(layout: Path, gigabytes: int) -> None:
    """The layout. Each padding layer is one file of its own and, as further gzip members, four times what all share."""
    blobs = layout / "blobs/sha256"
    blobs.mkdir(parents=True)
    layers: list[tuple[str, int, str]] = []
    base = next(base for base in bases.load(ROOT / "config/bases.toml").values() if base.role == "prefill")
    with tempfile.TemporaryDirectory() as temporary:
        fetch.unpack(fetch.fetch(base, fetch.default_archive(base)), Path(temporary))
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            archive.add(temporary, arcname=SITE)
    layers.append(put(blobs, gzip.compress(out.getvalue(), 6, mtime=0), out.getvalue()))
    shared = padding(256 * MIB)
    packed = gzip.compress(shared, 1, mtime=0)
    for number in range(gigabytes):
        own = tarfile.TarInfo(f"usr/share/layer-{number}").tobuf()
        layers.append(put(blobs, gzip.compress(own, mtime=0) + 4 * packed, own + 4 * shared))
    del shared, packed
    config = {
        "created": "2026-11-01T00:00:00Z", "architecture": "amd64", "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [plain for _, _, plain in layers]},
        "history": [{"created_by": "benchmark"} for _ in layers],
    }  # fmt: skip
    raw = json.dumps(config).encode()
    digest, size, _ = put(blobs, raw, raw)
    manifest = {
        "schemaVersion": 2,
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest, "size": size},
        "layers": [{"mediaType": TAR, "digest": name, "size": count} for name, count, _ in layers],
    }
    raw = json.dumps(manifest).encode()
    digest, size, _ = put(blobs, raw, raw)
    entry = {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest, "size": size}
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))


def put(blobs: Path, data: bytes, plain: bytes) -> tuple[str, int, str]:
    name = hashlib.sha256(data).hexdigest()
    (blobs / name).write_bytes(data)
    return f"sha256:{name}", len(data), f"sha256:{hashlib.sha256(plain).hexdigest()}"


def layers_of(layout: Path) -> list[Path]:
    blobs = layout / "blobs/sha256"
    manifest = json.loads((layout / "index.json").read_bytes())["manifests"][0]["digest"].removeprefix("sha256:")
    return [
        blobs / item["digest"].removeprefix("sha256:") for item in json.loads((blobs / manifest).read_bytes())["layers"]
    ]


def children() -> float:
    """Processor seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def read_once(layout: Path) -> tuple[float, float]:
    """Seconds by the clock, and of the processor."""
    began, before = time.perf_counter(), children()
    for layer in layers_of(layout):
        subprocess.run(["sh", "-c", 'gzip -dc "$0" | tar -t > /dev/null', layer], check=True)
    return time.perf_counter() - began, children() - before


def patched(layout: Path) -> tuple[float, float, float]:
    """Seconds by the clock and of the processor, and MiB that the process held at most."""
    out = layout.parent / "out"
    words = [sys.executable, ROOT / "tools/apply.py", "image", "--from", layout, "--to", out, "--role", "prefill"]
    began = time.perf_counter()
    command = [sys.executable, "-I", "-S", "-c", ASK, *map(str, words), "--platform", "linux/amd64"]
    said = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    seconds = time.perf_counter() - began
    code, processor, memory = json.loads(said)
    if code:
        raise SystemExit(f"image ended with exit code {code}")
    shutil.rmtree(out)
    return seconds, processor, memory


@click.command()
@click.option("--gigabytes", default=5, show_default=True, help="Size of the layers beside the wheel's, unpacked.")
@click.option("--runs", default=3, show_default=True, help="0 makes the images, and measures nothing.")
@click.option("--folder", type=click.Path(path_type=Path), help="Make the images here, or find them, and keep them.")
@click.option("--json", "as_json", is_flag=True)
def main(gigabytes: int, runs: int, folder: Path | None, as_json: bool) -> None:
    """Needs about as much room on the disk as the layers have unpacked."""
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="image-", dir=ROOT / "build") as temporary:
        place = folder or Path(temporary)
        sizes = {"small": 1, "large": gigabytes}
        for name, size in sizes.items():
            if not (place / name / "index.json").is_file():
                write(place / name, size)
        if not runs:
            return
        arms = [(read_once(place / "large"), patched(place / "large")) for _ in range(runs)]
        read, read_cpu = (statistics.median(theirs[at] for theirs, _ in arms) for at in (0, 1))
        ours, ours_cpu = (statistics.median(own[at] for _, own in arms) for at in (0, 1))
        held = max(own[2] for _, own in arms)
        show(
            [
                Row("reading it once, gzip -dc | tar -t", read, "s"),
                Row("image, whole command", ours, "s"),
                Row("image / reading it once", ours / read, "x", "<= 1.3"),
                Row("the same, processor time", ours_cpu / read_cpu, "x"),
                Row("image, unpacked bytes a second", (gigabytes + 0.1) * 1024 / ours, "MiB/s"),
                Row("memory at most", held, "MiB"),
                Row("memory, beside an image of 1 GiB", held / patched(place / "small")[2], "x", "<= 1.1"),
            ],
            as_json,
            provenance.of(__file__, None),
        )


if __name__ == "__main__":
    main()
