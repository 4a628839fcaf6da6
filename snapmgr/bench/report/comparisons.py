"""Computes the ratios of an experiment for the report: between stacks, and between moments of a stack. Pure."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from snapmgr.bench.report.figures import anchor_of, by_stack, common_title, families, moment_titles
from snapmgr.bench.statistics.comparison import difference_words, finite, number_words, ratio_document
from snapmgr.bench.statistics.ratio import have_ratio, paired_ratio
from snapmgr.bench.statistics.verdict import judge

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from snapmgr.bench.statistics.comparison import Sample
    from snapmgr.bench.statistics.findings import Finding
    from snapmgr.drawing.ratios import Kind

_KINDS: Mapping[str, Kind] = {"better": "better", "worse": "worse", "differs": "other", "not shown": "same"}


def ratio_rows(findings: Sequence[Finding], *, baseline: str, stacks: Sequence[str]) -> list[dict[str, Any]]:
    """Return the findings of one experiment, those against `baseline` first, because the chart shows these."""
    rows = []
    for one in findings:
        if baseline in {one.stack, one.against}:
            other = one.against if one.stack == baseline else one.stack
            rows.append(_ratio_row(one.seen_from(other), drawn=True))
        else:
            # Findings are seen from the side of the later stack, like those against the baseline.
            later = max((one.stack, one.against), key=stacks.index)
            rows.append(_ratio_row(one.seen_from(later), drawn=False))
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    return sorted(
        rows,
        key=lambda row: (
            not row["drawn"],
            metrics.index(row["metric"]),
            stacks.index(row["against"]),
            stacks.index(row["stack"]),
        ),
    )


def _ratio_row(one: Finding, *, drawn: bool) -> dict[str, Any]:
    noise, words, kind = one.noise, difference_words(one.ratio), _KINDS[one.verdict]
    if noise is not None and one.ratio.shown and kind == "same":
        words = "no verdict: A/A pairs differ" if noise.ratio.shown else "no more than between A/A pairs"
    return {
        "id": one.id,
        "anchor": anchor_of("finding", *one.id.split("/")),
        "metric": one.metric.name,
        "title": one.metric.title,
        "unit": one.metric.unit,
        "better": one.metric.better,
        "stack": one.stack,
        "against": one.against,
        **ratio_document(one.ratio),
        "verdict": one.verdict,
        "kind": kind,
        "words": f"{words}: {kind}" if kind in {"better", "worse"} else words,
        "noise": None if noise is None else {**ratio_document(noise.ratio), "limit": finite(noise.limit)},
        "samples": list(one.samples),
        "drawn": drawn,
    }


def moment_families(
    samples: Sequence[Sample], metrics: Sequence[Mapping[str, Any]], *, anchor: str, seed: int
) -> list[dict[str, Any]]:
    """Return each figure that was taken at several moments, for every stack: medians, and ratios within each sample.

    Only headline figures are drawn and have intervals, corrected for their number: among dozens, one would always be
    shown. A figure of 0 has no ratio.
    """
    infos = {row["metric"]: row for row in metrics}
    found = families(infos)
    stacks = by_stack(samples)
    headlines = [names for names in found.values() if any(infos[name]["headline"] for name in names)]
    number = max(sum(len(names) - 1 for names in headlines) * len(stacks), 1)
    shown = []
    for names in found.values():
        headline = names in headlines
        comparisons = number if headline else None
        rows = [
            _moment_row(stack, ours, names, infos=infos, seed=seed, comparisons=comparisons)
            for stack, ours in stacks.items()
        ]
        rows = [row for row in rows if row]
        # Only the table of all figures shows a figure that is 0 everywhere.
        if not any(bar["median"] for row in rows for bar in row["bars"]):
            continue
        shown.append(
            {
                "family": names[0],
                "title": common_title([infos[name]["title"] for name in names]),
                "unit": infos[names[0]]["unit"],
                "better": infos[names[0]]["better"],
                "headline": headline,
                "metrics": names,
                "moments": moment_titles(names, [infos[name]["title"] for name in names]),
                "rows": [{**row, "anchor": anchor_of(anchor, names[0], row["stack"])} for row in rows],
            }
        )
    return sorted(shown, key=lambda one: not one["headline"])


def _moment_row(
    stack: str,
    samples: Sequence[Sample],
    names: Sequence[str],
    *,
    infos: Mapping[str, Mapping[str, Any]],
    seed: int,
    comparisons: int | None,
) -> dict[str, Any]:
    whole = [sample["metrics"] for sample in samples if all(name in sample["metrics"] for name in names)]
    if not whole:
        return {}
    bars = []
    for name in names:
        values = [float(metrics[name]) for metrics in whole]
        both = [(float(metrics[name]), float(metrics[names[0]])) for metrics in whole]
        bar = {"median": median(values), "values": values, "n": len(values)}
        bar |= {"ratio": None, "kind": "same", "words": ""}
        if name != names[0] and have_ratio(both):
            if comparisons is None:
                bar["ratio"] = {"text": number_words(median(later / first for later, first in both))}
            else:
                ratio = paired_ratio(both, seed=seed, comparisons=comparisons)
                bar["ratio"] = ratio_document(ratio)
                bar["kind"] = _KINDS[judge(ratio, infos[names[0]]["better"])]
                bar["words"] = difference_words(ratio)
        bars.append(bar)
    return {"stack": stack, "bars": bars}
