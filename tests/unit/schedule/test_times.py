"""Calendar expressions: read, evaluated, and said in cron's words."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.contract.errors import ConfigError
from snapmgr.schedule.times import cron_fields, local_zone, next_time, next_times, read_expression
from support.calendars import expressions, matches_cron

BERLIN = ZoneInfo("Europe/Berlin")
# Hypothesis wants the bounds without a zone.
MOMENTS = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001


@pytest.mark.parametrize(
    ("text", "after", "due"),
    [
        ("02:30", "2026-01-31T02:29:59", "2026-01-31T02:30:00"),
        ("02:30", "2026-01-31T02:30:00", "2026-02-01T02:30:00"),
        ("Mon..Fri 22:00", "2026-01-30T22:00:00", "2026-02-02T22:00:00"),
        ("*-*~1 04:00", "2028-02-01T00:00:00", "2028-02-29T04:00:00"),
        ("Sun *-*-1..7 04:00", "2026-11-21T00:00:00", "2026-12-06T04:00:00"),
        ("02:30 America/New_York", "2026-01-31T00:00:00", "2026-01-31T07:30:00"),
    ],
)
def test_the_next_time(text, after, due):
    found = next_time(read_expression(text), datetime.fromisoformat(after + "+00:00"), UTC)
    assert found == datetime.fromisoformat(due + "+00:00")


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "x", "25:00", "02:30:60", "*-13-1", "@0", "02:30:00.5", "٠٢:٣٠", "%n 02:30", "~" * 90, "9" * 5000),
        *("Mon" + "," * 190, "daily Europe", "daily ../../etc/passwd", "daily /etc/localtime"),
        "02:30\n[Service]\nExecStart=/bin/sh x",
    ],
)
def test_what_is_no_expression_is_refused_in_plain_words(text):
    with pytest.raises(ConfigError, match="is not a calendar expression"):
        cron_fields(read_expression(text))


@given(st.text(max_size=60))
def test_any_text_is_an_expression_or_an_error(text):
    try:
        expression = read_expression(text)
    except ConfigError:
        return
    # What is written to a file has one line, and no more of systemd's specifiers than it should: none.
    assert expression.isascii()
    assert expression.isprintable()
    assert "%" not in expression
    assert read_expression(expression) == expression
    next_time(expression, datetime(2026, 1, 1, tzinfo=UTC), UTC)


@given(expressions(), MOMENTS, st.sampled_from([UTC, BERLIN, ZoneInfo("America/St_Johns")]))
def test_times_come_later_and_later(expression, after, zone):
    times = next_times(read_expression(expression), after, zone, 4)
    assert all(time.tzinfo is UTC for time in times)
    for earlier, later in zip([after, *times], times, strict=False):
        assert earlier < later
    # Asked again from just before one, it is the answer.
    for time in times:
        assert next_time(expression, time - timedelta(seconds=1), zone) == time


def test_a_skipped_time_does_not_come_and_a_doubled_one_comes_once():
    # 2026-03-29: 02:00 to 03:00 do not exist in Berlin; 2026-10-25: they come twice.
    spring = next_times("02:30", datetime(2026, 3, 28, 0, tzinfo=UTC), BERLIN, 2)
    assert [time.isoformat() for time in spring] == ["2026-03-28T01:30:00+00:00", "2026-03-30T00:30:00+00:00"]
    autumn = next_times("02:30", datetime(2026, 10, 24, 12, tzinfo=UTC), BERLIN, 2)
    assert [time.isoformat() for time in autumn] == ["2026-10-25T00:30:00+00:00", "2026-10-26T01:30:00+00:00"]
    # From within the second of the two hours no time lies in the past.
    within = datetime(2026, 10, 25, 1, 35, tzinfo=UTC)
    assert next_time("*:0/10", within, BERLIN) > within


def test_an_expression_may_have_no_time_left():
    assert next_time("2020-01-01", datetime(2026, 1, 1, tzinfo=UTC), UTC) is None


def test_the_local_zone_is_the_machines_whatever_our_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    path = tmp_path / "localtime"
    assert local_zone(path) is UTC
    path.write_bytes(b"no zone")
    assert local_zone(path) is UTC
    path.unlink()
    path.symlink_to("/usr/share/zoneinfo/Europe/Berlin")
    assert datetime(2026, 7, 1, tzinfo=local_zone(path)).utcoffset() == timedelta(hours=2)


# --------------------------------------------------------------------------------------------------------------- cron


@pytest.mark.parametrize(
    ("expression", "fields"),
    [
        ("daily", "0 0 * * *"),
        ("hourly", "0 * * * *"),
        ("Mon..Fri 02:30", "30 2 * * 1-5"),
        ("Sun 02:30", "30 2 * * 0"),
        ("*:0/15", "0,15,30,45 * * * *"),
        ("*-*-1,15 04:05", "5 4 1,15 * *"),
        ("quarterly", "0 0 1 1,4,7,10 *"),
    ],
)
def test_what_cron_can_say(expression, fields):
    assert cron_fields(expression) == fields


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("02:30 UTC", "time zone"),
        ("02:30 Europe/Berlin", "time zone"),
        ("02:30:15", "seconds"),
        ("2027-*-* 02:30", "a year"),
        ("*-*~1 02:30", "month's end"),
        ("Mon *-*-1..7 02:30", "together with a weekday"),
    ],
)
def test_what_cron_cannot_say_is_refused_with_the_reason(expression, why):
    with pytest.raises(ConfigError, match=why) as caught:
        cron_fields(read_expression(expression))
    assert caught.value.hint


@given(expressions(), MOMENTS)
def test_cron_runs_at_exactly_the_same_minutes(expression, after):
    try:
        fields = cron_fields(read_expression(expression))
    except ConfigError:
        return
    minute = after.replace(second=0, microsecond=0)
    span = timedelta(days=3)
    wanted = [
        time for time in next_times(expression, minute - timedelta(seconds=1), UTC, 24 * 60) if time < minute + span
    ]
    every = (minute + timedelta(minutes=number) for number in range(3 * 24 * 60))
    ran = [one for one in every if matches_cron(fields, one)][: 24 * 60]
    assert ran == wanted
