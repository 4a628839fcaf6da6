"""Turns the samples of one scenario into figures for JSON: tables, moments, curves, intervals, layouts. Pure."""

from __future__ import annotations

import re
from itertools import takewhile
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from snapmgr.drawing.intervals import stalls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    Sample = Mapping[str, Any]

_QUANTILES = ("min", "p1", "p5", "p50", "p90", "p95", "p99", "p999", "p9999", "max")
_MOMENTS = (("before", "during", "after"), ("none", "first", "second"), ("none", "many"))
"""Words for moments in the names of metrics and series, in chronological order."""
_LANES, _CURVES = 4, 8
"""Maximum number of drawn lanes of one run, and curves of one experiment. The tables have all of them."""


def by_stack(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Return the samples of each stack, both in the given order."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample["stack"], []).append(sample)
    return found


def anchor_of(*words: str) -> str:
    """Return the name of a link, made of some words."""
    return "-".join(re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-") for word in words if word)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the quartiles and the ends of at least one value."""
    lower, _, upper = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return {
        "n": len(values),
        "median": median(values),
        "lower": lower,
        "upper": upper,
        "least": min(values),
        "most": max(values),
    }


def metric_table(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return each metric with the figures of every stack, headlines first."""
    infos: dict[str, Mapping[str, Any]] = {}
    for sample in samples:
        infos.update({name: info for name, info in sample["infos"].items() if name not in infos})
    rows = []
    for name, info in sorted(infos.items(), key=lambda item: not item[1].get("headline", False)):
        cells = []
        for stack, ours in by_stack(samples).items():
            values = [float(sample["metrics"][name]) for sample in ours if name in sample["metrics"]]
            if values:
                cells.append({"stack": stack, **spread(values), "values": values})
        if cells:
            rows.append(
                {
                    "metric": name,
                    "title": info["title"],
                    "unit": info["unit"],
                    "better": info["better"],
                    "headline": bool(info.get("headline", False)),
                    "cells": cells,
                }
            )
    return rows


def moment_of(name: str) -> tuple[str, int, tuple[str, ...]] | None:
    """Given "read_after_s", return its name for any moment ("read_*_s"), its moment's number and all moments' words."""
    words = name.split("_")
    for moments in _MOMENTS:
        for place, word in enumerate(words):
            if word in moments:
                return "_".join([*words[:place], "*", *words[place + 1 :]]), moments.index(word), moments
    return None


def families(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of each figure that has at least two moments, in chronological order."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        moment = moment_of(name)
        if moment is not None:
            found.setdefault(moment[0] + "/" + moment[2][0], {})[moment[1]] = name
    return {
        key.partition("/")[0]: [members[place] for place in sorted(members)]
        for key, members in found.items()
        if len(members) > 1
    }


def common_title(titles: Sequence[str]) -> str:
    """Return the common part of titles: beginning, and end from a comma or colon on; else the first title."""
    split, head, tail = _parted(titles)
    beginning = split[0][:head]
    while beginning and beginning[-1].lower() in {",", ":", "in", "the", "of", "from", "with", "before", "after", "a"}:
        beginning.pop()
    ending = split[0][len(split[0]) - tail :]
    words = [*beginning, *ending] if beginning else ending[1:]
    found = _joined(words) or titles[0]
    return found[:1].upper() + found[1:]


def differing_titles(titles: Sequence[str]) -> list[str]:
    """Return the part of each title that the others do not share: "before the snapshot"; may be ""."""
    split, head, tail = _parted(titles)
    return [_joined(words[head : len(words) - tail]).strip(",: ") for words in split]


def moment_titles(names: Sequence[str], titles: Sequence[str]) -> list[str]:
    """Return a name for each moment of a family: the differing part of its title, else the word in its name."""
    found = []
    for name, words in zip(names, differing_titles(titles), strict=True):
        moment = moment_of(name)
        found.append(words or (moment[2][moment[1]] if moment else name))
    return found


def _parted(titles: Sequence[str]) -> tuple[list[list[str]], int, int]:
    """Return the words of the titles, with commas and colons, and the numbers of common words at beginning and end."""
    split = [re.sub(r"([,:])", r" \1", title).split() for title in titles]
    shortest = min(map(len, split))
    head = len(list(takewhile(_alike, zip(*split, strict=False))))
    tail = len(list(takewhile(_alike, zip(*map(reversed, split), strict=False))))
    tail = min(tail, shortest - min(head, shortest))
    ending = split[0][len(split[0]) - tail :]
    while ending and ending[0] not in {",", ":"}:
        ending = ending[1:]
    return split, head, len(ending)


def _joined(words: Sequence[str]) -> str:
    return re.sub(r" ([,:])", r"\1", " ".join(words))


def _alike(words: tuple[str, ...]) -> bool:
    return len({word.lower() for word in words}) == 1


def curves(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return each series over a swept parameter (not time): median, minimum and maximum at each x, for every stack."""
    rows: list[dict[str, Any]] = []
    for name, axis in _axes(samples, over_time=False).items():
        lines = []
        for stack, ours in by_stack(samples).items():
            points: dict[float, list[float]] = {}
            for sample in ours:
                if name in sample["series"]:
                    for x, y in zip(sample["axes"][name]["x"], sample["series"][name], strict=False):
                        points.setdefault(float(x), []).append(float(y))
            if points:
                lines.append({"stack": stack, "points": [{"x": x, **spread(points[x])} for x in sorted(points)]})
        if lines:
            rows.append({"series": name, **_named(axis), "lines": lines})
    drawn = _drawn([row["series"] for row in rows])[:_CURVES]
    return [{**row, "drawn": row["series"] in drawn} for row in rows]


def _drawn(names: Sequence[str]) -> list[str]:
    """Return the curves to draw: of a figure's quantiles only the median and the highest one below the maximum."""
    kinds: dict[str, dict[str, str]] = {}
    for name in names:
        words = name.split("_")
        quantile = next((word for word in words if word in _QUANTILES), "")
        kinds.setdefault(" ".join(word for word in words if word != quantile), {})[quantile] = name
    chosen: set[str] = set()
    for members in kinds.values():
        ranked = [members[quantile] for quantile in ("", *_QUANTILES) if quantile in members]
        middle = members.get("p50", ranked[0])
        inner = [members[quantile] for quantile in _QUANTILES[3:-1] if quantile in members] or ranked
        chosen |= {middle, inner[-1]}
    return [name for name in names if name in chosen]


def timelines(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return each stack's run over time: the median sample, and the stalls of all samples."""
    axes = _axes(samples, over_time=True)
    if not axes:
        return []
    grouped = list(families(axes).values())
    lanes = grouped + [[name] for name in axes if all(name not in names for names in grouped)]
    rows = []
    for stack, ours in by_stack(samples).items():
        having = [sample for sample in ours if any(name in sample["series"] for name in axes)]
        if not having:
            continue
        shown = _middle(having, lambda sample: sum(sum(sample["series"].get(name, ())) for name in axes))
        made = [_lane(names, axes, shown, having) for names in lanes]
        widest = max(lane["interval_s"] for lane in made)
        # A figure may exist per interval and, finer, per second: only intervals are drawn, both are counted.
        wide = [lane for lane in made if lane["interval_s"] == widest and any(one["values"] for one in lane["moments"])]
        rows.append(
            {
                "stack": stack,
                "sample": shown["id"],
                "n": len(having),
                "interval_s": widest,
                "lanes": [{**lane, "drawn": lane in wide[:_LANES]} for lane in made],
            }
        )
    return rows


def _lane(
    names: Sequence[str], axes: Mapping[str, Mapping[str, Any]], shown: Sample, having: Sequence[Sample]
) -> dict[str, Any]:
    titles = [axes[name]["title"] for name in names]
    moments = []
    for name, moment in zip(names, moment_titles(names, titles), strict=True):
        moments.append(
            {
                "series": name,
                "moment": moment if len(names) > 1 else "",
                "values": [float(value) for value in shown["series"].get(name, ())],
                "idle": [_idle(sample["series"][name]) for sample in having if name in sample["series"]],
                "intervals": max((len(sample["series"].get(name, ())) for sample in having), default=0),
            }
        )
    return {
        "title": common_title(titles),
        "unit": axes[names[0]].get("unit", ""),
        "interval_s": _interval_s(axes[names[0]]),
        "moments": moments,
    }


def _idle(values: Sequence[float]) -> int:
    return sum(end - first for first, end in stalls(values))


def layouts(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return each stack's file at its moments: the sample with the median number of final jumps, and all figures."""
    rows = []
    for stack, ours in by_stack(samples).items():
        having = [sample for sample in ours if sample["layouts"]]
        if not having:
            continue
        shown = _middle(having, lambda sample: float(list(sample["layouts"].values())[-1].get("gaps_per_gib", 0)))
        moments = [
            {
                "moment": moment,
                "extents": [one["layouts"][moment]["extents"] for one in having if moment in one["layouts"]],
                "gaps_per_gib": [one["layouts"][moment]["gaps_per_gib"] for one in having if moment in one["layouts"]],
                "layout": layout,
            }
            for moment, layout in shown["layouts"].items()
        ]
        caveats = {said: None for moment in moments for said in moment["layout"].get("caveats", ())}
        rows.append(
            {"stack": stack, "sample": shown["id"], "n": len(having), "moments": moments, "caveats": list(caveats)}
        )
    return rows


def _axes(samples: Iterable[Sample], *, over_time: bool) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for sample in samples:
        for name in sample["series"]:
            axis = sample["axes"].get(name)
            if axis is not None and (axis.get("x_unit") == "s") is over_time:
                found.setdefault(name, axis)
    return found


def _named(axis: Mapping[str, Any]) -> dict[str, Any]:
    return {key: axis.get(key, "") for key in ("title", "x_title", "x_unit", "unit")}


def _interval_s(axis: Mapping[str, Any]) -> float:
    x = axis.get("x", ())
    return float(x[1]) - float(x[0]) if len(x) > 1 else float(x[0]) if x else 1.0


def _middle(samples: Sequence[Sample], key: Callable[[Sample], float]) -> Sample:
    return sorted(samples, key=key)[(len(samples) - 1) // 2]
