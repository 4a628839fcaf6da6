"""The note beside a snapshot: its manifest as it stands in the state directory, and its last verification.

With it the state directory can be rebuilt from the storage (`snapmgr.doctor.rebuild`). It is a manifest's JSON with one
key more, so what reads a manifest reads a note.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from snapmgr.catalog.manifest import Manifest, Verification, decode, encode
from snapmgr.system.probe import require_pools_answer

if TYPE_CHECKING:
    from snapmgr.catalog.store import Entry
    from snapmgr.context import Context

# What `Backend.annotate` takes at most.
_MAX_BYTES = 64 << 10


class _Noted(msgspec.Struct):
    verification: msgspec.Raw = msgspec.Raw(b"null")


def encode_note(entry: Entry) -> bytes:
    """Return a snapshot's note, at most 64 KiB: for that a verification loses its texts, but not its result."""
    if entry.verification is None:
        return encode(entry.manifest)
    note = _join(entry.manifest, entry.verification)
    if len(note) <= _MAX_BYTES:
        return note
    return _join(entry.manifest, replace(entry.verification, checks=(), failures=()))


def _join(manifest: Manifest, verification: Verification) -> bytes:
    whole = msgspec.json.decode(encode(manifest))
    whole["verification"] = msgspec.json.decode(encode(verification))
    return msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"


def decode_note(data: bytes, where: str) -> tuple[Manifest, Verification | None]:
    """Given a note, return what it says. Raises CatalogError that names `where` if it is damaged or too new."""
    manifest = decode(data, Manifest, where)
    noted = bytes(msgspec.json.decode(data, type=_Noted).verification)
    if noted == b"null":
        return manifest, None
    verification = decode(noted, Verification, where)
    # What could not be written down again (an infinite duration) is not taken over either.
    return manifest, decode(encode(verification), Verification, where)


def store_note(ctx: Context, entry: Entry) -> None:
    """Write the note beside each member of a snapshot. Raises what the backend raises; StorageError if it hangs."""
    note = encode_note(entry)
    require_pools_answer((member.ref.pool for member in entry.manifest.members), ctx.mounter.mounts())
    for member in entry.manifest.members:
        ctx.backend(member.ref.backend).annotate(member.ref, note)
