"""Renders a tuning as one self-contained HTML page: the ladder, the activity of each rung, the settings to keep."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from snapmgr.contract.units import format_duration, format_size
from snapmgr.drawing.rungs import Bar, Kind, bars, timeline
from snapmgr.physical.tuning.outcome import (
    PUBLISHED,
    arguments,
    command_line,
    quickest_arguments,
    quickest_table,
    scratch_is_quickest,
    size_words,
    summary,
)
from snapmgr.physical.tuning.rungs import changes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from snapmgr.physical.tuning.rungs import RungSettings
    from snapmgr.physical.tuning.tune import Measured, Tuning


def render(tuning: Tuning, *, source: str, job: str | None, made_at: datetime) -> str:
    """Return the page, also for an interrupted tuning with at least one run.

    Args:
        tuning: all measurements.
        source: path of the backup.
        job: the job that the settings are for; None without a job.
        made_at: for the page's head.
    """
    environment = Environment(
        loader=DictLoader({"page": _part("page.html")}), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template(
        "page"
    ).render(
        name=tuning.name,
        style=Markup(_part("page.css")),  # noqa: S704 - a file of ours
        subtitle=f"{size_words(tuning)}, {tuning.tool}; {made_at:%Y-%m-%d %H:%M %Z}",
        unfinished=""
        if tuning.stop is not None
        else "It was ended before it was done: this is what was measured by then.",
        figures=_figures(tuning),
        summary=[line[0].upper() + line[1:] + "." for line in summary(tuning)],
        settings=_settings(tuning, source, job),
        # This SVG escapes its own texts.
        ladder=Markup(bars(_ladder(tuning), title="Seconds of each rung", unit="s")),  # noqa: S704
        published=Markup(bars(_published(tuning), title="Times faster than the first rung", unit="×")),  # noqa: S704
        warmth=_warmth(tuning),
        runs=[_shown(tuning, number, one) for number, one in enumerate(tuning.measured, 1) if one.samples],
        table=[_row(tuning, one) for one in tuning.measured],
    )


def _part(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


def _figures(tuning: Tuning) -> list[dict[str, str]]:
    now, first = tuning.standing, tuning.first_s
    if now is None or first is None:
        return []
    found = [
        {"kind": "", "value": format_duration(first), "label": "the first rung"},
        {"kind": "best", "value": format_duration(now.best_s), "label": "the best rung"},
        {"kind": "best", "value": f"{tuning.speed_up or 0:.1f}×", "label": "faster"},
    ]
    if tuning.scratch is not None and tuning.scratch.failure is None:
        seconds = format_duration(tuning.scratch.seconds)
        found.append({"kind": "beside", "value": seconds, "label": "beside: over local scratch"})
    return found


def _settings(tuning: Tuning, source: str, job: str | None) -> list[dict[str, str]]:
    if tuning.standing is None:
        return []
    best = tuning.standing.best
    found = [{"what": "As a command:", "text": command_line(source, quickest_arguments(tuning, best))}]
    if job is not None:
        found.insert(0, {"what": "In the configuration of the job:", "text": quickest_table(tuning, job, best)})
    if scratch_is_quickest(tuning):
        text = command_line(source, arguments(best))
        found.append({"what": "In the storage, which took longer than on scratch:", "text": text})
    return found


def _rungs(tuning: Tuning) -> list[RungSettings]:
    return list(dict.fromkeys(run.settings for run in tuning.history))


def _kind(tuning: Tuning, settings: RungSettings) -> Kind:
    now = tuning.standing
    if now is None or not tuning.times(settings):
        return "cut"
    if settings == now.best:
        return "best"
    return "step" if settings in now.steps else "tried"


def _ladder(tuning: Tuning) -> list[Bar]:
    rows = []
    before: RungSettings | None = None
    for settings in _rungs(tuning):
        kind, times = _kind(tuning, settings), tuning.times(settings)
        longest = max(run.seconds for run in tuning.history if run.settings == settings)
        value = _mean(times) if times else longest
        text = format_duration(value) if times else f"> {format_duration(value)}"
        failed = any(one.failure for one in tuning.measured if one.run.settings == settings)
        rows.append(
            Bar(
                label=str(settings) if before is None else changes(before, settings),
                value=value,
                text="failed" if failed and not times else text,
                kind=kind,
                dots=tuple(times),
            )
        )
        if before is None or kind in {"best", "step"}:
            before = settings
    if tuning.scratch is not None and tuning.scratch.failure is None:
        seconds = tuning.scratch.seconds
        label = "beside: copied to local scratch, prepared there"
        rows.append(Bar(label=label, value=seconds, text=format_duration(seconds), kind="beside"))
    return rows


def _published(tuning: Tuning) -> list[Bar]:
    now, first = tuning.standing, tuning.first_s
    if now is None or first is None:
        return []
    rows = []
    before: RungSettings | None = None
    for settings in now.steps:
        times = tuning.times(settings)
        if times:
            label = f"here: {settings}" if before is None else f"here: {changes(before, settings)}"
            rows.append(_faster(label, first / _mean(times), _mean(times), "best" if settings == now.best else "step"))
        before = settings
    if tuning.scratch is not None and tuning.scratch.failure is None:
        rows.append(_faster("here: on local scratch", first / tuning.scratch.seconds, tuning.scratch.seconds, "beside"))
    base = PUBLISHED[0][1]
    return [*rows, *(_faster(f"published: {rung}", base / took, took, "published") for rung, took in PUBLISHED)]


def _faster(label: str, times: float, seconds: float, kind: Kind) -> Bar:
    return Bar(label=label, value=times, text=f"{times:.1f}× ({format_duration(seconds)})", kind=kind)


def _warmth(tuning: Tuning) -> list[dict[str, str]]:
    if tuning.standing is None:
        return []
    return [
        {
            "rung": str(settings),
            "cold": _listed(tuning.times(settings)),
            "warm": _listed(tuning.times(settings, "warm")) or "not measured",
        }
        for settings in dict.fromkeys((tuning.start, tuning.standing.best))
    ]


def _shown(tuning: Tuning, number: int, one: Measured) -> dict[str, Any]:
    now = tuning.standing
    warm = ", from a warm cache" if one.temperature == "warm" else ""
    took = format_duration(one.run.seconds)
    ended = f"failed: {one.failure}" if one.failure else f"ended after {took}" if one.run.cut else took
    shown = {tuning.start, now.best} if now is not None else {tuning.start}
    first_of_its_kind = all(
        other.run.settings != one.run.settings or not other.samples for other in tuning.measured[: number - 1]
    )
    lines = [line for line in (f"Tried because: {one.why}" if one.why else "", one.verdict) if line]
    return {
        "title": f"{number}. {one.run.settings}{warm}: {ended}",
        "open": one.run.settings in shown and first_of_its_kind,
        "lines": lines,
        "timeline": Markup(  # noqa: S704 - SVG whose texts are escaped where it is made
            timeline(one.samples, title=f"What the mount did in run {number}")
        ),
    }


def _row(tuning: Tuning, one: Measured) -> dict[str, Any]:
    counted = one.counted
    warm = " (warm)" if one.temperature == "warm" else ""
    return {
        "rung": f"{one.run.settings}{warm}",
        "best": tuning.standing is not None and one.run.settings == tuning.standing.best and not warm,
        "all": f"{'> ' if one.run.cut else ''}{one.run.seconds:.1f}",
        "warm_up": f"{one.warm_up_s:.1f}" if one.warm_up_s else "",
        "tool": f"{one.tool_s:.1f}",
        "settle": f"{one.settle_s:.1f}" if one.settle_s else "",
        "gets": f"{counted.gets:,} / {format_size(counted.get_bytes)}" if counted else "",
        "puts": f"{counted.puts:,} / {format_size(counted.put_bytes)}" if counted else "",
        "verdict": one.failure or one.verdict,
    }


def _mean(times: Sequence[float]) -> float:
    return sum(times) / len(times)


def _listed(times: Sequence[float]) -> str:
    return ", ".join(f"{seconds:.1f}" for seconds in times)
