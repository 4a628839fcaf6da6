"""Compares our samples with the published experiments: which conclusions hold here, fail, or are not shown. Pure."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from snapmgr.bench.published.figures import CLAIMS, STALLS, Claim, Side, StallClaim
from snapmgr.bench.statistics import verdict
from snapmgr.bench.statistics.comparison import by_block, groups, interval_words, pairs, ratio_document
from snapmgr.bench.statistics.findings import noise_of
from snapmgr.bench.statistics.machine import is_guest, is_loop, is_rotational
from snapmgr.bench.statistics.ratio import LEAST_PAIRS, LEVEL, Ratio, have_ratio, paired_ratio
from snapmgr.contract.units import format_quantity
from snapmgr.system.host import regression_side

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from snapmgr.bench.statistics.comparison import Group, Sample
    from snapmgr.bench.statistics.ratio import Noise

Verdict = Literal["holds", "does not hold", "not shown", "not measured"]
_PUBLISHED_VARIANTS = ("printed", "repaired")
# A ratio between 1/1.1 and 1.1 counts as equal.
_ALIKE = 1.1


def compare_published(samples: Sequence[Sample], *, seed: int = 1) -> dict[str, Any]:
    """Return the published figures beside ours as a document that can be written as JSON.

    {"schema", "level", "comparisons", "rows": […], "counts": {verdict: rows}}. A row: {"key", "experiment" ("" if it
    was not measured), "title", "over" and "under" ({"words", "stack", "metric", "value"}), "unit",
    "published": [low, high], "published_text", "ours" (see `comparison.ratio_document`; None), "ours_text", "verdict",
    "words", "conclusion", "measured_on", "obstacles": [why not comparable…], "remark"}. A count of stalls has one side
    and no ratio. A claim has a row for each variant that was measured. The level is for all intervals together.
    """
    experiments = groups(samples)
    wanted = [(claim, group) for claim in CLAIMS for group in _of(claim.scenario, experiments)]
    measured = [(claim, group, both) for claim, group in wanted if (both := _pairs(claim, group))]
    stalls = [
        (stall, group, counts)
        for stall in STALLS
        for group in _of(stall.scenario, experiments)
        if (counts := _stalls(stall, group))
    ]
    comparisons = max(sum(1 for _, _, both in measured if have_ratio(both)) + len(stalls), 1)
    rows = []
    for claim in CLAIMS:
        ours = [(group, both) for one, group, both in measured if one is claim]
        rows += [_judged(claim, group, both, comparisons=comparisons, seed=seed) for group, both in ours]
        if not ours:
            rows.append(_row(claim, None, None, "not measured", _why_not(claim, _of(claim.scenario, experiments))))
    for stall in STALLS:
        error = (1 - LEVEL) / comparisons
        having = [_stalled(stall, group, counts, error=error) for one, group, counts in stalls if one is stall]
        rows += having or [_stalled(stall, None, [])]
    verdicts = [row["verdict"] for row in rows]
    return {
        "schema": 1,
        "level": LEVEL,
        "comparisons": comparisons,
        "rows": rows,
        "counts": {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)},
    }


def _of(scenario: str, experiments: Iterable[Group]) -> list[Group]:
    return [group for group in experiments if group.scenario == scenario and group.counted]


def _pairs(claim: Claim, group: Group) -> list[tuple[float, float]]:
    counted = group.counted
    return pairs(
        by_block(counted, claim.over.stack, claim.over.metric), by_block(counted, claim.under.stack, claim.under.metric)
    )


def _judged(
    claim: Claim, group: Group, both: Sequence[tuple[float, float]], *, comparisons: int, seed: int
) -> dict[str, Any]:
    if not have_ratio(both):
        less = sum(1 for over, under in both if over < under)
        words = f"a figure is 0: there is no ratio; {claim.over.words} has less in {less} of {len(both)} pairs"
        return _row(claim, group, None, "not shown", words)
    ratio = paired_ratio(both, seed=seed, comparisons=comparisons)
    alike = claim.over.metric == claim.under.metric
    noise = noise_of(group.samples, claim.over.metric, seed=seed) if alike else None
    return _row(claim, group, ratio, *judge(claim.ratio, ratio, noise=noise))


def judge(published: tuple[float, float], ours: Ratio, *, noise: Noise | None = None) -> tuple[Verdict, str]:
    """Given a published ratio (or the ends of its range), ours and its noise, return the verdict and its extent.

    The claim holds if our ratio is shown to be on the same side of 1, whatever its size. It fails if our ratio is shown
    to be on the other side, or close to 1 and different from the published one.
    """
    if ours.n < LEAST_PAIRS:
        return "not shown", f"too few pairs to say: {ours.n} of {LEAST_PAIRS}"
    if not ours.shown:
        excluded = not (ours.low <= published[1] and published[0] <= ours.high)
        farthest = max(ours.high, 1 / ours.low) if ours.low > 0 else math.inf
        if excluded and farthest <= _ALIKE:
            return "does not hold", f"no difference of more than {farthest - 1:.0%}"
        return "not shown", "no difference shown" + (", and not the published one" if excluded else "")
    if verdict.judge(ours, "neither", noise=noise) == "not shown":
        return "not shown", "no more than between A/A pairs"
    return _judge_shown(published, ours)


def _judge_shown(published: tuple[float, float], ours: Ratio) -> tuple[Verdict, str]:
    middle = math.sqrt(published[0] * published[1])
    if (ours.value > 1) != (middle > 1):
        return "does not hold", "shown to be the other way round"
    if ours.low <= published[1] and published[0] <= ours.high:
        return "holds", "as much as published"
    farther = abs(math.log(ours.value)) > abs(math.log(middle))
    return "holds", "more than published" if farther else "less than published"


def _stalls(stall: StallClaim, group: Group) -> list[tuple[int, int, int]]:
    """Return each sample's numbers of intervals without a write after and before the snapshot, and of all intervals."""
    found = []
    for sample in group.counted:
        if sample["stack"] != stall.stack:
            continue
        moments = [
            [
                sample["series"][name]
                for name in (curve.replace("*", moment) for curve in stall.curves)
                if name in sample["series"]
            ]
            for moment in ("after", "before")
        ]
        if all(moments):
            empty = [_without(curves, stall.interval_s) for curves in moments]
            found.append((empty[0].count(True), empty[1].count(True), min(map(len, empty))))
    return found


