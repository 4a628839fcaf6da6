"""Finds the snapshot that a name means, such as the newest one that can be used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapmgr.contract.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapmgr.catalog.recordfolder import Damaged
    from snapmgr.catalog.summary import Summary

LATEST, LATEST_VERIFIED = "latest", "latest-verified"
_SHOWN = 4


def resolve(
    text: str,
    names_of: Callable[[], list[str]],
    summaries_of: Callable[[str | None, Callable[[Summary], bool]], tuple[list[Summary], list[Damaged]]],
    tell: Callable[[str], None],
) -> str:
    """Return the id of the snapshot that `text` means; see `snapmgr.catalog.store.Catalog.resolve`."""
    job, _, which = text.rpartition("@")
    if which in (LATEST, LATEST_VERIFIED):

        def wanted(one: Summary) -> bool:
            right = one.verified if which == LATEST_VERIFIED else not one.failed
            return right and one.state == "ready" and job in ("", one.job)

        return newest(*summaries_of(job or None, wanted), job, which, tell).id
    names = names_of()
    fitting = [name for name in names if name == text] or [
        name for name in names if text and (name.startswith(text) or name.rsplit(".", 1)[-1].startswith(text))
    ]
    if not fitting:
        raise NotFoundError(f"there is no snapshot {text!r}", hint="see: snapmgr list")
    if len(fitting) > 1:
        raise ConfigError(
            f"{text!r} fits {len(fitting)} snapshots: {', '.join(sorted(fitting)[:_SHOWN])}"
            + (", …" if len(fitting) > _SHOWN else ""),
            hint="write more of the id, or JOB@latest",
        )
    return fitting[0]


def newest(
    entries: list[Summary], damaged: list[Damaged], job: str, which: str, tell: Callable[[str], None]
) -> Summary:
    """Return the newest snapshot that can be used; see `snapmgr.catalog.store.Catalog.resolve`.

    Args:
        entries: snapshots, oldest first; at least those down from the newest to the first that can be used.
        damaged: files that could not be read, and may belong to newer ones.
        job: whose; "" for any.
        which: LATEST or LATEST_VERIFIED.
        tell: gets a line about what LATEST passes over.

    Raises NotFoundError.
    """
    of_job = f" of job {job}" if job else ""
    entries = [entry for entry in entries if not job or entry.job == job]
    ready = [entry for entry in entries if entry.state == "ready"]
    wanted = [entry for entry in ready if (entry.verified if which == LATEST_VERIFIED else not entry.failed)]
    if not ready:
        raise NotFoundError(f"there is no READY snapshot{of_job}", hint="see: snapmgr list")
    if not wanted and which == LATEST_VERIFIED:
        raise NotFoundError(f"there is no VERIFIED snapshot{of_job}", hint=f"snapmgr verify {ready[-1].short_id}")
    if not wanted:
        raise NotFoundError(
            f"all READY snapshots{of_job} failed their verification: "
            + _listed([entry.id for entry in reversed(ready)]),
            hint=f"see: snapmgr show {ready[-1].short_id}; to use one nevertheless, name its id",
        )
    if which == LATEST:
        newer = reversed(entries[entries.index(wanted[-1]) + 1 :])
        skipped = [why for why in map(_unusable, newer) if why is not None]
        skipped += [f"{one.path.name} ({one.problem})" for one in damaged]
        if skipped:
            tell(f"warning: {which} is {wanted[-1].id}; not considered: {_listed(skipped)}")
    return wanted[-1]


def _unusable(entry: Summary) -> str | None:
    """Return why a snapshot is not the latest, after its id; None for one that is still being taken or deleted."""
    if entry.failed:
        return f"{entry.id} (failed its verification)"
    return f"{entry.id} (BROKEN: {entry.reason})" if entry.state == "broken" else None


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
