"""Stores the note beside a snapshot: a copy of its manifest in the state directory, and its last verification.

`snapmgr.doctor.rebuild` rebuilds the state directory from the notes. A note is a manifest's JSON with one more key, so
that every reader of manifests can read notes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from snapmgr.catalog.manifest import Manifest, Verification, decode, encode
from snapmgr.system.probe import require_pools_answer

if TYPE_CHECKING:
    from snapmgr.catalog.store import Entry
    from snapmgr.context import Context

# The limit of `Backend.annotate`.
_MAX_BYTES = 64 << 10


class _Noted(msgspec.Struct):
    verification: msgspec.Raw = msgspec.Raw(b"null")


def encode_note(entry: Entry) -> bytes:
    """Return a snapshot's note, at most 64 KiB: if need be without a verification's texts, always with its result."""
    if entry.verification is None:
        return encode(entry.manifest)
    note = _join(entry.manifest, entry.verification)
    if len(note) <= _MAX_BYTES:
        return note
    return _join(entry.manifest, replace(entry.verification, checks=(), unchecked=(), failures=(), notes=()))


def _join(manifest: Manifest, verification: Verification) -> bytes:
    whole = msgspec.json.decode(encode(manifest))
    whole["verification"] = msgspec.json.decode(encode(verification))
    return msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"


def decode_note(data: bytes, where: str) -> tuple[Manifest, Verification | None]:
    """Return the content of a note. Raises CatalogError, which names `where`, if it is damaged or too new."""
    manifest = decode(data, Manifest, where)
    noted = bytes(msgspec.json.decode(data, type=_Noted).verification)
    if noted == b"null":
        return manifest, None
    verification = decode(noted, Verification, where)
    # Refuse a value that could not be written again, such as an infinite duration.
    return manifest, decode(encode(verification), Verification, where)


def store_note(ctx: Context, entry: Entry) -> None:
    """Write the note beside each member of a snapshot. Raises the backend's errors, and StorageError if it hangs."""
    note = encode_note(entry)
    require_pools_answer((member.ref.pool for member in entry.manifest.members), ctx.mounter.mounts())
    for member in entry.manifest.members:
        ctx.backend(member.ref.backend).annotate(member.ref, note)
