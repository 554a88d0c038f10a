"""What a patched tree is made of, in two public forms: CycloneDX 1.6 and an in-toto statement. Pure.

Both follow from the bundle alone: no clock, no machine, the same bytes each time.
"""

from __future__ import annotations

import base64
import hashlib
import re
import uuid
from collections.abc import Mapping
from typing import Any

from patchbundle import __version__, canonical
from patchbundle.bases import Base
from patchbundle.identity import Identity
from patchbundle.manifest import LOCK, Bundle, Patch
from patchbundle.plan import receipt_bytes

_LINK = re.compile(r"https:/{2}[^\s;,()]+")
_SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://in-toto.io/attestation/link/v0.3"

Table = dict[str, Any]


def documents(bundle: Bundle, base: Base, level: int) -> dict[str, bytes]:
    """File name -> bytes: both documents of the tree of ``base`` at ``level``."""
    return {
        f"{base.role}.cdx.json": canonical.dump(cyclonedx(bundle, base, level)),
        f"{base.role}.intoto.json": canonical.dump(statement(bundle, base, level)),
    }


def cyclonedx(bundle: Bundle, base: Base, level: int) -> Table:
    """The distribution as a component: its ancestor is the release, its patches are ours, its parts the files that
    they change."""
    name = f"{bundle.lock.digest}/{base.id}/{level}"
    patched: Table = {
        "type": "library",
        "bom-ref": f"{base.id}+{level}",
        "name": base.distribution,
        "version": base.version,
        "description": f"the {base.role} series up to {bundle.pins(base).name_of(level)} on its release",
        "components": [
            {"type": "file", "bom-ref": path, "name": path, "hashes": [_hash(identity.sha256)]}
            for path, identity in sorted(_after(bundle, base, level).items())
        ],
        "pedigree": {
            "ancestors": [_release(base)],
            "patches": [_patch(bundle, patch) for patch in bundle.series(base.role)[:level]],
            "notes": f"The files that the patches add are in this component's parts. Bundle {bundle.lock.digest}.",
        },
    }
    return {
        "$schema": _SCHEMA,
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, name)}",
        "version": 1,
        "metadata": {
            "component": patched,
            "properties": [{"name": "patchbundle:bundle", "value": bundle.lock.digest}],
            "tools": {"components": [{"type": "application", "name": "patchbundle", "version": __version__}]},
        },
    }


def statement(bundle: Bundle, base: Base, level: int) -> Table:
    """Subjects are the files of the patched tree that the series adds or changes, materials all that they follow from:
    the published archives, the files of before, patches, sources, lock."""
    pins = bundle.pins(base)
    after = _after(bundle, base, level)
    before = {path: identity for path, identity in pins.at(0).items() if path in _changed(bundle, base, level)}
    series = bundle.series(base.role)[:level]
    artifacts = sorted({f"patches/{patch.file}" for patch in series} | {_source(s) for p in series for s in p.sources})
    materials = [
        *({"name": item.filename, "uri": _package(base), "digest": {"sha256": item.sha256}} for item in base.archives),
        *(_subject(f"{base.id}/{path}", identity) for path, identity in sorted(before.items()) if identity.is_file),
        *({"name": path, "digest": {"sha256": bundle.lock.artifacts[path]}} for path in artifacts),
        {"name": LOCK, "digest": {"sha256": bundle.lock.digest}},
    ]
    return {
        "_type": _STATEMENT,
        "subject": [_subject(path, identity) for path, identity in sorted(after.items())],
        "predicateType": _PREDICATE,
        "predicate": {
            "name": "apply",
            "command": ["tools/apply.py", "apply", "--role", base.role, "--to", pins.name_of(level)],
            "materials": materials,
            "byproducts": {
                "base": base.id,
                "bundle": bundle.lock.digest,
                "level": level,
                "patches": list(pins.levels[:level]),
                "removed": sorted(
                    path for path, identity in pins.at(level).items() if _is_gone(before, path, identity)
                ),
            },
            "environment": {"tool": f"patchbundle {__version__}"},
        },
    }


def _changed(bundle: Bundle, base: Base, level: int) -> set[str]:
    pins = bundle.pins(base)
    return {path for path, chain in pins.paths.items() if chain[level] != chain[0]}


def _after(bundle: Bundle, base: Base, level: int) -> Mapping[str, Identity]:
    """The files that are there and not as the release has them, the receipt included."""
    pins = bundle.pins(base)
    files = {path: pins.paths[path][level] for path in _changed(bundle, base, level)}
    receipt = receipt_bytes(bundle, base, level)
    if receipt is not None:
        files[base.receipt] = Identity.of(receipt)
    return {path: identity for path, identity in files.items() if identity.is_file}


def _is_gone(before: Mapping[str, Identity], path: str, identity: Identity) -> bool:
    return path in before and before[path].is_file and not identity.is_file


def _source(name: str) -> str:
    return f"sources/{name}"


def _subject(name: str, identity: Identity) -> Table:
    return {"name": name, "digest": {"sha256": identity.sha256}, "annotations": {"mode": identity.mode}}


def _hash(sha256: str) -> Table:
    return {"alg": "SHA-256", "content": sha256}


def _package(base: Base) -> str:
    return f"pkg:pypi/{base.distribution}@{base.version}"


def _release(base: Base) -> Table:
    return {
        "type": "library",
        "bom-ref": base.id,
        "name": base.distribution,
        "version": base.version,
        "purl": _package(base),
        "licenses": [{"license": {"id": "Apache-2.0"}}],
        "externalReferences": [
            {"type": "distribution", "url": item.filename, "hashes": [_hash(item.sha256)]} for item in base.archives
        ],
    }


def _patch(bundle: Bundle, patch: Patch) -> Table:
    """Temporary ones mend what upstream mends too; the others add what upstream does not have."""
    header = patch.header
    data = bundle.artifacts[f"patches/{patch.file}"]
    links = dict.fromkeys(
        link.rstrip(".") for text in (header.patch_class, header.upstream) for link in _LINK.findall(text)
    )
    resolves: Table = {
        "type": "defect" if header.patch_class.startswith("temporary") else "enhancement",
        "id": patch.id,
        "name": header.description,
        "description": header.why,
    }
    if links:
        resolves["references"] = list(links)
    return {
        "type": "unofficial",
        "diff": {
            "text": {
                "contentType": "text/x-diff",
                "encoding": "base64",
                "content": base64.b64encode(data).decode("ascii"),
            },
            "url": f"patches/{patch.file}#sha256={hashlib.sha256(data).hexdigest()}",
        },
        "resolves": [resolves],
    }
