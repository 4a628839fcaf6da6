"""Recommends a storage for a use, with reasons, guarantees, costs, and differences that were not shown.

A pure function of the findings. A use (`USES`) is a set of scenarios; each has its own advice.

A stack is recommended if, compared with each other stack that has snapshots, it is shown better in at least one
headline metric and shown worse in none. At most one stack meets this, and often none does; then the text names the best
stack for each metric. The *order* puts every stack before those that it is shown better than in something, and worse
than in nothing. Nothing is recommended if no difference was shown, for fewer than `LEAST_PAIRS` pairs, or for samples
from different machines. On a loop device and in a guest the same order is *indicative*: nothing is recommended. A stack
with a failed sample is not recommended either: its figures come from the remaining samples, and a storage that
sometimes loses snapshots or runs full may well be fastest.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Literal

from snapmgr.bench.statistics.comparison import interval_words, number_words, ratio_words
from snapmgr.bench.statistics.ratio import LEAST_PAIRS, Ratio
from snapmgr.bench.statistics.uses import Use, guarantee_words

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from snapmgr.bench.statistics.findings import Finding
    from snapmgr.contract.records import Capabilities

Sureness = Literal["shown", "indicative", "none"]


_ALL = Use(title="this disk", scenarios=())


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
    guarantees: Mapping[str, Capabilities] = field(default_factory=dict)
    """What the backend of each stack promises of its snapshots, where it was asked."""


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """One statement and its evidence."""

    text: str
    evidence: tuple[str, ...] = ()
    """Ids of findings; empty for a statement about the machine."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The beginning of the report, for one use."""

    recommended: str | None
    sentences: tuple[Sentence, ...]
    """The first sentence gives the recommendation or the indicative order, or says that nothing is recommended."""
    sure: Sureness = "none"
    """"shown": differences were shown, on a disk; "indicative": shown, but on a loop device or in a guest; "none"."""
    order: tuple[tuple[str, ...], ...] = ()
    """Stacks with snapshots, the best first; those that no order was shown between stand together."""
    guarantees: tuple[Sentence, ...] = ()
    """What a snapshot on the first of the order promises, and what it asks of a running server."""
    avoid: tuple[Sentence, ...] = ()
    """Stacks that another one is shown better than, and those that failed."""
    costs: tuple[Sentence, ...] = ()
    """Costs of the first of the order, compared with the controls."""
    not_shown: tuple[Sentence, ...] = ()
    confidence: tuple[Sentence, ...] = ()
    """How much was compared, and how often a difference was shown."""
    caveats: tuple[Sentence, ...] = ()
    """Limits of the advice: noise, a device that is not steady, absent stacks."""


def advise(findings: Sequence[Finding], conditions: Conditions, *, use: Use = _ALL) -> Advice:
    """Given the findings of a run about one use, after correction for their number, return the advice."""
    candidates = sorted({stack for one in findings for stack in (one.stack, one.against)} - set(conditions.controls))
    among = [one for one in findings if one.stack in candidates and one.against in candidates]
    not_shown, caveats = _not_shown(among), _caveats(findings, conditions)
    if refusal := _refusal(among, candidates, conditions):
        return Advice(recommended=None, sentences=(refusal,), not_shown=not_shown, caveats=caveats)
    order = _order(candidates, among)
    shown = any(one.verdict in {"better", "worse"} for one in among)
    indicative = conditions.loop or conditions.guest
    best = next((stack for stack in candidates if _leads(stack, candidates, among)), None)
    recommended = best if best not in conditions.failed and not indicative else None
    return Advice(
        recommended=recommended,
        sentences=_lead(best, order, candidates, among, conditions, use),
        sure="none" if not shown else "indicative" if indicative else "shown",
        order=order,
        guarantees=_guarantees(order, conditions, use) if shown else (),
        avoid=_avoid(order, among, conditions) if shown else (),
        costs=_costs([recommended] if recommended else order[0] if shown and indicative else [], findings, conditions),
        not_shown=not_shown,
        confidence=_confidence(among, conditions),
        caveats=caveats,
    )


def _lead(  # noqa: PLR0917 - all of it decides
    best: str | None,
    order: Sequence[Sequence[str]],
    candidates: Sequence[str],
    among: Sequence[Finding],
    conditions: Conditions,
    use: Use,
) -> tuple[Sentence, ...]:
    """Return the first sentence and its reasons."""
    reasons: list[Sentence]
    if best is not None:
        reasons = [_comparison(best, other, _better(best, other, among)) for other in candidates if other != best]
    else:
        reasons = [*_strengths(candidates, among), *_beaten(candidates, among)]
    evidence = tuple(dict.fromkeys(id_ for one in reasons for id_ in one.evidence))
    if conditions.loop or conditions.guest:
        where = (
            "the target is a loop device, a file on another file system, which is measured too"
            if conditions.loop
            else "this is a guest whose disk is a file of its host"
        )
        if not evidence:
            return (Sentence(text=f"No advice: no difference was shown, and {where}."),)
        what = order_words(order) if len(order) > 1 else "no storage was shown to be the better one"
        return Sentence(text=f"Indicative, for {use.title}: {what}. No advice: {where}.", evidence=evidence), *reasons
    if best is None:
        return _no_leader(among, use), *reasons
    if best in conditions.failed:
        text = f"No advice: {best} leads where it was measured, but {conditions.failed[best]}."
        return Sentence(text=text, evidence=evidence), *reasons
    return Sentence(text=f"For {use.title}: {best}.", evidence=evidence), *reasons


