"""Calendar expressions made at random, and the systems that read them, as their manuals say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

if TYPE_CHECKING:
    from datetime import datetime

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


def _numbers(low: int, high: int) -> st.SearchStrategy[str]:
    one = st.integers(low, high)
    ranges = st.tuples(one, one).filter(lambda pair: pair[0] < pair[1]).map(lambda pair: f"{pair[0]}..{pair[1]}")
    # systemd refuses a step that leads nowhere, as in "20/10" hours.
    pairs = st.tuples(one, st.integers(1, 20)).filter(lambda pair: sum(pair) <= high)
    steps = pairs.map(lambda pair: f"{pair[0]}/{pair[1]}")
    return st.one_of(
        st.just("*"),
        one.map(str),
        st.lists(st.one_of(one.map(str), ranges, steps), min_size=1, max_size=3).map(",".join),
    )


def expressions() -> st.SearchStrategy[str]:
    """Return OnCalendar expressions of every form that cron might know, and some more."""
    days = st.sampled_from(range(7))
    ranges = st.tuples(days, days).filter(lambda pair: pair[0] < pair[1])
    weekdays = st.one_of(
        st.just(""),
        st.lists(days, min_size=1, max_size=3).map(lambda some: ",".join(_DAYS[day] for day in some) + " "),
        ranges.map(lambda pair: f"{_DAYS[pair[0]]}..{_DAYS[pair[1]]} "),
    )
    dates = st.one_of(
        st.just(""),
        st.builds(lambda month, day: f"*-{month}-{day} ", _numbers(1, 12), _numbers(1, 28)),
        st.builds(lambda day: f"*-*~{day} ", st.integers(1, 28)),
    )
    times = st.builds(lambda hour, minute: f"{hour}:{minute}", _numbers(0, 23), _numbers(0, 59))
    shorthand = st.sampled_from(["minutely", "hourly", "daily", "weekly", "monthly", "quarterly", "yearly"])
    return st.one_of(st.builds(lambda *parts: "".join(parts), weekdays, dates, times), shorthand)


def matches_cron(fields: str, at: datetime) -> bool:
    """Whether cron would run a line with these five fields at this minute (crontab(5))."""
    minute, hour, day, month, weekday = fields.split()
    by_day, by_weekday = _holds(day, at.day), _holds(weekday, at.isoweekday() % 7)
    # "The command will be run when either field matches", if both are restricted.
    right_day = (
        (by_day or by_weekday) if not day.startswith("*") and not weekday.startswith("*") else by_day and by_weekday
    )
    return _holds(minute, at.minute) and _holds(hour, at.hour) and _holds(month, at.month) and right_day


def _holds(field: str, value: int) -> bool:
    if field == "*":
        return True
    for part in field.split(","):
        low, _, high = part.partition("-")
        if int(low) <= value <= int(high or low):
            return True
    return False


def systemd_words(text: str) -> list[str]:
    """Return the words of an ``ExecStart=:`` (systemd.service(5), COMMAND LINES; systemd.unit(5), SPECIFIERS)."""
    assert text.startswith(":")
    words, position = [], 1
    while position < len(text):
        assert text[position] == '"', text[position:]
        position += 1
        word = ""
        while text[position] != '"':
            if text[position] == "\\":
                position += 1
                assert text[position] in '\\"'
            word += text[position]
            position += 1
        position += 1
        assert text[position : position + 1] in {"", " "}
        position += 1
        assert "%" not in word.replace("%%", ""), "a specifier"
        words.append(word.replace("%%", "%"))
    return words


def cron_command(line: str) -> str:
    """Return what the shell gets of a crontab's sixth field: % ends it, a backslash before % goes (crontab(5))."""
    assert "%" not in line.replace("\\%", ""), "the rest would be the command's input"
    return line.replace("\\%", "%")
