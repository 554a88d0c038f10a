"""Images at rest: an OCI layout, or an archive that docker or podman saved; both read without a daemon."""

from __future__ import annotations

import calendar
import hashlib
import io
import json
import os
import platform as machine
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

from patchbundle.errors import BundleError, Reason
from workstation.layer import Made
from workstation.tarstream import Reader

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
BASE_DIGEST = "org.opencontainers.image.base.digest"
BASE_NAME = "org.opencontainers.image.base.name"
REF = "org.opencontainers.image.ref.name"
_NAMES = (REF, "io.containerd.image.name")
_INDEXES = (INDEX, "application/vnd.docker.distribution.manifest.list.v2+json")
_MANIFESTS = (MANIFEST, "application/vnd.docker.distribution.manifest.v2+json")
_DOCKER = "application/vnd.docker.image.rootfs.diff.tar"
# Media type -> how the layer is compressed, and its media type in an OCI manifest.
_LAYERS = {
    LAYER: ("", LAYER),
    f"{LAYER}+gzip": ("gzip", f"{LAYER}+gzip"),
    f"{LAYER}+zstd": ("zstd", f"{LAYER}+zstd"),
    _DOCKER: ("", LAYER),
    f"{_DOCKER}.gzip": ("gzip", f"{LAYER}+gzip"),
    f"{_DOCKER}.zstd": ("zstd", f"{LAYER}+zstd"),
}
_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_PATH = 4095  # bytes, as the system has it
_LIMIT = 1 << 24  # bytes of an index, a manifest or a configuration
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}

Table = dict[str, Any]


def refuse(where: str, expected: str, found: str) -> BundleError:
    return BundleError(Reason.IMAGE, where, expected=expected, found=found)


class Files(Protocol):
    """A layout's files, wherever they lie."""

    where: str

    def open(self, name: str) -> IO[bytes]:
        """Raises FileNotFoundError."""

    def size(self, name: str) -> int:
        """In bytes. Raises FileNotFoundError."""

    def path(self, name: str) -> Path | None:
        """Where the file lies for itself; None inside an archive."""


