"""Holds what lists, plans and checks need of a snapshot; the index stores it, so that they need not read manifests."""

from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Literal

import msgspec

from snapmgr.catalog.manifest import Level, State
from snapmgr.contract.records import Pool

if TYPE_CHECKING:
    from snapmgr.catalog.entry import Entry

Result = Literal["passed", "partly", "failed"]
"""`Verification.result`."""


@cache
def _pool(backend: str, pool_id: str, hint: str) -> Pool:
    return Pool(backend=backend, id=pool_id, hint=hint)


class StoredPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One member's place in the storage; of a snapshot without members, one intent's, whose `native_id` is ""."""

    backend: str
    pool_id: str
    pool_hint: str
    volume_id: str
    name: str
    native_id: str

    @property
    def pool(self) -> Pool:
        """The pool that holds it."""
        return _pool(self.backend, self.pool_id, self.pool_hint)

    @property
    def identity(self) -> tuple[str, str, str]:
        """As `SnapshotRef.identity`."""
        return (self.backend, self.pool_id, self.native_id)


class Summary(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """What a manifest and its verification say in short; the fields mean what those of `Manifest` mean.

    Nothing may be deleted or written on its word: for that the manifest is read (`Catalog.load`).
    """

    id: str
    job: str
    state: State
    number: int
    created_at: datetime
    at: datetime
    """When it was taken, or when its backup began if it was not taken."""
    proved: bool
    """Whether its consistency is proven."""
    reason: str | None
    pinned: bool
    pin_reason: str | None
    level: Level | None
    held_s: float
    result: Result | None
    """Of its last verification; None if it was not verified."""
    verified_at: datetime | None
    parts: tuple[StoredPart, ...]

    @property
    def short_id(self) -> str:
        """The random part of the id, which is enough to name it."""
        return self.id.rsplit(".", 1)[-1]

    @property
    def refs(self) -> tuple[StoredPart, ...]:
        """Its members, as `Manifest.refs`; none if it was not taken."""
        return self.parts if self.parts and self.parts[0].native_id else ()

    @property
    def verified(self) -> bool:
        """As `Entry.verified`."""
        return self.result == "passed"

    @property
    def partly(self) -> bool:
        """As `Entry.partly`."""
        return self.result == "partly"

    @property
    def failed(self) -> bool:
        """As `Entry.failed`."""
        return self.result == "failed"


def summarize(entry: "Entry") -> Summary:
    """Return the summary of a snapshot."""
    manifest, verification = entry.manifest, entry.verification
    parts = [
        StoredPart(ref.backend, ref.pool.id, ref.pool.hint, ref.volume_id, ref.name, ref.native_id)
        for ref in manifest.refs
    ] or [
        StoredPart(intent.pool.backend, intent.pool.id, intent.pool.hint, intent.volume_id, intent.name, "")
        for intent in manifest.intents
    ]
    return Summary(
        id=manifest.id,
        job=manifest.job,
        state=manifest.state,
        number=manifest.number,
        created_at=manifest.created_at,
        at=manifest.taken_at or manifest.created_at,
        proved=manifest.proved_at is not None,
        reason=manifest.reason,
        pinned=manifest.pinned,
        pin_reason=manifest.pin_reason,
        level=manifest.quiesce.level if manifest.quiesce is not None else None,
        held_s=manifest.quiesce.held_s if manifest.quiesce is not None else 0.0,
        result=verification.result if verification is not None else None,
        verified_at=verification.at if verification is not None else None,
        parts=tuple(parts),
    )
