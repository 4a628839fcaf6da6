"""Rebuilds manifests from the notes in the storage. Pure: facts in, a snapshot or the reason against it out.

A note is not trusted, as its disk may come from elsewhere: its ids, names and pools must be those of the storage, its
paths must not lead outside, and its contents are checked before they become file names.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from snapmgr.access.note import decode_note
from snapmgr.catalog.manifest import Manifest, ServerRecord, Verification, decode, encode
from snapmgr.catalog.store import Entry
from snapmgr.contract.errors import CatalogError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from snapmgr.catalog.manifest import Member
    from snapmgr.contract.records import Found, Pool

# The ids that `snapmgr.catalog.manifest.new_id` makes, with a job name that the configuration allows.
_ID = re.compile(r"(?P<job>[A-Za-z0-9][A-Za-z0-9_-]{0,47})\.[0-9]{8}T[0-9]{6}Z\.[0-9a-f]{8}")
_YEARS = range(2000, 2200)
_MISSING_HINT = "attach its disk, or name its storage: snapmgr doctor --fix --pool PATH"


class Adoption(Struct, frozen=True, kw_only=True):
    """A snapshot that can be adopted, as its notes describe it."""

    entry: Entry
    rewritten: bool = False
    """Whether it differs from its note, which must be written again."""
    remarks: tuple[str, ...] = ()
    """Differences from the time when it was taken: another machine, state directory or storage path."""


class Refusal(Struct, frozen=True, kw_only=True):
    """The reason why a snapshot cannot be adopted."""

    why: str
    hint: str | None = None


class _Claim(msgspec.Struct):
    state_dir: str = ""


def job_of(snapshot_id: str) -> str | None:
    """Given a snapshot's id, return its job; None if snapmgr makes no such id."""
    match = _ID.fullmatch(snapshot_id)
    return None if match is None else match["job"]


def claimed_by(note: bytes) -> str:
    """Return the state directory that a note names, "" if it names none; the note is not checked."""
    try:
        return msgspec.json.decode(note, type=_Claim).state_dir
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def adopt(
    found: Sequence[Found], answered: Collection[tuple[str, str]], *, state_dir: str, machine_id: str
) -> Adoption | Refusal:
    """Given everything in the storage with one snapshot id, return the snapshot, or the reason against adopting it.

    Args:
        found: its members, one or more, with the same snapshot id.
        answered: backend and id of every pool that could be read.
        state_dir: the state directory that adopts it.
        machine_id: the id of this machine.
    """
    snapshot_id = found[0].snapshot_id or ""
    if job_of(snapshot_id) is None:
        return Refusal(why="its name is not a snapshot id", hint="snapmgr did not make it: move it out of the folder")
    natives = [one.ref.native_id for one in found if one.ref is not None]
    if len(natives) > len(set(natives)):
        return Refusal(why="it exists twice: one file system is a copy of the other", hint="detach the copy")
    read = _agreed(found)
    if isinstance(read, Refusal):
        return read
    manifest, verification = read
    why = objection(manifest, snapshot_id)
    if why is not None:
        return Refusal(why=f"its note is not valid: {why}", hint="check it, then delete it manually")
    placed = _place(manifest, found, answered)
    if isinstance(placed, Refusal):
        return placed
    remarks: list[str] = []
    if placed.machine_id != machine_id:
        remarks.append(f"taken on another machine ({placed.machine_id})")
    if placed.members != manifest.members:
        remarks.append(f"its storage was at {', '.join(sorted({_pool(member).id for member in manifest.members}))}")
    # The notes of older versions do not name a state directory.
    if placed.state_dir not in ("", state_dir):
        remarks.append(f"taken for the state directory {placed.state_dir}")
        placed = replace(placed, state_dir=state_dir)
    entry = Entry(manifest=placed, verification=verification)
    return Adoption(entry=entry, rewritten=placed != manifest, remarks=tuple(remarks))


def _agreed(found: Sequence[Found]) -> tuple[Manifest, Verification | None] | Refusal:
    """Return the contents of all members' notes; after a crash they may differ only in fields that change later."""
    notes: list[tuple[Manifest, Verification | None]] = []
    problem = "it has no note"
    for one in found:
        if one.note is None:
            continue
        try:
            notes.append(decode_note(one.note, f"the note of {one.name}"))
        except CatalogError as error:
            problem = error.message
    if not notes:
        return Refusal(
            why=problem, hint="it may belong to another state directory; if not, check it and delete it manually"
        )
    first = notes[0][0]
    if any(_lasting(manifest) != _lasting(first) for manifest, _ in notes):
        return Refusal(why="the notes of its members contradict each other", hint="compare them")
    # If one note says pinned, the snapshot is pinned: nothing is deleted by mistake.
    manifest = next((manifest for manifest, _ in notes if manifest.pinned), first)
    verifications = [verification for _, verification in notes if verification is not None]
    return manifest, next(iter(verifications), None) if len(notes) == len(verifications) else None