class Folder:
    """A folder's files."""

    def __init__(self, root: Path) -> None:
        self.where = str(root)
        self._root = root

    def open(self, name: str) -> IO[bytes]:
        # Without O_NONBLOCK the open of a fifo would wait for a writer.
        return open(os.open(self.path(name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")

    def size(self, name: str) -> int:
        return self.path(name).stat().st_size

    def path(self, name: str) -> Path:
        # A manifest must not name what lies elsewhere on this machine.
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            raise FileNotFoundError(name)
        return self._root / name


class _Part(io.RawIOBase):
    """A stretch of an open file."""

    def __init__(self, fd: int, start: int, size: int) -> None:
        self._fd, self._place, self._end = fd, start, start + size

    def read(self, count: int = -1) -> bytes:
        left = self._end - self._place
        data = os.pread(self._fd, left if count < 0 else min(count, left), self._place)
        self._place += len(data)
        return data

    def skip(self, count: int) -> int:
        count = min(count, self._end - self._place)
        self._place += count
        return count

    def rest_is_empty(self) -> bool:
        while data := self.read(1 << 20):
            if data.count(0) != len(data):
                return False
        return True

    @property
    def place(self) -> int:
        return self._place


class Archive:
    """The members of a tar file on the disk, found once, read where they lie."""

    def __init__(self, place: Path) -> None:
        self.where = str(place)
        self._fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        self._members: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        source = _Part(self._fd, 0, os.fstat(self._fd).st_size)
        for entry in Reader(source, self.where):
            name = posixpath.normpath(entry.name)
            if entry.kind == "file":
                self._members[name] = (source.place, entry.size)
            elif entry.kind in ("link", "hardlink"):
                # Layers that two images share.
                above = posixpath.dirname(name) if entry.kind == "link" else ""
                self._links[name] = posixpath.normpath(posixpath.join(above, entry.target))

    def _member(self, name: str) -> tuple[int, int]:
        name = posixpath.normpath(name)
        name = self._links.get(name, name)
        if name not in self._members:
            raise FileNotFoundError(name)
        return self._members[name]

    def open(self, name: str) -> IO[bytes]:
        return cast(IO[bytes], _Part(self._fd, *self._member(name)))

    def size(self, name: str) -> int:
        return self._member(name)[1]

    def path(self, name: str) -> Path | None:
        return None


@dataclass(frozen=True)
class Layer:
    """One layer, lowest first in its image. ``descriptor`` is as in an OCI manifest."""

    descriptor: Table
    compression: str
    diff_id: str
    file: str  # where it lies among the image's files

    @property
    def sha256(self) -> str:
        return str(self.descriptor["digest"]).removeprefix("sha256:")


@dataclass(frozen=True)
class Image:
    """One image for one platform. ``manifest`` is the table, ``raw`` its bytes as they were found."""

    files: Files
    name: str
    manifest: Table
    raw: bytes
    config: Table
    config_raw: bytes
    layers: tuple[Layer, ...]

    @property
    def digest(self) -> str:
        return digest_of(self.raw)

    @property
    def created(self) -> int:
        """When it was made, in seconds since 1970 as it says itself; 0 if it does not."""
        match = _TIME.match(str(self.config.get("created")))
        try:
            return max(0, calendar.timegm(tuple(map(int, match.groups())))) if match else 0
        except ValueError:  # a thirteenth month
            return 0

    @property
    def bytecode(self) -> str | None:
        """The folder in which interpreters of its containers keep compiled files, as its environment names it.

        Raises:
            BundleError: IMAGE, if it cannot be one.
        """
        config = self.config.get("config")
        table = config if isinstance(config, dict) else {}
        lines = table.get("Env")
        pairs = (str(line).partition("=") for line in (lines if isinstance(lines, list) else []))
        value = {name: text for name, _, text in pairs}.get("PYTHONPYCACHEPREFIX", "")
        path = posixpath.join("/", str(table.get("WorkingDir") or ""), value)
        if "\0" in path or len(os.fsencode(path)) > _PATH:
            raise refuse(
                f"{self.files.where}: its environment", "a PYTHONPYCACHEPREFIX that is a path", repr(value)[:80]
            )
        return path if value else None

    def with_layer(self, made: Made, compression: str, history: Table, annotations: Table) -> tuple[bytes, bytes]:
        """The bytes of the configuration and of the manifest of this image with one more layer on top."""
        rootfs = {**self.config["rootfs"], "diff_ids": [*(layer.diff_id for layer in self.layers), made.diff_id]}
        config = {**self.config, "rootfs": rootfs}
        # One that has none must not get one that tells of the last layer alone.
        if isinstance(config.get("history"), list) and config["history"]:
            config["history"] = [*config["history"], {key: value for key, value in history.items() if value}]
        raw = dump(config)
        top = {"mediaType": _of_compression(compression), "digest": made.digest, "size": made.size}
        before = self.manifest.get("annotations")
        name = {BASE_NAME: self.name} if self.name else {}
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "digest": digest_of(raw), "size": len(raw)},
            "layers": [*(layer.descriptor for layer in self.layers), top],
            "annotations": {
                **(before if isinstance(before, dict) else {}),
                **name,
                BASE_DIGEST: self.digest,
                **annotations,
            },
        }
        return raw, dump(manifest)

    def named(self, name: str, manifest: bytes) -> Table:
        """What an index says of a manifest of this image."""
        keys = ("architecture", "os", "os.version", "os.features", "variant")
        return {
            "mediaType": json.loads(manifest).get("mediaType", MANIFEST),
            "digest": digest_of(manifest),
            "size": len(manifest),
            "platform": {key: self.config[key] for key in keys if key in self.config},
            "annotations": {REF: name},
        }


def index(manifests: list[Table]) -> bytes:
    """The bytes of an index."""
    return dump({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests})


def _of_compression(compression: str) -> str:
    return f"{LAYER}+{compression}"


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def read(place: Path, name: str | None, platform: str | None) -> Image:
    """Find the one image that is meant: by its name where there are several, and of an index by its platform.

    Raises:
        BundleError: IMAGE, naming what there is.
    """
    wanted = platform or f"linux/{_MACHINES.get(machine.machine(), machine.machine())}"
    if place.is_dir():
        files: Files = Folder(place)
    elif place.is_file():
        files = Archive(place)
    else:
        raise refuse(str(place), "an OCI layout, or an archive that docker saved", "neither")
    if _has(files, "index.json"):
        image = _of_layout(files, name, wanted)
    elif _has(files, "manifest.json"):
        image = _of_docker(files, name)
    else:
        raise refuse(files.where, "index.json of an OCI layout, or manifest.json of docker's", "neither")
    if not _fits(image.config, wanted):
        raise refuse(f"{files.where}: {image.name}", f"platform {wanted}", _platform(image.config))
    return image


def _of_layout(files: Files, name: str | None, wanted: str) -> Image:
    version = _table(_read(files, "oci-layout"), f"{files.where}/oci-layout")
    if version.get("imageLayoutVersion") != "1.0.0":
        raise refuse(f"{files.where}/oci-layout", "version 1.0.0", repr(version.get("imageLayoutVersion")))
    index = _table(_read(files, "index.json"), f"{files.where}/index.json")
    found = _descriptors(index, f"{files.where}/index.json")
    chosen = [item for item in found if name is None or name in _names(item)]
    if name is None and len(chosen) > 1 and not any(_names(item) - {item["digest"]} for item in chosen):
        chosen = _of_platform(chosen, wanted, files.where)
    if len(chosen) != 1:
        known = ", ".join(sorted(min(_names(item), key=_is_digest) for item in found)) or "none"
        raise refuse(f"{files.where}/index.json", "one image; name it with --image", f"{len(chosen)} of: {known}")
    descriptor = chosen[0]
    called = min(_names(descriptor), key=_is_digest)
    while descriptor.get("mediaType") in _INDEXES:
        where = f"{files.where}: {descriptor['digest']}"
        inner = _descriptors(_table(_blob(files, descriptor), where), where)
        descriptor = _of_platform(inner, wanted, where)[0]
    if descriptor.get("mediaType") not in _MANIFESTS:
        raise refuse(f"{files.where}: {called}", "an image's manifest", repr(descriptor.get("mediaType")))
    raw = _blob(files, descriptor)
    where = f"{files.where}: {descriptor['digest']}"
    manifest = _table(raw, where)
    if manifest.get("mediaType", descriptor["mediaType"]) != descriptor["mediaType"] or "manifests" in manifest:
        # Who reads it as the other thing sees another image.
        raise refuse(
            where, f"one thing, {descriptor['mediaType']}", repr(manifest.get("mediaType", "an index too"))[:80]
        )
    config_raw = _blob(files, _descriptor(manifest.get("config"), where))
    config = _table(config_raw, f"{where}: its configuration")
    diff_ids = _diff_ids(config, where)
    layers = [_descriptor(item, where) for item in _list(manifest.get("layers"), where)]
    if len(layers) != len(diff_ids):
        raise refuse(where, f"{len(diff_ids)} layers, as in its configuration", f"{len(layers)} layers")
    made = []
    for item, diff_id in zip(layers, diff_ids, strict=True):
        kind = _LAYERS.get(str(item.get("mediaType")))
        if kind is None:
            raise refuse(
                f"{where}: {item['digest']}", "a layer: tar, tar+gzip or tar+zstd", repr(item.get("mediaType"))
            )
        made.append(Layer({**item, "mediaType": kind[1]}, kind[0], diff_id, _file_of(item)))
    return Image(files, "" if _is_digest(called) else called, manifest, raw, config, config_raw, tuple(made))


def _of_docker(files: Files, name: str | None) -> Image:
    """What docker saved before it had layouts. Its layers are plain tar files, so their digests are those of the
    configuration."""
    where = f"{files.where}/manifest.json"
    entries = [entry for entry in _list(_json(_read(files, "manifest.json"), where), where) if isinstance(entry, dict)]
    tags = [_tags(entry, where) for entry in entries]
    chosen = [number for number, own in enumerate(tags) if name is None or name in own]
    if len(chosen) != 1:
        known = ", ".join(tag for own in tags for tag in own) or "none"
        raise refuse(where, "one image; name it with --image", f"{len(chosen)} of: {known}")
    entry = entries[chosen[0]]
    config_raw = _read(files, str(entry.get("Config")))
    config = _table(config_raw, f"{where}: its configuration")
    diff_ids = _diff_ids(config, where)
    paths = [str(path) for path in _list(entry.get("Layers"), where)]
    if len(paths) != len(diff_ids):
        raise refuse(where, f"{len(diff_ids)} layers, as in its configuration", f"{len(paths)} layers")
    layers = []
    for path, diff_id in zip(paths, diff_ids, strict=True):
        try:
            size = files.size(path)
        except FileNotFoundError:
            raise refuse(where, f"the layer {path}", "none") from None
        layers.append(Layer({"mediaType": LAYER, "digest": diff_id, "size": size}, "", diff_id, path))
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {"mediaType": CONFIG, "digest": digest_of(config_raw), "size": len(config_raw)},
        "layers": [layer.descriptor for layer in layers],
    }
    called = name or next(iter(tags[chosen[0]]), "")
    return Image(files, called, manifest, dump(manifest), config, config_raw, tuple(layers))


