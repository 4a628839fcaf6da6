"""Recommends a storage, with reasons, costs, and differences that were not shown. A pure function of the findings.

A stack is recommended if, compared with each other stack that has snapshots, it is shown better in at least one
headline metric and shown worse in none. At most one stack meets this, and often none does; then the text names the best
stack for each metric. Nothing is recommended if no difference was shown, for fewer than `LEAST_PAIRS` pairs, on a loop
device, in a guest, or for samples from different machines. A stack with a failed sample is not recommended either: its
figures come from the remaining samples, and a storage that sometimes loses snapshots or runs full may well be fastest.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING

from snapmgr.bench.statistics.comparison import interval_words, number_words, ratio_words
from snapmgr.bench.statistics.ratio import LEAST_PAIRS, Ratio

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from snapmgr.bench.statistics.findings import Finding


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Facts about the measured machine that limit the advice."""

    loop: bool
    """Whether the target is a loop device."""
    guest: bool
    """Whether the target is a host's file, seen from a guest."""
    steady: bool | None = None
    """Whether the device was brought to a steady state; None if that is unnecessary (a spinning disk)."""
    controls: Collection[str] = ()
    """Stacks without snapshots: they show the cost of snapshots, and are never recommended."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Stacks that could not be measured, and why."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Stacks with failed samples, with number and reason: "3 of 12 samples failed, at last with: …"."""
    mixed: bool = False
    """Whether the samples come from different machines, or from different states of one."""


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """One statement and its evidence."""

    text: str
    evidence: tuple[str, ...] = ()
    """Ids of findings; empty for a statement about the machine."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The beginning of the report."""

    recommended: str | None
    sentences: tuple[Sentence, ...]
    """The first sentence gives the recommendation, or says that nothing is recommended."""
    costs: tuple[Sentence, ...] = ()
    """Costs of the recommended stack, compared with the controls."""
    not_shown: tuple[Sentence, ...] = ()
    caveats: tuple[Sentence, ...] = ()
    """Limits of the advice: noise, a device that is not steady, absent stacks."""


def advise(findings: Sequence[Finding], conditions: Conditions) -> Advice:
    """Given the findings of a run, after correction for their number, return the advice."""
    candidates = sorted({stack for one in findings for stack in (one.stack, one.against)} - set(conditions.controls))
    among = [one for one in findings if one.stack in candidates and one.against in candidates]
    not_shown, caveats = _not_shown(among), _caveats(findings, conditions)
    if refusal := _refusal(among, candidates, conditions):
        return Advice(recommended=None, sentences=(refusal,), not_shown=not_shown, caveats=caveats)
    best = next((stack for stack in candidates if _leads(stack, candidates, among)), None)
    if best is None:
        return Advice(
            recommended=None,
            sentences=(_no_leader(among), *_strengths(candidates, among), *_beaten(candidates, among)),
            not_shown=not_shown,
            caveats=caveats,
        )
    reasons = [_comparison(best, other, _better(best, other, among)) for other in candidates if other != best]
    if best in conditions.failed:
        evidence = tuple(id_ for one in reasons for id_ in one.evidence)
        text = f"No advice: {best} leads where it was measured, but {conditions.failed[best]}."
        return Advice(
            recommended=None,
            sentences=(Sentence(text=text, evidence=evidence), *reasons),
            not_shown=not_shown,
            caveats=caveats,
        )
    headline = Sentence(text=f"For this disk: {best}.", evidence=tuple(id_ for one in reasons for id_ in one.evidence))
    costs = [one.seen_from(best) for one in findings if best in {one.stack, one.against} and one not in among]
    return Advice(
        recommended=best,
        sentences=(headline, *reasons),
        costs=tuple(
            Sentence(
                text=f"{_what(one)}: {_times(one.ratio)} that of {one.against}, without snapshots.", evidence=(one.id,)
            )
            for one in costs
            if one.verdict == "worse"
        ),
        not_shown=not_shown,
        caveats=caveats,
    )


def _refusal(among: Sequence[Finding], candidates: Sequence[str], conditions: Conditions) -> Sentence | None:
    """Return why advice is impossible, whatever the results."""
    if conditions.loop:
        return Sentence(
            text="No advice: the target is a loop device, a file on another file system, which is measured too. "
            "The results are indicative."
        )
    if conditions.guest:
        return Sentence(
            text="No advice: this is a guest whose disk is a file of its host. Byte counts and ratios of operations "
            "are indicative; latencies are the host's."
        )
    if conditions.mixed:
        return Sentence(text="No advice: the samples come from machines, or from states of one, that differ.")
    if len(candidates) < 2:  # noqa: PLR2004 - a comparison takes two
        return Sentence(text="No advice: fewer than two stacks with snapshots were compared.")
    pairs = max((one.ratio.n for one in among), default=0)
    if pairs < LEAST_PAIRS:
        return Sentence(
            text=f"No advice: there are {pairs} blocks, and below {LEAST_PAIRS} nothing is said to differ.",
            evidence=tuple(one.id for one in among),
        )
    return None


