"""Compares two sets of results and names regressions if that is possible. Pure.

A regression requires that the whole interval of new ÷ old lies beyond the tolerance, and that the machine is the same:
equal facts about the host, and unchanged controls (stacks without snapshots, which no change of a backend affects).
Otherwise the ratio is printed without that verdict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snapmgr.bench.statistics.comparison import difference_words, groups, ratio_document
from snapmgr.bench.statistics.findings import noise_of
from snapmgr.bench.statistics.machine import differences, telling
from snapmgr.bench.statistics.ratio import LEAST_PAIRS, LEVEL, Ratio, have_ratio
from snapmgr.bench.statistics.unpaired import unpaired_ratio
from snapmgr.bench.statistics.verdict import judge
from snapmgr.bench.storage.stacks import STACKS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from snapmgr.bench.statistics.comparison import Group, Sample
    from snapmgr.bench.statistics.ratio import Noise

TOLERANCE = 0.1
"""The relative worsening of a figure that does not yet count as a regression."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One figure of one stack, then and now."""

    experiment: str
    stack: str
    metric: str
    info: Mapping[str, Any]
    """Description of the metric: title, unit, better, headline."""
    old: Sequence[float]
    new: Sequence[float]
    ratio: Ratio | None
    """New ÷ old; None if a figure is 0."""
    noise: Noise | None = None
    """Noise of the metric in both runs; None if it is unknown."""

    def beyond(self, tolerance: float) -> str:
        """Return "worse" or "better" if a change by more than `tolerance` is shown, "same" if both are shown to be
        impossible, else "not shown"."""
        if self.ratio is None or self.ratio.n < LEAST_PAIRS:
            return "not shown"
        most = 1 + tolerance
        if 1 / most <= self.ratio.low and self.ratio.high <= most:
            return "same"
        return judge(self.ratio, self.info["better"], noise=self.noise, tolerance=tolerance)


def changes(old: Iterable[Sample], new: Iterable[Sample], *, seed: int = 1) -> list[Change]:
    """Return the headline figures that both have, in the order of `new`; `LEVEL` holds for a whole experiment.

    Experiments with other parameters are left out, because they do not show a change of the storage; see `obstacles`.
    """
    before = {group.name: group for group in groups(old)}
    found = []
    for group in groups(new):
        if group.name in before and group.parameters == before[group.name].parameters:
            found += _experiment(before[group.name], group, seed=seed)
    return found


def _experiment(old: Group, new: Group, *, seed: int) -> list[Change]:
    infos = {name: info for sample in new.counted for name, info in sample["infos"].items() if info.get("headline")}
    both = [
        (stack, metric, _figures(old, stack, metric), _figures(new, stack, metric))
        for metric in infos
        for stack in dict.fromkeys(sample["stack"] for sample in new.counted)
    ]
    both = [one for one in both if one[2] and one[3]]
    return [
        Change(
            experiment=new.name,
            stack=stack,
            metric=metric,
            info=infos[metric],
            old=then,
            new=now,
            ratio=unpaired_ratio(now, then, seed=seed, comparisons=len(both))
            if have_ratio([(figure, 1.0) for figure in (*then, *now)])
            else None,
            noise=noise_of((*old.samples, *new.samples), metric, seed=seed),
        )
        for stack, metric, then, now in both
    ]


def _figures(group: Group, stack: str, metric: str) -> list[float]:
    return [
        float(sample["metrics"][metric])
        for sample in group.counted
        if sample["stack"] == stack and metric in sample["metrics"]
    ]


def obstacles(
    old: Sequence[Sample], new: Sequence[Sample], found: Sequence[Change], *, tolerance: float = TOLERANCE
) -> list[str]:
    """Return the reasons against a comparison of the two, as sentences; empty if they are comparable."""
    said = []
    before, now = _hosts(old), _hosts(new)
    if before != now:
        lines = differences(before[0], now[0]) if before and now else []
        told = "; ".join(lines[:5]) + (f"; and {len(lines) - 5} more" if len(lines) > 5 else "")  # noqa: PLR2004 - a line
        said.append(f"The machines differ, or the state of one: {told or 'one of them says nothing about itself'}.")
    controls = [one for one in found if one.stack in STACKS and STACKS[one.stack].backend is None]
    said += [
        f"The control {one.stack} has changed ({one.experiment}, {one.info['title']}: "
        f"{ratio_document(one.ratio)['text']}): the machine is not as it was, whatever its facts say."
        for one in controls
        if one.ratio is not None and one.beyond(tolerance) in {"worse", "better", "differs"}
    ]
    return said


def _hosts(samples: Iterable[Sample]) -> list[Mapping[str, Any]]:
    """Return the facts about all machines, each once."""
    found: list[Mapping[str, Any]] = []
    for sample in samples:
        if sample["host"] and sample["kind"] != "absent" and (known := telling(sample["host"])) not in found:
            found.append(known)
    return found


def compare(
    old: Sequence[Sample], new: Sequence[Sample], *, tolerance: float = TOLERANCE, seed: int = 1
) -> dict[str, Any]:
    """Return the comparison as a document that can be written as JSON.

    {"tolerance", "level", "comparable", "obstacles": [sentence…], "rows": […], "regressions": number, "left_out":
    [sentence…]}. A row: {"experiment", "stack", "metric", "title", "unit", "better", "old": [figure…], "new":
    [figure…], "ratio" (of the medians, see `comparison.ratio_document`; None: a figure is 0), "verdict": "regression" |
    "worse" | "better" | "same" | "differs" | "not shown", "words"}. Only comparable results have regressions.
    """
    found = changes(old, new, seed=seed)
    hindered = obstacles(old, new, found, tolerance=tolerance)
    rows = [_row(one, tolerance=tolerance, comparable=not hindered) for one in found]
    return {
        "schema": 1,
        "tolerance": tolerance,
        "level": LEVEL,
        "comparable": not hindered,
        "obstacles": hindered,
        "rows": rows,
        "regressions": sum(1 for row in rows if row["verdict"] == "regression"),
        "left_out": _left_out(groups(old), groups(new)),
    }


def _row(one: Change, *, tolerance: float, comparable: bool) -> dict[str, Any]:
    verdict = one.beyond(tolerance)
    return {
        "experiment": one.experiment,
        "stack": one.stack,
        "metric": one.metric,
        "title": one.info["title"],
        "unit": one.info["unit"],
        "better": one.info["better"],
        "old": list(one.old),
        "new": list(one.new),
        "ratio": None if one.ratio is None else ratio_document(one.ratio),
        "verdict": "regression" if verdict == "worse" and comparable else verdict,
        "words": "no ratio: one of them is 0" if one.ratio is None else difference_words(one.ratio),
    }


def _left_out(old: Sequence[Group], new: Sequence[Group]) -> list[str]:
    """Return the experiments that are not compared, with reasons."""
    before, now = ({group.name: group for group in groups_ if group.counted} for groups_ in (old, new))
    said = [f"{name}: only the old results have it." for name in before if name not in now]
    said += [f"{name}: only the new results have it." for name in now if name not in before]
    said += [
        f"{name}: other sizes or settings than before, which is no change of the storage."
        for name in now
        if name in before and before[name].parameters != now[name].parameters
    ]
    return said
