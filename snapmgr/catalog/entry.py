"""Holds a snapshot with everything that the catalog knows about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from snapmgr.catalog.manifest import Manifest, Verification


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
