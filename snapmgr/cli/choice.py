"""Chooses the snapshot that a command is to use, and refuses one whose verification failed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from snapmgr.cli.output import ask_for_word
from snapmgr.contract.errors import VerificationError

if TYPE_CHECKING:
    from snapmgr.catalog.store import Entry
    from snapmgr.cli.session import Session
    from snapmgr.context import Context

_SHOWN = 3


def choose(session: Session, ctx: Context, name: str, *, unverified: bool, dry_run: bool) -> Entry:
    """Return the snapshot that `name` means, for a command that relies on its content.

    One whose verification failed needs `unverified`, or the user's confirmation at a terminal. Raises VerificationError
    without either, and the errors of `Catalog.resolve`.
    """
    entry = ctx.resolve(name)
    if not entry.failed or entry.verification is None:
        return entry
    snapshot = entry.manifest
    why = f"snapshot {snapshot.id} failed its verification: {'; '.join(entry.verification.failures[:_SHOWN])}"
    if unverified:
        session.console.warn(why)
    elif dry_run or not sys.stdin.isatty():
        raise VerificationError(
            why, hint=f"use {snapshot.job}@latest; or, to use this one nevertheless, add --unverified"
        )
    else:
        session.console.warn(why)
        ask_for_word(snapshot.short_id, to="use it nevertheless", why=why, nothing="done", option="--unverified")
    return entry
