"""Reads and evaluates OnCalendar expressions (systemd.time(7)), and translates them for cron.

`oncalendar` parses them, also where there is no systemd. It knows systemd's whole syntax except fractions of seconds,
``@TIMESTAMP`` and a few rare synonyms, which are refused.
"""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from oncalendar import BaseIterator, OnCalendarError, TzIterator, parse_tz

from snapmgr.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_LONGEST = 200
_HINT = 'as in "daily", "02:30", "Mon..Fri 22:00" or "*-*-1 04:00"; see systemd.time(7), CALENDAR EVENTS'
# From this many consecutive numbers on a list is written as a range.
_RANGE_FROM = 3


def read_expression(text: str) -> str:
    """Given an OnCalendar expression, return it with single spaces. Raises ConfigError if it is invalid."""
    expression = " ".join(text.split())
    # No valid expression has other characters, and it must not add a line to our file.
    plain = expression.isascii() and expression.isprintable()
    # oncalendar accepts any number of commas after a weekday, systemd only one.
    if not expression or not plain or len(expression) > _LONGEST or ",," in expression:
        raise ConfigError(f"{text[:_LONGEST]!r} is not a calendar expression", hint=_HINT)
    try:
        TzIterator(expression, datetime(2000, 1, 1, tzinfo=UTC))
    except (OnCalendarError, ValueError, OSError) as error:
        # OSError: a folder of the time zone database was read as a zone.
        why = str(error) if isinstance(error, OnCalendarError) else "bad time zone or number"
        raise ConfigError(f"{expression!r} is not a calendar expression: {why}", hint=_HINT) from None
    return expression


def local_zone(path: Path = Path("/etc/localtime")) -> tzinfo:
    """Return the machine's time zone, which systemd and cron use, whatever TZ is in our environment.

    UTC if the machine has none, as in libc.
    """
    try:
        with path.open("rb") as file:
            return ZoneInfo.from_file(file)
    except (OSError, ValueError):
        return UTC


def next_time(expression: str, after: datetime, zone: tzinfo) -> datetime | None:
    """Return the first time (UTC) after `after` that `expression` names, in `zone` unless it names one itself.

    None if all are past. Raises ConfigError if it is invalid. A time that is skipped when clocks go forward does not
    occur on that day; one that occurs twice when they go back counts once, the first time.
    """
    return next(_times(expression, after, zone), None)


def next_times(expression: str, after: datetime, zone: tzinfo, count: int) -> list[datetime]:
    """Return the first `count` times as `next_time` does, or fewer if there are no more."""
    return list(islice(_times(expression, after, zone), count))


def _times(expression: str, after: datetime, zone: tzinfo) -> Iterator[datetime]:
    for at in TzIterator(read_expression(expression), after.astimezone(zone)):
        # In the hour that occurs twice TzIterator begins an hour early. Compared in UTC, as times of one zone are
        # compared by their wall clock.
        moment = at.astimezone(UTC)
        if moment > after.astimezone(UTC):
            yield moment


def cron_fields(expression: str) -> str:
    """Return the five time fields of the cron line for an expression. Raises ConfigError if cron cannot express it."""
    named_zone = " " in expression and parse_tz(expression.rpartition(" ")[2]) is not None
    if named_zone:
        raise _unsayable(expression, "a time zone", "name the time in the machine's own zone")
    read = BaseIterator(expression, datetime(2000, 1, 1, tzinfo=UTC))
    if read.seconds != {0}:
        raise _unsayable(expression, "seconds", "use a whole minute")
    if len(read.years) < _every_year():
        raise _unsayable(expression, "a year", "leave out the year")
    if any(day < 0 for day in read.days):
        raise _unsayable(expression, "days counted from the month's end (~)", "name the days from its beginning")
    minutes = _field(read.minutes, range(60))
    hours = _field(read.hours, range(24))
    days = _field(read.days, range(1, 32))
    months = _field(read.months, range(1, 13))
    # Ours begin with Monday = 0; in cron Monday is 1 and Sunday 0.
    weekdays = _field({(day + 1) % 7 for day in read.weekdays}, range(7))
    if days != "*" and weekdays != "*":
        # crontab(5): a job with both runs when *either* matches.
        raise _unsayable(expression, "a day of the month together with a weekday", "restrict only one of them")
    return f"{minutes} {hours} {days} {months} {weekdays}"


def _every_year() -> int:
    return len(BaseIterator("*-*-*", datetime(2000, 1, 1, tzinfo=UTC)).years)


def _unsayable(expression: str, what: str, hint: str) -> ConfigError:
    return ConfigError(f"cron cannot express {expression!r}: its fields cannot name {what}", hint=hint)


def _field(values: Collection[int], every: range) -> str:
    """Return numbers as a cron field. Never a step: a field that begins with * changes the meaning of another."""
    if set(values) >= set(every):
        return "*"
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ",".join(
        f"{run[0]}-{run[-1]}" if len(run) >= _RANGE_FROM else ",".join(str(value) for value in run) for run in runs
    )