def _without(curves: Sequence[Sequence[float]], interval_s: int) -> list[bool]:
    """Given the work of each second, return for each whole interval whether it was idle."""
    each = [sum(second) for second in zip(*curves, strict=False)]
    return [not any(each[at : at + interval_s]) for at in range(0, len(each) - interval_s + 1, interval_s)]


def _stalled(
    stall: StallClaim, group: Group | None, counts: Sequence[tuple[int, int, int]], *, error: float = 1.0
) -> dict[str, Any]:
    """Return the row of a count of stalls; it holds if more are shown after the snapshot than before (sign test)."""
    more = sum(1 for after, before, _ in counts if after > before)
    fewer = sum(1 for after, before, _ in counts if after < before)
    verdict: Verdict = "not measured"
    words, ours = f"no sample of {stall.scenario} on {stall.stack}", "–"
    if counts:
        chance = sum(math.comb(more + fewer, k) for k in range(max(more, fewer), more + fewer + 1))
        clear = 2 * chance / 2 ** (more + fewer) <= error
        verdict = ("holds" if more > fewer else "does not hold") if clear else "not shown"
        after, before, whole = (sum(count[at] for count in counts) for at in range(3))
        words = f"before the snapshot {before} of {whole}; more of them after it in {more} of {len(counts)} samples"
        ours = f"{after} of {whole} intervals of {stall.interval_s} s"
    side = Side(words=stall.stack, stack=stall.stack, metric=stall.curves[0], value=float(stall.stalled))
    figures = {
        "over": asdict(side),
        "under": None,
        "unit": "",
        "published": None,
        "published_text": f"{stall.stalled} of {stall.intervals}",
        "ours": None,
        "ours_text": ours,
    }
    return _document(stall, group, figures, verdict, words)


