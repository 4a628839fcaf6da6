"""Holds a snapshot as the catalog lists it, and finds the newest one that can be used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.contract.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapmgr.catalog.manifest import Manifest, Verification
    from snapmgr.catalog.recordfolder import Damaged

LATEST, LATEST_VERIFIED = "latest", "latest-verified"
_SHOWN = 4


class Entry(Struct, frozen=True, kw_only=True):
    """A manifest and its last verification."""

    manifest: Manifest
    verification: Verification | None

    @property
    def verified(self) -> bool:
        """Whether the last verification proved that it restores."""
        return self.verification is not None and self.verification.result == "passed"

    @property
    def partly(self) -> bool:
        """Whether the last verification could not look at all of it, and found no fault in the rest."""
        return self.verification is not None and self.verification.result == "partly"

    @property
    def failed(self) -> bool:
        """Whether the last verification showed that it does not restore."""
        return self.verification is not None and self.verification.result == "failed"


def newest(entries: list[Entry], damaged: list[Damaged], job: str, which: str, tell: Callable[[str], None]) -> Entry:
    """Return the newest snapshot that can be used; see `snapmgr.catalog.store.Catalog.resolve`.

    Args:
        entries: snapshots, oldest first.
        damaged: files that could not be read, and may belong to newer ones.
        job: whose; "" for any.
        which: LATEST or LATEST_VERIFIED.
        tell: gets a line about what LATEST passes over.

    Raises NotFoundError.
    """
    of_job = f" of job {job}" if job else ""
    entries = [entry for entry in entries if not job or entry.manifest.job == job]
    ready = [entry for entry in entries if entry.manifest.state == "ready"]
    wanted = [entry for entry in ready if (entry.verified if which == LATEST_VERIFIED else not entry.failed)]
    if not ready:
        raise NotFoundError(f"there is no READY snapshot{of_job}", hint="see: snapmgr list")
    if not wanted and which == LATEST_VERIFIED:
        raise NotFoundError(
            f"there is no VERIFIED snapshot{of_job}", hint=f"snapmgr verify {ready[-1].manifest.short_id}"
        )
    if not wanted:
        raise NotFoundError(
            f"all READY snapshots{of_job} failed their verification: "
            + _listed([entry.manifest.id for entry in reversed(ready)]),
            hint=f"see: snapmgr show {ready[-1].manifest.short_id}; to use one nevertheless, name its id",
        )
    if which == LATEST:
        newer = reversed(entries[entries.index(wanted[-1]) + 1 :])
        skipped = [why for why in map(_unusable, newer) if why is not None]
        skipped += [f"{one.path.name} ({one.problem})" for one in damaged]
        if skipped:
            tell(f"warning: {which} is {wanted[-1].manifest.id}; not considered: {_listed(skipped)}")
    return wanted[-1]


def _unusable(entry: Entry) -> str | None:
    """Return why a snapshot is not the latest, after its id; None for one that is still being taken or deleted."""
    manifest = entry.manifest
    if entry.failed:
        return f"{manifest.id} (failed its verification)"
    return f"{manifest.id} (BROKEN: {manifest.reason})" if manifest.state == "broken" else None


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