def _lasting(manifest: Manifest) -> Manifest:
    return replace(manifest, pinned=False, pin_reason=None, state_dir="")


def objection(manifest: Manifest, snapshot_id: str) -> str | None:
    """Return what in a note cannot have been written by snapmgr, or None; `decode` has checked its paths."""
    made = sorted((intent.pool.backend, intent.pool.id, intent.name) for intent in manifest.intents)
    stored = sorted((member.ref.pool.backend, member.ref.pool.id, member.ref.name) for member in manifest.members)
    of_it = all(member.ref.snapshot_id == snapshot_id for member in manifest.members)
    times = (manifest.created_at, manifest.taken_at, manifest.proved_at)
    sound = {
        f"it describes the snapshot {manifest.id!r} of the job {manifest.job!r}": manifest.id == snapshot_id
        and manifest.job == job_of(snapshot_id),
        f"it says {manifest.state.upper()}": manifest.state == "ready" and manifest.helper is None,
        "its members belong to another snapshot": bool(manifest.members) and of_it,
        "its members differ from its intents": made == stored and len(stored) == len(set(stored)),
        "its times are not valid": all(time is not None and _is_time(time) for time in times),
        "snapmgr does not write such server settings": manifest.server is None or _is_server(manifest.server),
    }
    return next((text for text, good in sound.items() if not good), None) or _loss(manifest)


def _is_time(time: datetime) -> bool:
    return time.tzinfo is not None and time.astimezone(UTC).year in _YEARS if time.year in _YEARS else False


def _is_server(server: ServerRecord) -> bool:
    texts = (*server.settings.values(), server.log_bin or "", server.version)
    names = all(re.fullmatch(r"[a-z0-9_]+", name) for name in server.settings)
    return names and not any(re.search(r"[\0\r\n]", text) for text in texts)


def _loss(manifest: Manifest) -> str | None:
    """Return why it could not be written again (infinite numbers, lone surrogates), or None."""
    try:
        again = decode(encode(manifest), Manifest, "its copy")
    except CatalogError as error:
        return error.message
    return None if again == manifest else "it cannot be written again without a change"


def _place(manifest: Manifest, found: Sequence[Found], answered: Collection[tuple[str, str]]) -> Manifest | Refusal:
    """Return the manifest with the real pool of each member, or why the storage does not fit the manifest."""
    stored = {one.ref.native_id: one for one in found if one.ref is not None}
    unknown = set(stored) - {member.ref.native_id for member in manifest.members}
    if unknown:
        return Refusal(
            why=f"its note describes another snapshot: the storage has the id {', '.join(sorted(unknown))}",
            hint="somebody put it there: move it out of the folder",
        )
    members: list[Member] = []
    moved: dict[tuple[str, str], Pool] = {}
    for member in manifest.members:
        one = stored.get(member.ref.native_id)
        if one is None or one.ref is None:
            what = f"{member.ref.name} at {_pool(member).hint}"
            return Refusal(why=f"it is incomplete: {what} is missing", hint=_MISSING_HINT)
        ref, key = one.ref, (_pool(member).backend, _pool(member).id)
        if (ref.backend, ref.volume_id, ref.name) != (member.ref.backend, member.ref.volume_id, member.ref.name):
            return Refusal(why="its note describes a snapshot of another volume", hint="check it")
        if key == (ref.pool.backend, ref.pool.id):
            members.append(member)
            continue
        if key in answered:
            return Refusal(
                why=f"its note names the storage {_pool(member).hint}, which is another one", hint="check it"
            )
        # The storage has another path now, a store of copies for example; the member's own id is the same.
        moved[key] = ref.pool
        members.append(replace(member, ref=replace(member.ref, pool=ref.pool)))
    intents = tuple(
        replace(intent, pool=moved.get((intent.pool.backend, intent.pool.id), intent.pool))
        for intent in manifest.intents
    )
    return replace(manifest, members=tuple(members), intents=intents)


def _pool(member: Member) -> Pool:
    return member.ref.pool
