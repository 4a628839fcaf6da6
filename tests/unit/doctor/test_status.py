"""The rules of ``snapmgr status``: which jobs are overdue, whatever the clock did."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from snapmgr.catalog.inplace import MERGED
from snapmgr.catalog.manifest import GONE, Schedule, Verification
from snapmgr.catalog.store import Entry
from snapmgr.catalog.summary import summarize
from snapmgr.config.model import Job, Verify
from snapmgr.doctor.status import judge
from snapmgr.schedule.times import next_time
from support.sample import NOW, manifest

HOUR = timedelta(hours=1)
GRACE = HOUR + timedelta(minutes=1)  # the default, and what a timer may be late
ZONES = st.sampled_from([UTC, ZoneInfo("Europe/Berlin"), ZoneInfo("America/St_Johns"), ZoneInfo("Australia/Lord_Howe")])
EXPRESSIONS = st.sampled_from(
    ["02:30", "hourly", "Mon..Fri 22:00", "*-*-1 04:00", "*:0/15", "Sun 02:30 UTC", "00/6:30"]
)


def _job(**fields):
    return Job(**({"source": "directory", "path": "/srv", "name": "nightly"} | fields))


def _schedule(expression="02:30", installed_at=NOW - 100 * HOUR, **fields):
    return Schedule(job="nightly", kind="systemd", expression=expression, installed_at=installed_at, **fields)


def _entry(at, number=0, *, state="ready", result=None, **fields):
    record = replace(manifest(number), created_at=at, state=state, taken_at=at if state == "ready" else None, **fields)
    verification = Verification(at=at, result=result, duration_s=1.0) if result else None
    return summarize(Entry(manifest=record, verification=verification))


def _kinds(status):
    return [problem.kind for problem in status.problems]


def test_a_job_that_ran_at_its_time_is_well():
    status = judge(_job(), [_entry(NOW, result="passed")], _schedule(), NOW + 2 * HOUR, UTC)
    assert _kinds(status) == []
    assert status.age_s == 7200
    assert status.verified is status.newest
    assert status.next_due == NOW + 24 * HOUR
    assert status.overdue_since is None


@pytest.mark.parametrize(("late", "kinds"), [(GRACE, []), (GRACE + timedelta(seconds=1), ["overdue"])])
def test_a_missed_time_is_overdue_after_the_grace(late, kinds):
    due = NOW + 24 * HOUR
    status = judge(_job(), [_entry(NOW)], _schedule(), due + late, UTC)
    assert _kinds(status) == kinds
    assert status.overdue_since == (due if kinds else None)
    assert status.next_due == (due + 24 * HOUR if kinds else due)


def test_grace_and_the_random_delay_are_waited_for():
    late = NOW + 24 * HOUR + GRACE + timedelta(seconds=30)
    assert _kinds(judge(_job(grace_s=3700.0), [_entry(NOW)], _schedule(), late, UTC)) == []
    assert _kinds(judge(_job(), [_entry(NOW)], _schedule(delay_s=60.0), late, UTC)) == []


def test_a_job_that_never_ran():
    installed = NOW + 2 * HOUR
    assert _kinds(judge(_job(), [], _schedule(installed_at=installed), NOW + 24 * HOUR, UTC)) == []
    late = judge(_job(), [], _schedule(installed_at=installed), NOW + 26 * HOUR, UTC)
    assert _kinds(late) == ["never"]
    assert "was due at 2026-02-01T02:30:00Z" in late.problems[0].what
    assert late.problems[0].hint.startswith("snapmgr doctor nightly, in case the state directory was lost; then: ")
    # Nothing says when, and nothing is there.
    assert _kinds(judge(_job(), [], None, NOW, UTC)) == ["never"]
    assert _kinds(judge(_job(max_age_s=3600.0), [], None, NOW, UTC)) == ["never"]


def test_a_schedule_counts_from_when_it_was_installed():
    old = _entry(NOW - 1000 * HOUR)
    assert _kinds(judge(_job(), [old], _schedule(installed_at=NOW), NOW + HOUR, UTC)) == []
    assert _kinds(judge(_job(), [old], _schedule(installed_at=NOW), NOW + 26 * HOUR, UTC)) == ["overdue"]


def test_max_age_is_for_jobs_that_something_else_starts():
    job = _job(max_age_s=26 * 3600.0)
    assert _kinds(judge(job, [_entry(NOW)], None, NOW + 26 * HOUR, UTC)) == []
    status = judge(job, [_entry(NOW)], None, NOW + 26 * HOUR + timedelta(seconds=1), UTC)
    assert _kinds(status) == ["overdue"]
    assert status.overdue_since == NOW + 26 * HOUR
    assert status.watched
    # With neither, a job cannot be overdue, and that is said.
    status = judge(_job(), [_entry(NOW)], None, NOW + 10000 * HOUR, UTC)
    assert _kinds(status) == []
    assert not status.watched


def test_the_newest_run_failed_until_one_succeeds():
    broken = _entry(NOW + HOUR, 1, state="broken", reason="the disk was full")
    status = judge(_job(), [_entry(NOW), broken], None, NOW + 2 * HOUR, UTC)
    assert _kinds(status) == ["failed"]
    assert "the disk was full" in status.problems[0].what
    assert status.failed is broken
    assert _kinds(judge(_job(), [_entry(NOW), broken, _entry(NOW + 2 * HOUR, 2)], None, NOW + 2 * HOUR, UTC)) == []
    assert _kinds(judge(_job(), [broken], None, NOW + 2 * HOUR, UTC)) == ["never", "failed"]


def test_a_snapshot_that_a_restore_in_place_used_up_is_no_failed_run():
    merged = _entry(NOW + HOUR, 1, state="broken", reason=f"{MERGED} at 2026-01-31T02:30:00Z: vg0/data")
    assert _kinds(judge(_job(), [_entry(NOW), merged], None, NOW + 2 * HOUR, UTC)) == []
    assert _kinds(judge(_job(), [merged], None, NOW + 2 * HOUR, UTC)) == ["never"]
    broken = _entry(NOW, state="broken", reason="the disk was full")
    assert judge(_job(), [broken, merged], None, NOW + 2 * HOUR, UTC).failed is broken


def test_a_run_that_does_not_end():
    pending = _entry(NOW + HOUR, 1, state="pending")
    assert _kinds(judge(_job(), [_entry(NOW), pending], None, NOW + 2 * HOUR, UTC)) == []
    assert _kinds(judge(_job(), [_entry(NOW), pending], None, NOW + 3 * HOUR, UTC)) == ["unfinished"]
    # Left by a crash, and a newer run succeeded: the next one clears it up.
    newer = _entry(NOW + 2 * HOUR, 2)
    assert _kinds(judge(_job(), [_entry(NOW), pending, newer], None, NOW + 3 * HOUR, UTC)) == []


def test_a_failed_verification_counts_until_one_passes():
    passed, failed = _entry(NOW, 0, result="passed"), _entry(NOW + HOUR, 1, result="failed")
    status = judge(_job(), [passed, failed, _entry(NOW + 2 * HOUR, 2)], None, NOW + 3 * HOUR, UTC)
    assert _kinds(status) == ["verification"]
    assert status.verified is passed
    assert _kinds(judge(_job(), [failed, _entry(NOW + 2 * HOUR, 2, result="passed")], None, NOW + 3 * HOUR, UTC)) == []


def test_a_verification_that_the_job_wants_and_that_never_came():
    job = _job(after_backup=("verify",), verify=Verify(command=("true",), time_limit_s=600.0))
    patience = HOUR + timedelta(seconds=300 + 600)
    assert _kinds(judge(job, [_entry(NOW)], None, NOW + patience, UTC)) == []
    assert _kinds(judge(job, [_entry(NOW)], None, NOW + patience + HOUR, UTC)) == ["verification"]
    assert _kinds(judge(_job(), [_entry(NOW)], None, NOW + patience + HOUR, UTC)) == []


def test_verifications_that_never_come_are_found_where_the_newest_snapshot_is_always_young():
    job = _job(after_backup=("verify",), verify=Verify(command=("true",), time_limit_s=600.0))
    hourly = [_entry(NOW + number * HOUR, number) for number in range(4)]
    now = NOW + 3 * HOUR + timedelta(minutes=5)
    status = judge(job, hourly, None, now, UTC)
    assert _kinds(status) == ["verification"]
    assert hourly[1].id in status.problems[0].what
    # A later one is proof enough.
    assert _kinds(judge(job, [*hourly[:3], _entry(NOW + 3 * HOUR, 3, result="passed")], None, now, UTC)) == []
    assert _kinds(judge(job, [_entry(NOW, result="passed"), *hourly[2:]], None, now, UTC)) == []


def test_after_a_jump_of_the_clock_the_right_snapshot_is_named():
    # The clock was a year ahead for one run; the list is in the order of the runs.
    ahead, later = _entry(NOW + 365 * 24 * HOUR, 1), _entry(NOW + HOUR, 2)
    status = judge(_job(), [_entry(NOW), ahead, later], None, NOW + 2 * HOUR, UTC)
    assert _kinds(status) == ["clock"]
    assert ahead.id in status.problems[0].what
    assert status.newest is later
    # A failed or killed run of that time is older than the snapshot after it, whatever its time says.
    broken = _entry(NOW + 365 * 24 * HOUR, 1, state="broken", reason="the disk was full")
    assert _kinds(judge(_job(), [_entry(NOW), broken, later], None, NOW + 2 * HOUR, UTC)) == []
    early = _entry(NOW - 365 * 24 * HOUR, 3, state="broken", reason="the disk was full")
    assert _kinds(judge(_job(), [_entry(NOW), early], None, NOW + 2 * HOUR, UTC)) == ["failed"]
    pending = _entry(NOW - 365 * 24 * HOUR, 3, state="pending")
    assert _kinds(judge(_job(), [_entry(NOW), pending], None, NOW + 2 * HOUR, UTC)) == ["unfinished"]


def test_a_snapshot_whose_storage_was_removed_is_no_failed_run():
    gone = _entry(NOW + HOUR, 1, state="broken", reason=GONE)
    status = judge(_job(), [_entry(NOW), gone], None, NOW + 2 * HOUR, UTC)
    assert _kinds(status) == ["lost"]
    assert "was READY, and its storage was removed later" in status.problems[0].what


def test_what_is_from_the_future_is_no_evidence():
    future = _entry(NOW + 365 * 24 * HOUR, 1)
    status = judge(_job(), [_entry(NOW), future], _schedule(), NOW + 27 * HOUR, UTC)
    assert _kinds(status) == ["clock", "overdue"]
    assert status.newest.at == NOW
    schedule = _schedule(installed_at=NOW + 365 * 24 * HOUR)
    assert _kinds(judge(_job(), [_entry(NOW)], schedule, NOW + 27 * HOUR, UTC)) == ["clock", "overdue"]
    assert _kinds(judge(_job(), [], schedule, NOW, UTC)) == ["clock"]
    # A clock that was put right by seconds is daily life.
    status = judge(_job(), [_entry(NOW)], _schedule(), NOW - timedelta(seconds=30), UTC)
    assert (_kinds(status), status.age_s) == ([], 0.0)


def test_a_schedule_that_cannot_be_read_is_a_problem():
    assert _kinds(judge(_job(), [_entry(NOW)], _schedule("nonsense"), NOW + HOUR, UTC)) == ["schedule"]


def test_the_machines_zone_decides_also_when_clocks_change():
    # Berlin: 2026-10-25 has 25 hours. The run of the 25th is at 00:30 UTC, that of the 26th at 01:30.
    ran = _entry(datetime(2026, 10, 25, 0, 30, 5, tzinfo=UTC))
    zone = ZoneInfo("Europe/Berlin")
    quarter = timedelta(minutes=15)
    before = datetime(2026, 10, 26, 1, 30, tzinfo=UTC) + GRACE - quarter
    assert _kinds(judge(_job(), [ran], _schedule(), before, zone)) == []
    assert _kinds(judge(_job(), [ran], _schedule(), before + 2 * quarter, zone)) == ["overdue"]
    # In spring 02:30 does not exist on the 29th: nothing was missed.
    ran = _entry(datetime(2026, 3, 28, 1, 30, 5, tzinfo=UTC))
    assert _kinds(judge(_job(), [ran], _schedule(), datetime(2026, 3, 29, 12, tzinfo=UTC), zone)) == []


# Hypothesis wants the bounds without a zone.
MOMENTS = st.datetimes(datetime(2025, 1, 1), datetime(2027, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001


@given(EXPRESSIONS, st.lists(MOMENTS, max_size=4), MOMENTS, MOMENTS, ZONES)
def test_a_miss_is_never_hidden_and_never_invented(expression, runs, installed, now, zone):
    entries = [_entry(at, number) for number, at in enumerate(sorted(runs))]
    status = judge(_job(), entries, _schedule(expression, installed), now, zone)
    if any(at > now + timedelta(minutes=5) for at in [*runs, installed]):
        assert "clock" in _kinds(status)
    believed = [at for at in [*runs, installed] if at <= now]
    if not believed:
        return
    first = next_time(expression, max(believed), zone)
    late = first is not None and first + GRACE < now
    slack = [at for at in [*runs, installed] if now < at <= now + timedelta(minutes=5)]
    if not slack:
        assert (status.overdue_since == first) if late else status.overdue_since is None
        assert bool({"overdue", "never"} & set(_kinds(status))) == late
    assert status.next_due is None or status.next_due + GRACE >= now


@given(EXPRESSIONS, MOMENTS, ZONES, st.integers(0, 90))
def test_a_run_at_each_time_is_never_overdue(expression, installed, zone, seconds):
    runs, at = [], installed
    for number in range(6):
        due = next_time(expression, at, zone)
        at = due + timedelta(seconds=seconds)
        runs.append(_entry(at, number))
        for now in (at, next_time(expression, at, zone), next_time(expression, at, zone) + GRACE):
            assert _kinds(judge(_job(), runs, _schedule(expression, installed), now, zone)) == []


@given(EXPRESSIONS, MOMENTS, ZONES, st.integers(0, 10**7))
def test_a_job_that_stopped_running_is_found_sooner_or_later_and_stays_found(expression, ran, zone, more):
    due = next_time(expression, ran, zone)
    now = due + GRACE + timedelta(seconds=1 + more)
    status = judge(_job(), [_entry(ran)], _schedule(expression, ran), now, zone)
    assert (_kinds(status), status.overdue_since) == (["overdue"], due)


@given(MOMENTS, MOMENTS, st.floats(60, 10**7))
def test_an_age_is_too_much_or_it_is_not(ran, now, max_age_s):
    status = judge(_job(max_age_s=max_age_s), [_entry(ran)], None, now, UTC)
    if ran > now + timedelta(minutes=5):
        assert _kinds(status) == ["clock", "never"]
    else:
        assert _kinds(status) == (["overdue"] if (now - ran).total_seconds() > max_age_s else [])
