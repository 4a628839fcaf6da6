"""Decides which snapshots to keep and which to delete, and why: a pure function of snapshots, policy and time.

The rules, in full (``docs/reference/retention.md`` explains them to users):

- Only READY snapshots are considered. A PENDING or BROKEN one counts for no rule and is never deleted by retention.
- Hours, days, ISO weeks, months and years are in UTC, so that daylight saving time does not change their length. The
  newest snapshot of each period is kept, for as many periods as the policy says. Periods without snapshots do not
  count.
- ``keep_within`` counts back from the newest snapshot, not from now: a job that no longer runs keeps its snapshots, and
  a clock that jumps ahead deletes nothing.
- A snapshot from the future shows that a clock was or is wrong. It is kept, but counts for no period and not for the
  last N; otherwise a few of them would displace all real ones.
- A snapshot whose verification FAILED counts for no rule. It is kept only as long as it is the newest READY one: as
  evidence, and because the verification may be what was wrong.
- The newest READY snapshot, the newest one whose verification did not fail, the newest VERIFIED one, and the newest
  partly verified one if it is newer than that (each by time and by the order of taking, which does not depend on
  clocks), pinned ones and those in use are kept.
- An empty policy keeps everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from snapmgr.contract.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_FAILED = "failed its verification, and is not the newest"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How many snapshots to keep; 0 and None disable a rule."""

    keep_last: int = 0
    keep_hourly: int = 0
    keep_daily: int = 0
    keep_weekly: int = 0
    keep_monthly: int = 0
    keep_yearly: int = 0
    keep_within_s: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for negative numbers."""
        if any(count < 0 for _, count, _ in self._periods()) or self.keep_last < 0:
            raise ValueError("the numbers of a retention policy are 0 or more")
        if self.keep_within_s is not None and not (self.keep_within_s >= 0 and math.isfinite(self.keep_within_s)):
            raise ValueError("keep_within_s is a number of seconds, 0 or more")

    @property
    def empty(self) -> bool:
        """Whether there is no rule; then nothing is deleted."""
        return not (self.keep_last or self.keep_within_s or any(count for _, count, _ in self._periods()))

    def _periods(self) -> tuple[tuple[str, int, Callable[[datetime], str]], ...]:
        return (
            ("hourly", self.keep_hourly, lambda at: f"{at.date()} {at.hour:02}:00"),
            ("daily", self.keep_daily, lambda at: at.date().isoformat()),
            ("weekly", self.keep_weekly, _iso_week),
            ("monthly", self.keep_monthly, lambda at: at.date().isoformat()[:7]),
            ("yearly", self.keep_yearly, lambda at: at.date().isoformat()[:4]),
        )


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A snapshot as retention sees it."""

    id: str
    taken_at: datetime
    """With a time zone; compared and grouped in UTC."""
    ready: bool
    verified: bool
    pinned: bool
    failed: bool = False
    """Its last verification failed."""
    partly: bool = False
    """Its last verification could not look at all of it, and found no fault in the rest."""
    pin_reason: str | None = None
    in_use: bool = False
    """It is mounted, being read or being verified."""
    number: int = 0
    """The order of taking, independent of clocks; equal numbers are ordered by time."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A decision on one snapshot, with all rules that led to it."""

    id: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PrunePlan:
    """Snapshots to keep and to delete, newest first; each is in exactly one of the two."""

    keep: tuple[Decision, ...]
    delete: tuple[Decision, ...]


def plan(snapshots: Iterable[Candidate], policy: Policy, now: datetime) -> PrunePlan:
    """Given all snapshots of one job, return which to keep and which to delete at `now`, with reasons.

    It deletes nothing. Snapshots taken in the same instant are ordered by id. Raises ValueError for times
    without a zone and for an id that occurs twice.
    """
    newest_first = _sorted(snapshots, now)
    reasons = _reasons(newest_first, policy, now)
    gone = [one for one in newest_first if not reasons[one.id]]
    return PrunePlan(
        keep=tuple(Decision(id=one.id, reasons=tuple(reasons[one.id])) for one in newest_first if reasons[one.id]),
        delete=tuple(Decision(id=one.id, reasons=(_FAILED if one.failed else "no rule keeps it",)) for one in gone),
    )


