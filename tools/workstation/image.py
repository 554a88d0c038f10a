"""The verb ``image``: a bundle put on an image as one more layer, or taken off by one.

The files of concern are laid out as a small tree, the ordinary run changes that tree, and what it changed is the layer.
So an image is checked, refused and changed by the code that does it to any other tree.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from patchbundle import disk, work
from patchbundle import target as target_module
from patchbundle.errors import BundleError, Reason
from patchbundle.manifest import Bundle
from patchbundle.plan import Plan
from patchbundle.state import State
from patchbundle.target import Target
from workstation import change, oci, outputs, streams
from workstation import layer as layer_module
from workstation.interest import Interest
from workstation.layer import Made, Member
from workstation.layout import Layout
from workstation.merged import Merged
from workstation.oci import Image, Layer
from workstation.streams import Blob
from workstation.tarstream import Reader

_READINGS = 5  # a second name of a second name takes one more
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Order:
    """What is asked for. ``direction`` is apply or revert; ``root`` a path in the image, where it holds several."""

    source: Path
    out: Path
    role: str
    direction: str
    level: str | None = None
    name: str | None = None
    platform: str | None = None
    root: str | None = None
    dry_run: bool = False


@dataclass(frozen=True)
class Result:
    """What was done, or with a dry run would be. ``layer`` and ``digest`` are None if nothing was written."""

    target: Target
    state: State
    plan: Plan
    base: str
    name: str
    warnings: tuple[str, ...]
    dropped: tuple[str, ...]
    layer: Made | None = None
    digest: str | None = None


def patch(bundle: Bundle, order: Order, progress: Progress) -> Result:
    """Read the image once, and write it again with one more layer.

    Raises:
        BundleError: whatever is wrong with the image, or with the tree in it; then nothing is left at the output.
    """
    image = oci.read(order.source, order.name, order.platform)
    with (
        tempfile.TemporaryDirectory(prefix="image-") as temporary,
        nullcontext() if order.dry_run else outputs.folder(order.out) as making,
    ):
        scratch = Path(temporary).resolve()
        interest = Interest(bundle, order.role)
        view = _view(image, interest, scratch, making.path if making else None, progress)
        bytecode = image.bytecode
        prefix = _root(view, interest, order, view.lead(bytecode) if bytecode else None)
        mirror = view.lead(f"{bytecode}/{prefix}") if bytecode else None
        layout = Layout(scratch / "tree", view, interest, prefix, mirror)
        with layout.named_as_in_the_image():
            result, members = _change(bundle, order, image, layout, progress)
        if making is not None:
            making.wanted = bool(members)
            result = _write(image, result, members, making.path) if members else result
    return result


def _view(image: Image, interest: Interest, scratch: Path, out: Path | None, progress: Progress) -> Merged:
    """Every layer, read to its end and checked against both its digests; each is kept in ``out``, if there is one."""
    extra: set[str] = set()
    sizes = {layer.sha256: int(layer.descriptor["size"]) for layer in image.layers}
    for _ in range(_READINGS):
        left = streams.limit(sum(sizes.values()))
        spool = scratch / "spool"
        shutil.rmtree(spool, ignore_errors=True)
        spool.mkdir()
        view = Merged(interest, spool, extra)
        for number, layer in enumerate(image.layers, 1):
            progress(f"layer {number} of {len(image.layers)}, {layer.descriptor['size']} bytes")
            where = f"{image.files.where}: layer {number}, {layer.descriptor['digest']}"
            with _opened(image, layer, out) as (stream, copy):
                blob = Blob(stream, where, layer.sha256, int(layer.descriptor["size"]), copy)
                with streams.unpacked(blob, layer.compression, left) as unpacked:
                    view.add(Reader(unpacked, where), where)
                    found = f"sha256:{unpacked.digest()}"
                    left -= unpacked.count
            if found != layer.diff_id:
                raise oci.refuse(where, f"a layer that unpacks to {layer.diff_id}", found)
        if not view.missing:
            return view
        if view.missing <= extra:
            break
        # A second name was of concern, and the bytes went by under the first: rare, and only then read again.
        extra |= view.missing
    found = f"a second name of {min(view.missing)}"
    raise BundleError(
        Reason.LAYER,
        image.files.where,
        expected="second names of files that are there, and no long chain of them",
        found=found,
    )


@contextmanager
def _opened(image: Image, layer: Layer, out: Path | None) -> Iterator[tuple[IO[bytes], IO[bytes] | None]]:
    """A layer's bytes, and where they go while they are read; nowhere if they lie at the output already."""
    place = out / "blobs/sha256" / layer.sha256 if out is not None else None
    if place is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        own = image.files.path(layer.file)
        if own is not None and own.is_file() and not place.exists():
            # A blob is never written to, so two layouts may share it; on two file systems they cannot.
            with suppress(OSError):
                os.link(own.resolve(), place)
        if place.is_file():
            # What is read is what is kept.
            with open(place, "rb") as stream:
                yield stream, None
            return
    try:
        opened = image.files.open(layer.file)
    except FileNotFoundError:
        raise oci.refuse(f"{image.files.where}/{layer.file}", "the layer", "nothing") from None
    with opened as stream, open(place, "wb") if place is not None else nullcontext() as copy:
        yield stream, copy


