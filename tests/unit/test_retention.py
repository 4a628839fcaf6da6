"""Retention: what stays, what goes, why; and above all what must never go."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.retention import Candidate, Policy, plan, protect

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def snapshot(at, *, id=None, ready=True, verified=False, **flags):  # noqa: A002 - the field's name
    at = datetime.fromisoformat(at).replace(tzinfo=UTC) if isinstance(at, str) else at
    flags = {"pinned": False} | flags
    return Candidate(id=id or at.isoformat(), taken_at=at, ready=ready, verified=verified, **flags)


def kept(result):
    return {decision.id: decision.reasons for decision in result.keep}


def deleted(result):
    return {decision.id for decision in result.delete}


counts = st.integers(min_value=0, max_value=5)
policies = st.builds(
    Policy,
    keep_last=counts,
    keep_hourly=counts,
    keep_daily=counts,
    keep_weekly=counts,
    keep_monthly=counts,
    keep_yearly=counts,
    keep_within_s=st.none() | st.floats(min_value=0, max_value=40 * 86400.0),
)
# Dense enough that buckets are shared, and across year ends; some from the future; some in the very same instant.
moments = st.one_of(
    st.integers(min_value=-200, max_value=20).map(lambda hours: NOW + timedelta(hours=hours)),
    st.integers(min_value=-1500, max_value=30).map(lambda days: NOW + timedelta(days=days, seconds=days)),
    st.datetimes(min_value=datetime(2019, 12, 25), max_value=datetime(2027, 1, 10), timezones=st.just(UTC)),  # noqa: DTZ001
)


@st.composite
def histories(draw):
    results = st.sampled_from(["none", "none", "verified", "verified", "partly", "failed"])
    flags = st.tuples(moments, st.booleans(), results, st.booleans(), st.booleans())
    return [
        snapshot(
            at,
            id=f"s{number}",
            ready=ready or number % 2 == 0,
            verified=result == "verified",
            failed=result == "failed",
            partly=result == "partly",
            pinned=pinned and in_use,
            in_use=in_use,
        )
        for number, (at, ready, result, pinned, in_use) in enumerate(draw(st.lists(flags, max_size=25)))
    ]


@given(histories(), policies)
def test_each_snapshot_is_either_kept_or_deleted_and_has_a_reason(history, policy):
    result = plan(history, policy, NOW)
    ids = [decision.id for decision in result.keep + result.delete]
    assert sorted(ids) == sorted(one.id for one in history)
    assert all(decision.reasons for decision in result.keep + result.delete)


@given(histories(), policies)
def test_planning_again_what_was_kept_deletes_nothing_more(history, policy):
    first = plan(history, policy, NOW)
    left = [one for one in history if one.id not in deleted(first)]
    assert plan(left, policy, NOW).delete == ()


@given(histories(), policies, policies)
def test_a_larger_policy_keeps_all_that_a_smaller_one_keeps(history, small, extra):
    larger = Policy(
        **{
            key: None if value is None and asdict(extra)[key] is None else (value or 0) + (asdict(extra)[key] or 0)
            for key, value in asdict(small).items()
        }
    )
    # The empty policy is the exception: it keeps everything.
    if not small.empty:
        assert set(kept(plan(history, small, NOW))) <= set(kept(plan(history, larger, NOW)))


@given(histories(), policies, st.randoms(use_true_random=False))
def test_the_order_in_which_snapshots_are_listed_changes_nothing(history, policy, random):
    shuffled = history[:]
    random.shuffle(shuffled)
    assert plan(shuffled, policy, NOW) == plan(history, policy, NOW)


@given(histories(), policies)
def test_what_is_protected_is_never_deleted(history, policy):
    gone = deleted(plan(history, policy, NOW))
    ready = [one for one in history if one.ready]
    for group in (
        ready,
        [one for one in ready if one.verified],
        [one for one in ready if one.taken_at <= NOW],
        [one for one in ready if one.verified and one.taken_at <= NOW],
        [one for one in ready if not one.failed],
        [one for one in ready if not one.failed and one.taken_at <= NOW],
        # The newest proof of any kind: a partial one that is newer than the newest VERIFIED one stays, too.
        [one for one in ready if one.verified or one.partly],
    ):
        if group:
            assert max(group, key=lambda one: (one.taken_at, one.id)).id not in gone
    for one in history:
        if one.pinned or one.in_use or not one.ready or one.taken_at > NOW:
            assert one.id not in gone


@given(histories())
def test_an_empty_policy_deletes_nothing(history):
    for policy in (Policy(), Policy(keep_within_s=0.0)):
        result = plan(history, policy, NOW)
        assert result.delete == ()
        assert all("empty policy" in reasons for reasons in kept(result).values())


@given(histories(), policies.map(lambda policy: replace(policy, keep_within_s=None)))
def test_no_more_is_kept_than_the_rules_count(history, policy):
    ordinary = [
        replace(one, pinned=False, in_use=False, ready=True, taken_at=min(one.taken_at, NOW)) for one in history
    ]
    if not policy.empty:
        # The newest READY, the newest that did not fail, the newest VERIFIED and partly verified come on top.
        allowed = sum(value for value in asdict(policy).values() if value) + 4
        assert len(plan(ordinary, policy, NOW).keep) <= allowed


@given(histories(), policies, histories())
def test_snapshots_from_the_future_and_unready_ones_push_no_real_one_out(history, policy, strange):
    real = [replace(one, ready=True) for one in history if one.taken_at <= NOW]
    ahead = [replace(one, id=f"x{one.id}", taken_at=NOW + timedelta(seconds=1 + i)) for i, one in enumerate(strange)]
    unready = [replace(one, id=f"y{one.id}", ready=False) for one in strange]
    assert deleted(plan(real + ahead + unready, policy, NOW)) == deleted(plan(real, policy, NOW))


@given(histories(), policies, histories())
def test_one_that_failed_fills_no_place_and_stays_only_as_the_newest(history, policy, bad):
    real = [replace(one, failed=False) for one in history if one.taken_at <= NOW]
    failed = [replace(one, id=f"z{one.id}", failed=True, verified=False, partly=False) for one in bad]
    result = plan(real + failed, policy, NOW)
    assert {one for one in deleted(result) if one.startswith("s")} == deleted(plan(real, policy, NOW))
    newest = max((one.taken_at for one in real + failed if one.ready and one.taken_at <= NOW), default=None)
    for one in failed:
        reasons = kept(result).get(one.id, ())
        ordinary = one.ready and not (one.pinned or one.in_use or policy.empty) and one.taken_at <= NOW
        if ordinary and one.taken_at != newest and "newest READY" not in reasons:
            assert reasons == ()
        assert not any(reason.startswith(("last ", "within ", "hourly", "daily", "weekly")) for reason in reasons)
    assert {why for one in result.delete if one.id.startswith("z") for why in one.reasons} <= {
        "failed its verification, and is not the newest"
    }


@given(histories(), policies, st.timedeltas(min_value=timedelta(days=-3000), max_value=timedelta(days=30000)))
def test_a_clock_step_between_backups_deletes_nothing_that_would_have_stayed(history, policy, step):
    past = [one for one in history if one.taken_at <= NOW]
    assert deleted(plan(past, policy, NOW + step)) <= deleted(plan(past, policy, NOW))


@given(histories(), policies)
def test_the_zone_in_which_times_are_written_changes_nothing(history, policy):
    berlin, kiritimati = ZoneInfo("Europe/Berlin"), ZoneInfo("Pacific/Kiritimati")
    moved = [
        replace(one, taken_at=one.taken_at.astimezone(berlin if number % 2 else kiritimati))
        for number, one in enumerate(history)
    ]
    assert plan(moved, policy, NOW.astimezone(berlin)) == plan(history, policy, NOW)


def test_the_newest_of_each_day_stays():
    history = [snapshot(f"2026-11-{day} {hour}:00") for day in (18, 19, 20) for hour in ("01", "13", "23")]
    result = plan(history, Policy(keep_daily=2), NOW)
    assert kept(result) == {
        "2026-11-20T23:00:00+00:00": ("newest READY", "daily 2026-11-20"),
        "2026-11-19T23:00:00+00:00": ("daily 2026-11-19",),
    }
    assert {reason for decision in result.delete for reason in decision.reasons} == {"no rule keeps it"}


def test_every_rule_names_itself():
    one = snapshot("2026-11-20 23:15", verified=True, pinned=True, in_use=True)
    policy = Policy(
        keep_last=3, keep_hourly=1, keep_daily=1, keep_weekly=1, keep_monthly=1, keep_yearly=1, keep_within_s=3 * 86400
    )
    assert kept(plan([one], policy, NOW))[one.id] == (
        "newest READY",
        "newest VERIFIED",
        "pinned",
        "in use",
        "last 1 of 3",
        "within 3 d",
        "hourly 2026-11-20 23:00",
        "daily 2026-11-20",
        "weekly 2026-W47",
        "monthly 2026-11",
        "yearly 2026",
    )


def test_days_without_snapshots_do_not_count():
    history = [snapshot("2026-11-20 01:00"), snapshot("2026-08-01 01:00"), snapshot("2025-02-01 01:00")]
    assert deleted(plan(history, Policy(keep_daily=3), NOW)) == set()


def test_the_isoweek_at_the_year_end_is_one_week():
    # 2026 has a week 53: Monday 28 December 2026 to Sunday 3 January 2027.
    history = [snapshot(at) for at in ("2026-12-27 12:00", "2026-12-28 12:00", "2026-12-31 12:00", "2027-01-03 12:00")]
    result = plan(history, Policy(keep_weekly=2), datetime(2027, 1, 4, tzinfo=UTC))
    assert kept(result) == {
        "2027-01-03T12:00:00+00:00": ("newest READY", "weekly 2026-W53"),
        "2026-12-27T12:00:00+00:00": ("weekly 2026-W52",),
    }


def test_the_calendar_year_ends_at_utc_midnight():
    # 00:30 on 1 January in Berlin is still the old year.
    berlin = ZoneInfo("Europe/Berlin")
    history = [
        snapshot(datetime(2027, 1, 1, 0, 30, tzinfo=berlin), id="still 2026"),
        snapshot(datetime(2027, 1, 1, 1, 30, tzinfo=berlin), id="2027"),
        snapshot(datetime(2026, 5, 1, tzinfo=berlin), id="may"),
    ]
    result = plan(history, Policy(keep_yearly=2), datetime(2027, 1, 2, tzinfo=UTC))
    assert set(kept(result)) == {"2027", "still 2026"}
    assert kept(result)["still 2026"] == ("yearly 2026",)


@pytest.mark.parametrize(
    ("first", "hours"), [(datetime(2026, 3, 29, tzinfo=UTC), 24), (datetime(2026, 10, 25, tzinfo=UTC), 24)]
)
def test_summer_time_makes_no_hour_vanish_or_double(first, hours):
    berlin = ZoneInfo("Europe/Berlin")
    history = [snapshot((first + timedelta(hours=hour)).astimezone(berlin), id=str(hour)) for hour in range(hours)]
    result = plan(history, Policy(keep_hourly=24), first + timedelta(days=2))
    assert result.delete == ()
    assert len({reason for reasons in kept(result).values() for reason in reasons if reason.startswith("hourly")}) == 24
    assert set(kept(plan(history, Policy(keep_daily=1), first + timedelta(days=2)))) == {"23"}


def test_seven_snapshots_dated_ahead_do_not_use_up_the_seven_days():
    real = [snapshot(NOW - timedelta(days=day), id=f"real{day}") for day in range(10)]
    wrong = [snapshot(NOW + timedelta(days=365 + day), id=f"wrong{day}") for day in range(7)]
    result = plan(real + wrong, Policy(keep_daily=7), NOW)
    assert deleted(result) == {"real7", "real8", "real9"}
    assert "taken in the future: a clock is or was wrong" in kept(result)["wrong0"]


def test_a_clock_that_fell_back_to_1970_deletes_nothing():
    history = [snapshot(NOW - timedelta(days=day), id=str(day)) for day in range(10)]
    assert plan(history, Policy(keep_last=1), datetime(1970, 1, 1, tzinfo=UTC)).delete == ()


def test_a_job_that_stopped_a_year_ago_is_not_emptied_by_keep_within():
    history = [snapshot(NOW - timedelta(days=365 + day), id=str(day)) for day in range(5)]
    assert deleted(plan(history, Policy(keep_within_s=2 * 86400.0), NOW)) == {"3", "4"}


def test_the_edge_of_keep_within_belongs_to_it():
    history = [
        snapshot(NOW, id="a"),
        snapshot(NOW - timedelta(days=1), id="b"),
        snapshot(NOW - timedelta(days=1, microseconds=1), id="c"),
    ]
    assert deleted(plan(history, Policy(keep_within_s=86400.0), NOW)) == {"c"}


def test_an_unready_snapshot_takes_nobodys_place():
    history = [
        snapshot("2026-11-20 23:00", id="broken", ready=False, verified=True),
        snapshot("2026-11-20 01:00", id="good"),
        snapshot("2026-11-19 01:00", id="older"),
    ]
    result = plan(history, Policy(keep_daily=1), NOW)
    assert kept(result) == {"broken": ("not READY: left to doctor",), "good": ("newest READY", "daily 2026-11-20")}
    assert deleted(result) == {"older"}


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="times with a zone"):
        plan([snapshot(NOW.replace(tzinfo=None))], Policy(), NOW)
    with pytest.raises(ValueError, match="times with a zone"):
        plan([], Policy(), NOW.replace(tzinfo=None))
    with pytest.raises(ValueError, match="occurs twice"):
        plan([snapshot(NOW, id="a"), snapshot(NOW, id="a")], Policy(), NOW)
    for wrong in ({"keep_last": -1}, {"keep_weekly": -1}, {"keep_within_s": -1.0}, {"keep_within_s": float("nan")}):
        with pytest.raises(ValueError, match=r"from 0 up|0 or more"):
            Policy(**wrong)


def test_one_that_failed_its_verification_does_not_stand_in_for_one_that_may_restore():
    good = snapshot("2026-11-20 23:00", id="unproved")
    bad = [replace(snapshot(f"2026-11-21 0{hour}:00", id=f"failed {hour}"), failed=True) for hour in (1, 2)]
    result = plan([snapshot("2026-11-19 23:00", id="old"), good, *bad], Policy(keep_last=1), NOW)
    assert kept(result) == {
        "failed 2": ("newest READY",),
        "unproved": ("newest that did not fail", "last 1 of 1"),
    }
    assert [(one.id, one.reasons) for one in result.delete] == [
        ("failed 1", ("failed its verification, and is not the newest",)),
        ("old", ("no rule keeps it",)),
    ]
    assert protect([good, *bad], NOW) == {
        "unproved": ("newest that did not fail",),
        "failed 2": ("newest READY",),
        "failed 1": (),
    }


def test_the_newest_partly_verified_one_stays_until_a_newer_one_is_verified():
    partly = replace(snapshot("2026-11-20 01:00", id="partly"), partly=True)
    older = replace(snapshot("2026-11-18 01:00", id="older"), partly=True)
    proved = snapshot("2026-11-19 01:00", id="proved", verified=True)
    newest = snapshot("2026-11-21 01:00", id="newest")
    result = plan([older, proved, partly, newest], Policy(keep_last=1), NOW)
    assert kept(result) == {
        "newest": ("newest READY", "last 1 of 1"),
        "partly": ("newest partly verified",),
        "proved": ("newest VERIFIED",),
    }
    again = plan([older, proved, partly, replace(newest, verified=True)], Policy(keep_last=1), NOW)
    assert deleted(again) == {"older", "proved", "partly"}


def test_a_verified_snapshot_from_the_future_does_not_replace_the_real_one():
    history = [
        snapshot(NOW + timedelta(days=99), id="ahead", verified=True),
        snapshot(NOW - timedelta(days=1), id="newest"),
        snapshot(NOW - timedelta(days=2), id="proved", verified=True),
        snapshot(NOW - timedelta(days=3), id="old", verified=True),
    ]
    assert deleted(plan(history, Policy(keep_last=1), NOW)) == {"old"}