def protect(snapshots: Iterable[Candidate], now: datetime) -> dict[str, tuple[str, ...]]:
    """Given all snapshots of one job, return for each why no policy may delete it at `now`; empty if one may.

    Raises ValueError as `plan` does.
    """
    newest_first = _sorted(snapshots, now)
    reasons: dict[str, list[str]] = {one.id: [] for one in newest_first}
    ready = [one for one in newest_first if one.ready]
    _keep_guarded(ready, [one for one in ready if one.taken_at <= now], reasons)
    return {one: tuple(why) for one, why in reasons.items()}


def _sorted(snapshots: Iterable[Candidate], now: datetime) -> list[Candidate]:
    listed = list(snapshots)
    if any(at.tzinfo is None for at in (now, *(one.taken_at for one in listed))):
        raise ValueError("retention needs times with a zone")
    if len({one.id for one in listed}) != len(listed):
        raise ValueError("a snapshot's id occurs twice")
    return sorted(listed, key=lambda one: (one.taken_at, one.id), reverse=True)


def _reasons(newest_first: list[Candidate], policy: Policy, now: datetime) -> dict[str, list[str]]:
    """Return for each snapshot the reasons to keep it; an empty list means that it can be deleted."""
    reasons: dict[str, list[str]] = {one.id: [] for one in newest_first}
    ready = [one for one in newest_first if one.ready]
    # Snapshots that a wrong clock dated ahead must not displace real ones.
    past = [one for one in ready if one.taken_at <= now]
    for one in newest_first:
        if not one.ready:
            reasons[one.id].append("not READY: left to doctor")
        elif one.taken_at > now:
            reasons[one.id].append("taken in the future: a clock is or was wrong")
    _keep_guarded(ready, past, reasons)
    if policy.empty:
        for one in newest_first:
            reasons[one.id].append("empty policy")
    else:
        _keep_by_rule([one for one in past if not one.failed], policy, reasons)
    return reasons


def _keep_guarded(ready: list[Candidate], past: list[Candidate], reasons: dict[str, list[str]]) -> None:
    """Keep the snapshots that no policy may delete."""
    # By time and by the order of taking, as a clock that was set back makes the newest snapshot look old.
    for listed in (ready, past, _last_taken_first(ready)):
        for one in listed[:1]:
            _add(reasons[one.id], "newest READY")
        # A snapshot that failed to restore does not replace one that may restore.
        sound = [one for one in listed if not one.failed]
        if sound and sound[0] is not listed[0]:
            _add(reasons[sound[0].id], "newest that did not fail")
        for one in [one for one in listed if one.verified][:1]:
            _add(reasons[one.id], "newest VERIFIED")
        # One that is older than a VERIFIED one proves nothing more.
        tried = next((one for one in listed if one.verified or one.partly), None)
        if tried is not None and tried.partly:
            _add(reasons[tried.id], "newest partly verified")
    for one in ready:
        if one.pinned:
            reasons[one.id].append(f"pinned ({one.pin_reason})" if one.pin_reason else "pinned")
        if one.in_use:
            reasons[one.id].append("in use")


def _keep_by_rule(past: list[Candidate], policy: Policy, reasons: dict[str, list[str]]) -> None:
    """Apply the policy's rules to the READY snapshots that are not from the future and did not fail."""
    for number, one in enumerate(_last_taken_first(past)[: policy.keep_last], start=1):
        reasons[one.id].append(f"last {number} of {policy.keep_last}")
    if policy.keep_within_s:
        for one in past:
            if (past[0].taken_at - one.taken_at).total_seconds() <= policy.keep_within_s:
                reasons[one.id].append(f"within {format_duration(policy.keep_within_s)}")
    for rule, count, period_of in policy._periods():  # noqa: SLF001 - Policy's other half
        newest: dict[str, Candidate] = {}
        for one in past:
            period = period_of(one.taken_at.astimezone(UTC))
            if period not in newest and len(newest) == count:
                break
            newest.setdefault(period, one)
        for period, one in newest.items():
            reasons[one.id].append(f"{rule} {period}")


def _last_taken_first(listed: list[Candidate]) -> list[Candidate]:
    return sorted(listed, key=lambda one: (one.number, one.taken_at, one.id), reverse=True)


def _add(reasons: list[str], reason: str) -> None:
    if reason not in reasons:
        reasons.append(reason)


def _iso_week(at: datetime) -> str:
    calendar = at.isocalendar()
    return f"{calendar.year:04}-W{calendar.week:02}"