def _row(claim: Claim, group: Group | None, ratio: Ratio | None, verdict: Verdict, words: str) -> dict[str, Any]:
    ours = None if ratio is None else ratio_document(ratio)
    figures = {
        "over": asdict(claim.over),
        "under": asdict(claim.under),
        "unit": claim.unit,
        "published": list(claim.ratio),
        "published_text": _published_text(claim),
        "ours": ours,
        "ours_text": ours["text"] if ours else "–",
    }
    return _document(claim, group, figures, verdict, words)


def _document(
    claim: Claim | StallClaim, group: Group | None, figures: Mapping[str, Any], verdict: Verdict, words: str
) -> dict[str, Any]:
    return {
        "key": claim.key,
        "experiment": group.name if group else "",
        "title": claim.title,
        **figures,
        "verdict": verdict,
        "words": words,
        "conclusion": claim.conclusion,
        "measured_on": claim.measured_on,
        "obstacles": obstacles(claim, group) if group else [],
        "remark": claim.remark,
    }


def _published_text(claim: Claim) -> str:
    """Return "1.75 (3 min 22 s ÷ 1 min 55 s)", "0.20–0.70"."""
    low, high = claim.ratio
    text = interval_words(low, high)
    if claim.over.value is None or claim.under.value is None:
        return text
    values = (format_quantity(side.value, claim.unit) for side in (claim.over, claim.under) if side.value is not None)
    return f"{text} ({' ÷ '.join(values)})"


def _why_not(claim: Claim, experiments: Sequence[Group]) -> str:
    if not claim.over.metric:
        return "no scenario measures this figure alone"
    if not experiments:
        return f"no sample of {claim.scenario}"
    absent = [
        side.stack
        for side in (claim.over, claim.under)
        if not any(by_block(group.counted, side.stack, side.metric) for group in experiments)
    ]
    stacks = " and ".join(dict.fromkeys(absent))
    return f"no sample of {claim.scenario} on {stacks} with that figure" if stacks else "no block has both"


def obstacles(claim: Claim | StallClaim, group: Group) -> list[str]:
    """Return the reasons why our figure is not comparable with the published one; empty if none is known."""
    hosts = [sample["host"] for sample in group.counted]
    variant, parameters = group.counted[0]["variant"], group.parameters[0]
    found = []
    for want in claim.wants:
        if want == "published variant" and variant not in _PUBLISHED_VARIANTS:
            found.append(f"the variant {variant!r} is not the published one")
        elif want == "real device" and any(map(is_loop, hosts)):
            found.append("a loop device: the file system below it is measured too")
        elif want == "real device" and any(map(is_guest, hosts)):
            found.append("a guest whose disk is a host's file")
        elif want == "spinning disk" and not all(is_rotational(host) for host in hosts):
            found.append("not a spinning disk")
        elif want == "solid-state disk" and not all(is_rotational(host) is False for host in hosts):
            found.append("not a solid-state disk")
        elif want == "regressed kernel" and not all(map(_regressed, hosts)):
            found.append("ext4's regression is in kernels 4.9 to 5.5 only")
    size = parameters.get("size_bytes")
    if size and parameters.get("profile") != "paper":
        found.append(f"{format_quantity(size, 'B')} of data")
    return found


def _regressed(host: Mapping[str, Any]) -> bool:
    try:
        return regression_side(str(host.get("kernel"))) == "within"
    except ValueError:
        # It does not report its version.
        return False
