"""Images for the tests: layouts out of layers that are written down, and the trees that they come to.

Written with the standard library's tar writer; read back, where an oracle is wanted, by umoci.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchbundle.identity import EXECUTABLE, File

SITE = "usr/local/lib/python3.11/site-packages"
CREATED = "2026-11-01T12:00:00Z"
WHEN = 1_793_534_400  # the same, in seconds
TAR = "application/vnd.oci.image.layer.v1.tar"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"


@dataclass(frozen=True)
class Item:
    """One member of a layer."""

    name: str
    data: bytes = b""
    kind: bytes = tarfile.REGTYPE
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime: int = WHEN - 1000
    target: str = ""
    attributes: Mapping[str, bytes] = field(default_factory=dict)


def folder(name: str, mode: int = 0o755, **more: Any) -> Item:
    return Item(name, kind=tarfile.DIRTYPE, mode=mode, **more)


def link(name: str, target: str) -> Item:
    return Item(name, kind=tarfile.SYMTYPE, mode=0o777, target=target)


def tar(items: Iterable[Item]) -> bytes:
    """The bytes of an uncompressed layer."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for item in items:
            info = tarfile.TarInfo(item.name)
            info.type, info.mode, info.uid, info.gid, info.mtime = item.kind, item.mode, item.uid, item.gid, item.mtime
            info.size, info.linkname = len(item.data), item.target
            info.pax_headers = {
                f"SCHILY.xattr.{name}": data.decode("utf-8", "surrogateescape")
                for name, data in item.attributes.items()
            }
            archive.addfile(info, io.BytesIO(item.data))
    return out.getvalue()


def files_of(files: Mapping[str, File], root: str = SITE, **more: Any) -> list[Item]:
    """Members for the files of a distribution, the folders above them first."""
    parts = root.split("/") if root else []
    names = {"/".join(parts[:count]) for count in range(1, len(parts) + 1)}
    for path in files:
        where = f"{root}/{path}".lstrip("/").split("/")[:-1]
        names |= {"/".join(where[:count]) for count in range(1, len(where) + 1)}
    items = [folder(name, **more) for name in sorted(names)]
    for path, file in sorted(files.items()):
        mode = 0o755 if file.mode == EXECUTABLE else 0o644
        items.append(Item(f"{root}/{path}".lstrip("/"), file.data, mode=mode, **more))
    return items


def tree_files(tree: Path) -> dict[str, File]:
    """The plain files of a folder, as a layer would hold them."""
    found = {}
    for path in sorted(tree.rglob("*")):
        if path.is_file():
            mode = EXECUTABLE if path.stat().st_mode & 0o100 else "100644"
            found[path.relative_to(tree).as_posix()] = File(path.read_bytes(), mode)
    return found


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def packed(data: bytes, compression: str) -> bytes:
    if compression == "zstd":
        import zstandard

        compressed: bytes = zstandard.ZstdCompressor().compress(data)
        return compressed
    return gzip.compress(data, 6, mtime=0) if compression == "gzip" else data


@dataclass
class Layout:
    """An OCI layout in the making."""

    root: Path
    manifests: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.root / "blobs/sha256").mkdir(parents=True)
        (self.root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def blob(self, data: bytes, media_type: str) -> dict[str, Any]:
        (self.root / "blobs/sha256" / digest(data).removeprefix("sha256:")).write_bytes(data)
        return {"mediaType": media_type, "digest": digest(data), "size": len(data)}

    def image(
        self,
        layers: Sequence[bytes],
        compression: str | Sequence[str] = "gzip",
        *,
        name: str | None = "latest",
        architecture: str = "amd64",
        config: Mapping[str, Any] | None = None,
        listed: bool = True,
    ) -> dict[str, Any]:
        """Add an image of uncompressed layers; returns its descriptor."""
        ways = [compression] * len(layers) if isinstance(compression, str) else compression
        descriptors = [
            self.blob(packed(data, way), f"{TAR}+{way}" if way else TAR) for data, way in zip(layers, ways, strict=True)
        ]
        table = {
            "created": CREATED,
            "architecture": architecture,
            "os": "linux",
            "config": {"Env": ["PATH=/usr/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [digest(data) for data in layers]},
            "history": [{"created": CREATED, "created_by": f"layer {number}"} for number in range(len(layers))],
            **(config or {}),
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self.blob(json.dumps(table).encode(), "application/vnd.oci.image.config.v1+json"),
            "layers": descriptors,
        }
        made = self.blob(json.dumps(manifest).encode(), MANIFEST)
        made["platform"] = {"os": "linux", "architecture": architecture}
        if name is not None:
            made["annotations"] = {"org.opencontainers.image.ref.name": name}
        if listed:
            self.manifests.append(made)
            self.write()
        return made

    def write(self) -> None:
        (self.root / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": self.manifests}))


def read(root: Path, name: str = "latest") -> dict[str, Any]:
    """A written image: its manifest, configuration, and the members of each layer, by the standard library."""
    index = json.loads((root / "index.json").read_bytes())
    found = next(
        item for item in index["manifests"] if item["annotations"]["org.opencontainers.image.ref.name"] == name
    )
    blobs = root / "blobs/sha256"
    manifest = json.loads((blobs / found["digest"].removeprefix("sha256:")).read_bytes())
    config = json.loads((blobs / manifest["config"]["digest"].removeprefix("sha256:")).read_bytes())
    layers = []
    for item in manifest["layers"]:
        data = (blobs / item["digest"].removeprefix("sha256:")).read_bytes()
        if item["mediaType"].endswith("+gzip"):
            data = gzip.decompress(data)
        elif item["mediaType"].endswith("+zstd"):
            import zstandard

            data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
        layers.append(tarfile.TarFile(fileobj=io.BytesIO(data)))
    return {"digest": found["digest"], "manifest": manifest, "config": config, "layers": layers, "index": index}


@dataclass(frozen=True)
class Stands:
    """What a path is in the end."""

    kind: bytes
    mode: int
    uid: int
    gid: int
    data: bytes
    attributes: Mapping[str, str]


def flat(layers: Iterable[tarfile.TarFile]) -> dict[str, Stands]:
    """What the layers come to, plainly: whiteouts and opaque folders first, then what the layer brings."""
    result: dict[str, Stands] = {}
    for archive in layers:
        members = archive.getmembers()
        for member in members:
            above, _, name = member.name.rpartition("/")
            if name == ".wh..wh..opq":
                hidden = [path for path in result if path.startswith(f"{above}/")]
            elif name.startswith(".wh."):
                gone = f"{above}/{name.removeprefix('.wh.')}".lstrip("/")
                hidden = [path for path in result if path == gone or path.startswith(f"{gone}/")]
            else:
                continue
            for path in hidden:
                del result[path]
        for member in members:
            if not member.name.rpartition("/")[2].startswith(".wh."):
                file = archive.extractfile(member) if member.isfile() else None
                attributes = {key: text for key, text in member.pax_headers.items() if key.startswith("SCHILY.xattr.")}
                data = file.read() if file else member.linkname.encode()
                result[member.name] = Stands(member.type, member.mode, member.uid, member.gid, data, attributes)
    return result
