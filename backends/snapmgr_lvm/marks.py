"""Defines our mark on logical volumes: names and tags, and the note in the tags.

Every volume of ours has the tag ``snapmgr``. A snapshot also has ``snapmgr.id=ID``, ``snapmgr.origin=LV-UUID`` and
``snapmgr.state=made|settled``; an attachment ``snapmgr.attachment=RECORD-ID`` and ``snapmgr.of=LV-UUID``; a note
``snapmgr.note.K.N=…`` for part K of N. Tags are part of the volume group's metadata: they change in one transaction.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import zlib
from typing import TYPE_CHECKING, Literal

from snapmgr.api import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from snapmgr_lvm.report import LogicalVolume

MARK = "snapmgr"
ATTACHMENT = "snapmgr.attachment."
"""The prefix of the names of all objects of attachments."""
NOTE_MAX_BYTES = 64 << 10
State = Literal["made", "settled"]

_SNAPSHOT_ID = re.compile(r"[A-Za-z0-9._-]{1,200}")
_RECORD_ID = re.compile(r"[0-9a-f]{16}")
_NOTE = re.compile(r"snapmgr\.note\.(\d+)\.(\d+)=(.+)")
# lvm(8): a tag has at most 1024 characters of A-Za-z0-9_+.-/=!:#&.
_NOTE_PART = 1000
# lvm(8): reserved in names. With the group's name, and hyphens doubled, device-mapper allows 127 bytes.
_RESERVED = re.compile(
    r"_(cdata|cmeta|corig|cvol|imeta|iorig|mimage|mlog|pmspare|rimage|rmeta|tdata|tmeta|vdata|vorigin|wcorig)"
)
_NAME_MAX = 60


def check_snapshot_id(snapshot_id: str) -> None:
    """Raise StorageError unless it can be a tag."""
    if not _SNAPSHOT_ID.fullmatch(snapshot_id):
        raise StorageError(f"{snapshot_id!r} is not a snapshot's id", hint='use letters, digits, ".", "-" and "_"')


def snapshot_name(snapshot_id: str, number: int) -> str:
    """Return the name of member `number` of a snapshot: the id if LVM allows it, otherwise a hash of it."""
    # A hyphen is doubled in the name of the device.
    name = f"snapmgr.{snapshot_id}"
    if len(name) + name.count("-") > _NAME_MAX or _RESERVED.search(name):
        name = f"snapmgr.{hashlib.sha256(snapshot_id.encode()).hexdigest()[:32]}"
    return name if number == 0 else f"{name}.{number}"


def attachment_name(record_id: str) -> str:
    """Return the name of an attachment's object. Raises StorageError if the id is malformed."""
    if not _RECORD_ID.fullmatch(record_id):
        raise StorageError(f"{record_id!r} is not the id of an attachment", hint="use 16 hex digits")
    return f"{ATTACHMENT}{record_id}"


def snapshot_tags(snapshot_id: str, origin_uuid: str) -> tuple[str, ...]:
    """Return the tags that a snapshot is made with."""
    return (MARK, f"snapmgr.id={snapshot_id}", f"snapmgr.origin={origin_uuid}", state_tag("made"))


def attachment_tags(record_id: str, snapshot_id: str, snapshot_uuid: str) -> tuple[str, ...]:
    """Return the tags that a clone is made with."""
    return (MARK, f"snapmgr.id={snapshot_id}", f"snapmgr.attachment={record_id}", f"snapmgr.of={snapshot_uuid}")


def state_tag(state: State) -> str:
    """Return the tag of a state."""
    return f"snapmgr.state={state}"


def adding(tags: Iterable[str]) -> list[str]:
    """Return the words of a command that adds these tags."""
    return [word for tag in tags for word in ("--addtag", tag)]


def removing(tags: Iterable[str]) -> list[str]:
    """Return the words of a command that removes these tags."""
    return [word for tag in tags for word in ("--deltag", tag)]


def value(volume: LogicalVolume, key: str) -> str | None:
    """Return the value of the tag ``snapmgr.KEY=…``; None without it, or if the volume does not bear our mark."""
    prefix = f"snapmgr.{key}="
    if MARK not in volume.tags:
        return None
    return next((tag[len(prefix) :] for tag in sorted(volume.tags) if tag.startswith(prefix)), None)


def note_tags(note: bytes) -> tuple[str, ...]:
    """Return the tags that hold a note. Raises StorageError if it is too long."""
    if len(note) > NOTE_MAX_BYTES:
        raise StorageError(f"a note of {len(note)} bytes is too long", hint="64 KiB is the most")
    text = base64.b64encode(zlib.compress(note, 9)).decode("ascii")
    parts = [text[start : start + _NOTE_PART] for start in range(0, len(text), _NOTE_PART)]
    return tuple(f"snapmgr.note.{number}.{len(parts)}={part}" for number, part in enumerate(parts))


def old_note_tags(tags: Iterable[str]) -> tuple[str, ...]:
    """Return the tags among `tags` that hold a note."""
    return tuple(sorted(tag for tag in tags if _NOTE.fullmatch(tag)))


def read_note(tags: Iterable[str]) -> bytes | None:
    """Return the note in `tags`; None if it is missing or incomplete."""
    parts = {int(found[1]): (int(found[2]), found[3]) for tag in tags if (found := _NOTE.fullmatch(tag))}
    if not parts or sorted(parts) != list(range(len(parts))) or {count for count, _ in parts.values()} != {len(parts)}:
        return None
    try:
        return _unpack(base64.b64decode("".join(parts[number][1] for number in sorted(parts)), validate=True))
    except (binascii.Error, zlib.error):
        return None


def _unpack(data: bytes) -> bytes | None:
    # Anyone may have written it: never read more than the size of a note.
    unpacker = zlib.decompressobj()
    note = unpacker.decompress(data, NOTE_MAX_BYTES + 1)
    return note if unpacker.eof and len(note) <= NOTE_MAX_BYTES else None