def _tags(entry: Table, where: str) -> list[str]:
    tags = entry.get("RepoTags") or []
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise refuse(where, "a list of names", repr(tags)[:80])
    return tags


def dump(table: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest or a configuration: keys in the order in which they came."""
    return json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def _has(files: Files, name: str) -> bool:
    try:
        files.open(name).close()
    except FileNotFoundError:
        return False
    return True


def _read(files: Files, name: str) -> bytes:
    try:
        with files.open(name) as stream:
            data = stream.read(_LIMIT + 1)
    except FileNotFoundError:
        raise refuse(f"{files.where}/{name}", "the file", "nothing") from None
    if len(data) > _LIMIT:
        raise refuse(f"{files.where}/{name}", f"up to {_LIMIT} bytes", "more")
    return data


def _file_of(descriptor: Mapping[str, Any]) -> str:
    return f"blobs/sha256/{str(descriptor['digest']).removeprefix('sha256:')}"


def _blob(files: Files, descriptor: Mapping[str, Any]) -> bytes:
    data = _read(files, _file_of(descriptor))
    if digest_of(data) != descriptor["digest"] or len(data) != descriptor["size"]:
        raise refuse(
            f"{files.where}/{_file_of(descriptor)}",
            f"{descriptor['digest']}, {descriptor['size']} bytes",
            f"{digest_of(data)}, {len(data)} bytes",
        )
    return data


def _json(raw: bytes, where: str) -> Any:
    try:
        table = json.loads(raw, parse_constant=_no_number)
        # What is written again must be a text: half of a surrogate pair is none.
        json.dumps(table, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise refuse(where, "JSON", str(error)) from None
    return table


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _table(raw: bytes, where: str) -> Table:
    table = _json(raw, where)
    if not isinstance(table, dict):
        raise refuse(where, "a table", repr(table)[:80])
    return table


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise refuse(where, "a list", repr(value)[:80])
    return value


def _descriptors(index: Table, where: str) -> list[Table]:
    return [_descriptor(item, where) for item in _list(index.get("manifests"), where)]


def _descriptor(item: object, where: str) -> Table:
    if not isinstance(item, dict) or not _is_digest(item.get("digest")) or type(item.get("size")) is not int:
        raise refuse(where, "a descriptor with a sha256 digest and a size", repr(item)[:120])
    return item


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def _names(descriptor: Table) -> set[str]:
    annotations = descriptor.get("annotations")
    called = [annotations[key] for key in _NAMES if key in annotations] if isinstance(annotations, dict) else []
    return {str(name) for name in called} | {descriptor["digest"]}


def _of_platform(descriptors: Iterable[Table], wanted: str, where: str) -> list[Table]:
    """The one image for a platform. What builders add beside it, for no platform, is none."""
    found = [(item, item.get("platform")) for item in descriptors]
    fitting = [item for item, platform in found if isinstance(platform, dict) and _fits(platform, wanted)]
    if len(fitting) != 1:
        known = ", ".join(_platform(platform) for _, platform in found if isinstance(platform, dict)) or "none"
        raise refuse(where, f"one image for {wanted}; another with --platform", known)
    return fitting


def _fits(platform: Mapping[str, Any], wanted: str) -> bool:
    parts = wanted.split("/")
    return [platform.get(key) for key in ("os", "architecture", "variant")][: len(parts)] == parts


def _platform(platform: Mapping[str, Any]) -> str:
    return "/".join(str(platform[key]) for key in ("os", "architecture", "variant") if platform.get(key))


def _diff_ids(config: Table, where: str) -> list[str]:
    rootfs = config.get("rootfs")
    diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(diff_ids, list) or not all(_is_digest(item) for item in diff_ids):
        raise refuse(where, "a configuration with the sha256 digests of its layers", repr(rootfs)[:120])
    return diff_ids
