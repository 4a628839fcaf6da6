"""Draws the charts of a document, each in two widths, from the figures in its tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from snapmgr.drawing.bars import Bar, Bars, bar_chart
from snapmgr.drawing.curves import Curve, curve_chart
from snapmgr.drawing.intervals import Lane, interval_chart
from snapmgr.drawing.layoutmap import layout_map, window_of
from snapmgr.drawing.ratios import RatioGroup, RatioRow, ratio_chart
from snapmgr.drawing.svg import NARROW, WIDE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from snapmgr.drawing.ratios import Kind

_INFINITE = 1e9


def ratios(scenario: Mapping[str, Any], labels: Mapping[str, str]) -> Markup:
    """Return the chart of a scenario's ratios to its baseline; `labels` are the storages' names for people."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for one in scenario["ratios"]:
        if one["drawn"]:
            groups.setdefault(one["metric"], []).append(one)
    drawn = [
        RatioGroup(
            title=rows[0]["title"],
            better=rows[0]["better"],
            noise=_noise_limit(rows[0]["noise"]),
            rows=[
                *(_ratio_row(labels[one["stack"]], one, kind=one["kind"]) for one in rows),
                *_twins(rows[0]["noise"]),
            ],
        )
        for rows in groups.values()
    ]
    return _both(
        lambda width, **names: ratio_chart(drawn, width=width, **names),
        title=f"{scenario['label']}: ratios to {labels[scenario['baseline']]}",
        description="Each ratio with its interval on a logarithmic scale; the table below has the same figures.",
        ident=f"{scenario['anchor']}-ratios",
    )


def _ratio_row(label: str, ratio: Mapping[str, Any], *, kind: Kind) -> RatioRow:
    high = _INFINITE if ratio["high"] is None else ratio["high"]
    return RatioRow(label=label, value=ratio["value"], low=ratio["low"], high=high, text=ratio["text"], kind=kind)


def _noise_limit(noise: Mapping[str, Any] | None) -> float | None:
    if noise is None:
        return None
    return math.inf if noise["limit"] is None else float(noise["limit"])


def _twins(noise: Mapping[str, Any] | None) -> list[RatioRow]:
    """Return the row of the A/A pairs, so that the reader sees their interval beside those of the stacks."""
    return [_ratio_row("A/A: the same twice", noise, kind="other" if noise["shown"] else "same")] if noise else []


def moments(scenario: Mapping[str, Any], family: Mapping[str, Any], labels: Mapping[str, str]) -> Markup:
    """Return the chart of one figure at its moments."""
    stacks = [
        Bars(
            label=labels[row["stack"]],
            bars=[
                Bar(
                    value=bar["median"],
                    dots=bar["values"],
                    text=bar["ratio"]["text"] if bar["ratio"] else "",
                    kind=bar["kind"],
                )
                for bar in row["bars"]
            ],
        )
        for row in family["rows"]
    ]
    return _both(
        lambda width, **names: bar_chart(stacks, unit=family["unit"], width=width, **names),
        title=family["title"],
        description="Medians, with a dot for each sample; the table below has the same figures.",
        ident=f"{scenario['anchor']}-{family['family']}",
    )


def curve(
    scenario: Mapping[str, Any], chart: Mapping[str, Any], colours: Mapping[str, int], labels: Mapping[str, str]
) -> Markup:
    """Return the curves of one series."""
    lines = [
        Curve(
            label=labels[line["stack"]],
            colour=colours[line["stack"]],
            points=[(point["x"], point["median"]) for point in line["points"]],
            low=[point["least"] for point in line["points"]],
            high=[point["most"] for point in line["points"]],
        )
        for line in chart["lines"]
    ]
    svg = curve_chart(
        lines,
        x_title=chart["x_title"],
        unit=chart["unit"],
        # These are many, so they are drawn side by side if there is room.
        width=NARROW,
        title=chart["title"],
        description="Medians, within the span of all samples; the table below has the same figures.",
        ident=f"{scenario['anchor']}-{chart['series']}",
    )
    return Markup(svg)  # noqa: S704 - the drawing code escapes its texts


def timeline(scenario: Mapping[str, Any], row: Mapping[str, Any], labels: Mapping[str, str]) -> Markup:
    """Return one stack's run over time."""
    lanes = [
        Lane(
            title=lane["title"],
            unit=lane["unit"],
            before=lane["moments"][0]["values"],
            after=[value for moment in lane["moments"][1:] for value in moment["values"]],
            colour=number,
        )
        for number, lane in enumerate(lane for lane in row["lanes"] if lane["drawn"])
    ]
    return _both(
        lambda width, **names: interval_chart(lanes, interval_s=row["interval_s"], width=width, **names),
        title=f"{labels[row['stack']]}: interval by interval",
        description="Shaded: nothing was done. The table below counts these intervals in all samples.",
        ident=f"{scenario['anchor']}-{row['stack']}-timeline",
    )


def layout_maps(scenario: Mapping[str, Any], row: Mapping[str, Any], labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a map for each moment of one stack's file, all of the same part of the device."""
    points = [_points(moment["layout"]) for moment in row["moments"]]
    window = window_of(points)
    return [
        {
            "moment": moment["moment"],
            "svg": Markup(  # noqa: S704 - the drawing code escapes its texts
                layout_map(
                    extents,
                    window=window,
                    size_bytes=moment["layout"]["size_bytes"],
                    title=f"{labels[row['stack']]}, {moment['moment']}: where the file lies",
                    description=f"{moment['layout']['extents']:,} extents; an unbroken rising line is read in one go.",
                    ident=f"{scenario['anchor']}-{row['stack']}-{number}",
                )
            ),
        }
        for number, (moment, extents) in enumerate(zip(row["moments"], points, strict=True))
    ]


def _points(layout: Mapping[str, Any]) -> Sequence[tuple[int, int, int]]:
    return [(int(logical), int(physical), int(length)) for logical, physical, length in layout.get("points", ())]


def _both(draw: Callable[..., str], *, title: str, description: str, ident: str) -> Markup:
    """Return a chart for a wide and for a narrow page; the style sheet shows one of them."""
    drawn = [
        (kind, draw(width, title=title, description=description, ident=ident))
        for kind, width in (("wide", WIDE), ("narrow", NARROW))
    ]
    # The drawing code escapes its texts.
    return Markup("".join(f'<div class="{kind}">{svg}</div>' for kind, svg in drawn if svg))  # noqa: S704
