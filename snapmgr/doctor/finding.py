"""Defines a finding of `doctor`, and the repair that `doctor --fix` offers for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from snapmgr.contract.errors import EXIT_OK, MissingRequirementError, SnapmgrError

if TYPE_CHECKING:
    from pathlib import Path

    from snapmgr.catalog.manifest import Lease
    from snapmgr.catalog.summary import Summary
    from snapmgr.contract.records import Found
    from snapmgr.doctor.rebuild import Adoption
    from snapmgr.restore.unfinished import Unfinished

Area = Literal["config", "backend", "job", "state", "storage"]
Level = Literal["ok", "note", "problem", "missing"]
RepairKind = Literal[
    "finish-pending",
    "finish-deletion",
    "mark-broken",
    "mark-lost",
    "mark-ready",
    "remove-remains",
    "adopt",
    "restore-manifest",
    "restore-verification",
    "release",
    "clear-restore",
    "remove-clone",
    "repair",
    "set-aside",
    "remove-file",
    "remove-folder",
    "remove-tree",
]


class Repair(Struct, frozen=True, kw_only=True):
    """A repair that `doctor --fix` makes."""

    kind: RepairKind
    text: str
    """Its description: "finishes its deletion"."""
    about: Summary | Adoption | Lease | Found | Unfinished | Path


class Finding(Struct, frozen=True, kw_only=True):
    """The result of one check.

    "problem": something is wrong. "missing": a requirement is missing. "note": useful to know.
    """

    area: Area
    subject: str
    """The backend, job, file, snapshot or pool."""
    level: Level
    what: str
    hint: str | None = None
    """What the user can do about it."""
    job: str | None = None
    """The job whose snapshots it concerns; a repair needs its lock."""
    repair: Repair | None = None
    """The repair that `doctor --fix` makes; None if there is none."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Identifies the same finding in a later examination."""
        return (self.area, self.subject, self.what)


def of_state(
    subject: str, what: str, *, job: str | None, hint: str | None = None, repair: Repair | None = None
) -> Finding:
    """Return a problem of the state directory."""
    return Finding(area="state", subject=subject, level="problem", what=what, hint=hint, job=job, repair=repair)


def of_error(area: Area, subject: str, error: SnapmgrError) -> Finding:
    """Return an error as a finding."""
    level: Level = "missing" if isinstance(error, MissingRequirementError) else "problem"
    return Finding(area=area, subject=subject, level=level, what=error.message, hint=error.hint)


def exit_code(findings: list[Finding]) -> int:
    """Return 1 if there is a problem, else 7 if a requirement is missing, else 0."""
    levels = {finding.level for finding in findings}
    if "problem" in levels:
        return SnapmgrError.exit_code
    return MissingRequirementError.exit_code if "missing" in levels else EXIT_OK