def _root(view: Merged, interest: Interest, order: Order, bytecode: str | None) -> str:
    """The distribution's root in the image: the only one, or the one that was named. A folder of bytecode is none."""
    folders = (path for path, node in view.walk() if node.kind == "folder")
    found = interest.roots(path for path in folders if not bytecode or not path.startswith(f"{bytecode}/"))
    wanted = found if order.root is None else [root for root in found if root == order.root.strip("/")]
    if len(wanted) == 1:
        if not wanted[0].isprintable():
            # It goes into annotations, which are UTF-8, and onto a terminal.
            raise oci.refuse(str(order.source), "a distribution below folders with plain names", repr(f"/{wanted[0]}"))
        return wanted[0]
    raise BundleError(
        Reason.TWO_TARGETS if wanted else Reason.NO_TARGET,
        f"{order.source}: {order.root or 'the whole image'}",
        expected=f"one tree of {order.role}",
        found=", ".join(f"/{root}" for root in found) or "none",
        next_step="name one of them with --root" if found else "use the image that the base was released for",
    )


def _change(
    bundle: Bundle, order: Order, image: Image, layout: Layout, progress: Progress
) -> tuple[Result, list[Member]]:
    """The ordinary run, on the small tree; and what it changed, nothing if it was not to."""
    target = layout.target(target_module.discover(bundle, root=layout.root, role=order.role))
    state, plan = work.make_plan(bundle, target, order.direction, order.level)
    shown = target._replace(root=Path("/") / layout.prefix)
    result = Result(shown, state, plan, image.digest, image.name or "patched", tuple(target.warnings), ())
    if order.dry_run or not plan.operations:
        return result, []
    outcome = work.execute(bundle, target, state, plan, progress)
    members = change.members(layout, plan, outcome.dropped, image.created)
    gone = tuple(path.removeprefix(str(layout.tree)) for path in outcome.dropped)
    return replace(result, dropped=gone, warnings=result.warnings + outcome.warnings), members


def _write(image: Image, result: Result, members: list[Member], out: Path) -> Result:
    """The layer and what names it: configuration, manifest, index. The base stays beside it, under its own name."""
    compression = next((layer.compression for layer in reversed(image.layers) if layer.compression), "gzip")
    blobs = out / "blobs/sha256"
    made = layer_module.write(blobs / "layer", members, compression)
    (blobs / "layer").rename(blobs / made.digest.removeprefix("sha256:"))
    plan = result.plan
    history = {
        "created": image.config.get("created"),
        "created_by": f"patchbundle image --role {plan.base.role}",
        "comment": f"{plan.start.name} to {plan.goal.name}, bundle {plan.goal.bundle.lock.digest}",
    }
    own = {
        "patchbundle.bundle": plan.goal.bundle.lock.digest,
        "patchbundle.base": plan.base.id,
        "patchbundle.role": plan.base.role,
        "patchbundle.level": plan.goal.name,
        "patchbundle.root": str(result.target.root),
    }
    config_raw, manifest_raw = image.with_layer(made, compression, history, own)
    for data in (image.raw, image.config_raw, config_raw, manifest_raw):
        disk.write_file(blobs / oci.digest_of(data).removeprefix("sha256:"), data)
    base = f"{image.name}-base" if image.name else "base"
    disk.write_file(out / "oci-layout", oci.dump({"imageLayoutVersion": "1.0.0"}))
    disk.write_file(
        out / "index.json", oci.index([image.named(result.name, manifest_raw), image.named(base, image.raw)])
    )
    return replace(result, layer=made, digest=oci.digest_of(manifest_raw))