def _order(candidates: Sequence[str], among: Sequence[Finding]) -> tuple[tuple[str, ...], ...]:
    """Return the stacks by how many others each beats, less how many beat it; equal ones stand together."""
    places: dict[int, list[str]] = defaultdict(list)
    for stack in candidates:
        beaten = [
            bool(_better(stack, other, among)) - bool(_better(other, stack, among))
            for other in candidates
            if bool(_better(stack, other, among)) != bool(_better(other, stack, among))
        ]
        places[-sum(beaten)].append(stack)
    return tuple(tuple(places[score]) for score in sorted(places))


def order_words(order: Sequence[Sequence[str]]) -> str:
    """Return "1. btrfs; 2. lvm+ext4, lvm-thin+xfs"."""
    return "; ".join(f"{place}. {', '.join(stacks)}" for place, stacks in enumerate(order, 1))


def _guarantees(order: Sequence[Sequence[str]], conditions: Conditions, use: Use) -> tuple[Sentence, ...]:
    """Return what the first stacks promise, and, for a server, the first that needs no frozen process."""
    known = conditions.guarantees
    sentences = [
        Sentence(text=f"{stack}: {guarantee_words(known[stack], server=use.server)}.")
        for stack in order[0]
        if stack in known
    ]
    if use.server and all(stack in known and known[stack].atomicity == "file" for stack in order[0]):
        whole = next(
            (
                atomic
                for stacks in order[1:]
                if (atomic := [stack for stack in stacks if stack in known and known[stack].atomicity == "volume"])
            ),
            [],
        )
        if whole:
            text = f"Without freezing the server, the first in this order: {', '.join(whole)}."
            sentences.append(Sentence(text=text))
    return tuple(sentences)


def _avoid(order: Sequence[Sequence[str]], among: Sequence[Finding], conditions: Conditions) -> tuple[Sentence, ...]:
    """Return with reasons the stacks with failed samples, and those that another one is shown better than."""
    ranked = [stack for stacks in order for stack in stacks]
    sentences = [
        Sentence(text=f"{stack}: {why}.") for stack, why in sorted(conditions.failed.items()) if stack in ranked
    ]
    for stack in ranked:
        better = next((one for one in ranked if _better(one, stack, among) and not _better(stack, one, among)), None)
        beats = [one for one in ranked if _better(stack, one, among) and not _better(one, stack, among)]
        if better is not None and not beats:
            wins = [one.seen_from(stack) for one in _better(better, stack, among)]
            text = "; ".join(f"{_what(one)}: {_times(one.ratio)} that of {better}" for one in wins)
            sentences.append(
                Sentence(text=f"{stack}: {text}; better in nothing.", evidence=tuple(one.id for one in wins))
            )
    return tuple(sentences)


def _costs(stacks: Sequence[str], findings: Sequence[Finding], conditions: Conditions) -> tuple[Sentence, ...]:
    """Return the costs of some stacks, compared with the controls."""
    sentences = []
    for stack in stacks:
        for one in findings:
            if {stack} == {one.stack, one.against} - set(conditions.controls):
                seen = one.seen_from(stack)
                if seen.verdict == "worse":
                    text = f"{_what(seen)}: {_times(seen.ratio)} that of {seen.against}, without snapshots."
                    whose = f"{stack}: " if len(stacks) > 1 else ""
                    sentences.append(Sentence(text=whose + text, evidence=(seen.id,)))
    return tuple(sentences)


def _confidence(among: Sequence[Finding], conditions: Conditions) -> tuple[Sentence, ...]:
    shown = [one for one in among if one.verdict != "not shown"]
    pairs = sorted({one.ratio.n for one in among})
    blocks = f"{pairs[0]} to {pairs[-1]}" if len(pairs) > 1 else str(pairs[0])
    text = (
        f"A difference was shown in {len(shown)} of {len(among)} comparisons of {blocks} blocks each; 95 % of all such "
        "reports have no false one."
    )
    sentences = [Sentence(text=text)]
    if conditions.loop or conditions.guest:
        sentences.append(Sentence(text="On a disk the order may be another one."))
    return tuple(sentences)


def _refusal(among: Sequence[Finding], candidates: Sequence[str], conditions: Conditions) -> Sentence | None:
    """Return why advice is impossible, whatever the results."""
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


def _no_leader(among: Sequence[Finding], use: Use) -> Sentence:
    shown = tuple(one.id for one in among if one.verdict in {"better", "worse"})
    if not shown:
        return Sentence(text="No advice: no difference was shown.", evidence=tuple(one.id for one in among))
    return Sentence(
        text=f"No single storage for {use.title}: none is shown better than every other one and worse in no metric.",
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