def _better(stack: str, other: str, among: Iterable[Finding]) -> list[Finding]:
    """Return the findings that show `stack` better than `other`, seen from `stack`."""
    return [
        one.seen_from(stack)
        for one in among
        if {one.stack, one.against} == {stack, other} and one.seen_from(stack).verdict == "better"
    ]


def _leads(stack: str, candidates: Sequence[str], among: Sequence[Finding]) -> bool:
    return all(
        _better(stack, other, among) and not _better(other, stack, among) for other in candidates if other != stack
    )


def _no_leader(among: Sequence[Finding]) -> Sentence:
    shown = tuple(one.id for one in among if one.verdict in {"better", "worse"})
    if not shown:
        return Sentence(text="No advice: no difference was shown.", evidence=tuple(one.id for one in among))
    return Sentence(
        text="No advice for all uses: no stack is shown better than every other one and worse in no metric.",
        evidence=shown,
    )


def _strengths(candidates: Sequence[str], among: Sequence[Finding]) -> list[Sentence]:
    """Return for each metric the stack that is shown better than all the others, if there is one."""
    sentences = []
    for ours in _by_metric(among):
        for stack in candidates:
            others = [other for other in candidates if other != stack]
            wins = [_better(stack, other, ours) for other in others]
            if all(wins):
                text = ", ".join(f"{_times(one.ratio)} that of {one.against}" for win in wins for one in win)
                evidence = tuple(one.id for win in wins for one in win)
                sentences.append(Sentence(text=f"Best in {_what(ours[0])}: {stack} ({text}).", evidence=evidence))
    return sentences


def _beaten(candidates: Sequence[str], among: Sequence[Finding]) -> list[Sentence]:
    """Return a sentence for each pair in which one stack is better in something and the other in nothing."""
    sentences = []
    for first, second in combinations(candidates, 2):
        for stack, other in ((first, second), (second, first)):
            wins = _better(stack, other, among)
            if wins and not _better(other, stack, among):
                sentences.append(_comparison(stack, other, wins))
    return sentences


def _comparison(stack: str, other: str, wins: Sequence[Finding]) -> Sentence:
    text = "; ".join(f"{_what(one)}: {_times(one.ratio)} that of {other}" for one in wins)
    return Sentence(
        text=f"{stack} is shown better than {other}, and worse in no metric: {text}.",
        evidence=tuple(one.id for one in wins),
    )


def _not_shown(among: Sequence[Finding]) -> tuple[Sentence, ...]:
    sentences = []
    for ours in _by_metric(among):
        equal = [one for one in ours if one.verdict == "not shown"]
        if equal:
            pairs = "; ".join(f"{one.stack} and {one.against} {ratio_words(one.ratio)}" for one in equal)
            text = f"{_what(ours[0])}: no difference shown between {pairs}."
            sentences.append(Sentence(text=text, evidence=tuple(one.id for one in equal)))
    return tuple(sentences)


def _caveats(findings: Sequence[Finding], conditions: Conditions) -> tuple[Sentence, ...]:
    sentences = []
    if conditions.steady is False:
        text = "The device was not brought to a steady state: under lasting writes the figures may be others."
        sentences.append(Sentence(text=text))
    for ours in _by_metric(findings):
        noise, ids = ours[0].noise, tuple(one.id for one in ours)
        if noise is None:
            text = f"{_what(ours[0])}: fewer than {LEAST_PAIRS} A/A pairs, so that the machine's noise is not known."
            sentences.append(Sentence(text=text, evidence=ids))
        elif noise.ratio.shown:
            text = (
                f"{_what(ours[0])}: the same stack, measured twice, is shown to differ, {ratio_words(noise.ratio)}. "
                "Something else than the storage decides there; nothing is concluded from it."
            )
            sentences.append(Sentence(text=text, evidence=ids))
    sentences += [
        Sentence(text=f"{stack}: {why}. They count for nothing.") for stack, why in sorted(conditions.failed.items())
    ]
    sentences += [Sentence(text=f"Not compared: {stack}: {why}") for stack, why in sorted(conditions.absent.items())]
    return tuple(sentences)


def _by_metric(findings: Iterable[Finding]) -> list[list[Finding]]:
    groups: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for one in findings:
        groups[one.experiment, one.metric.name].append(one)
    return list(groups.values())


def _what(finding: Finding) -> str:
    return f"{finding.metric.title} ({finding.experiment})"


def _times(ratio: Ratio) -> str:
    return f"{number_words(ratio.value)} times ({interval_words(ratio.low, ratio.high)})"
