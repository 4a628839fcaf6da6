"""Builds the report's document; the page shows it and adds nothing."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from snapmgr.bench.report import figures
from snapmgr.bench.report.comparisons import moment_families, ratio_rows
from snapmgr.bench.report.figures import anchor_of, by_stack
from snapmgr.bench.report.method import interval_words, method
from snapmgr.bench.report.recommendation import recommendation
from snapmgr.bench.statistics.advice import Conditions
from snapmgr.bench.statistics.comparison import failure_of, groups
from snapmgr.bench.statistics.findings import findings
from snapmgr.bench.statistics.machine import device_words, facts, is_guest, is_loop, is_virtual, machine_words, telling
from snapmgr.bench.statistics.storages import guarantees
from snapmgr.bench.storage.stacks import STACKS
from snapmgr.contract.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from datetime import datetime

    from snapmgr.bench.statistics.comparison import Group, Sample
    from snapmgr.bench.statistics.findings import Finding

SCHEMA = 1
# The folders of an absolute path.
_FOLDERS = re.compile(r"(?<![^\s='\"(])/(?:[^\s/'\"]+/)+")
_COMMANDS, _CHARACTERS = 80, 1000
"""Commands of one sample, and characters of one command, in the report; only the sample lists thousands of calls."""
_CONTROLS = tuple(stack.name for stack in STACKS.values() if stack.backend is None)


def document(
    samples: Sequence[Sample],
    *,
    made_at: datetime,
    runs: Sequence[Mapping[str, Any]] = (),
    problems: Sequence[str] = (),
    title: str = "What snapshots cost here",
    questions: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    seed: int = 1,
) -> dict[str, Any]:
    """Return the report of some samples; the same samples give the same report.

    Args:
        samples: documents of samples, of one or of several runs.
        made_at: time shown in the report's head.
        runs: documents of the samples' runs.
        problems: sentences about result files that could not be read.
        title: headline of the report.
        questions: the question of each scenario (`Scenario.title`), by its name.
        labels: the few words for each scenario (`Scenario.label`), by its name.
        seed: seed of the bootstrap.
    """
    experiments = [_sorted(group) for group in groups(samples)]
    found = findings(samples, seed=seed)
    conditions = _conditions(samples)
    failed = [one for one in samples if one["kind"] != "absent" and failure_of(one)]
    stacks = dict.fromkeys(one["stack"] for one in samples)
    return {
        "schema": SCHEMA,
        "title": title,
        "subtitle": _subtitle(samples, made_at),
        "made_at": made_at.isoformat(),
        "warnings": _warnings(samples, experiments, failed, problems),
        "recommendation": recommendation(samples, found, conditions),
        "scenarios": [
            {
                **_scenario(group, found.found, runs, seed=seed),
                "question": (questions or {}).get(group.scenario, ""),
                "label": _labelled(group, labels or {}),
            }
            for group in experiments
            if group.counted
        ],
        "labels": {stack: (stack in STACKS and STACKS[stack].label) or stack for stack in stacks},
        "absent": [
            {"scenario": one["scenario"], "stack": one["stack"], "reason": one["failure"]}
            for one in samples
            if one["kind"] == "absent"
        ],
        "failed": [
            {"id": one["id"], "run": one["run"], "scenario": one["scenario"], "stack": one["stack"], "at": one["at"]}
            | {"kind": one["kind"], "reason": failure_of(one)}
            for one in failed
        ],
        "hosts": _hosts(samples),
        "interval": interval_words(samples),
        "method": method(samples, seed=seed),
        "runs": [dict(run) for run in runs],
        "examples": [_example(group) for group in experiments if group.counted],
    }


def _labelled(group: Group, labels: Mapping[str, str]) -> str:
    variant = group.counted[0]["variant"]
    return (labels.get(group.scenario) or group.scenario) + (f" ({variant})" if variant else "")


def _sorted(group: Group) -> Group:
    """Return the group with its stacks in their usual order."""
    rank = {name: number for number, name in enumerate(STACKS)}
    return replace(group, samples=tuple(sorted(group.samples, key=lambda one: rank.get(one["stack"], len(rank)))))


def _conditions(samples: Sequence[Sample]) -> Conditions:
    hosts = [members[0]["host"] for members in _by_host(samples)]
    measured = {one["stack"] for one in samples if one["kind"] == "measured"}
    return Conditions(
        loop=any(is_loop(host) for host in hosts),
        guest=any(is_guest(host) for host in hosts),
        steady=False if any(host.get("steady") is False for host in hosts) else None,
        controls=_CONTROLS,
        # Without snapshots a storage is never recommended: `absent` of the document says why it was not measured.
        absent={
            one["stack"]: one["failure"]
            for one in samples
            if one["kind"] == "absent" and one["stack"] not in measured.union(_CONTROLS)
        },
        failed=dict(_failed(samples)),
        mixed=len(hosts) > 1,
        guarantees=guarantees(samples),
    )


def _failed(samples: Iterable[Sample]) -> Iterator[tuple[str, str]]:
    """Yield each stack with failed samples, with their number and the last reason."""
    for stack, ours in by_stack([one for one in samples if one["kind"] != "absent"]).items():
        if why := [failure_of(one) for one in ours if failure_of(one)]:
            yield stack, f"{len(why)} of {_count(len(ours), 'sample')} failed, at last with: {why[-1].rstrip('.')}"


def _subtitle(samples: Sequence[Sample], made_at: datetime) -> str:
    hosts = [one["host"] for one in samples if one["host"]]
    where = f"On {device_words(hosts[0])}; {machine_words(hosts[0])}. " if hosts else ""
    counted = sum(1 for one in samples if one["kind"] == "measured" and not failure_of(one))
    return f"{where}{_count(counted, 'sample')}; {made_at:%Y-%m-%d %H:%M %Z}".rstrip()


def _warnings(
    samples: Sequence[Sample], experiments: Iterable[Group], failed: Sequence[Sample], problems: Sequence[str]
) -> list[dict[str, str]]:
    """Return the warnings for the reader: alarms first, then notes."""
    alarms, notes = [], []
    hosts = [members[0]["host"] for members in _by_host(samples)]
    if any(is_loop(host) for host in hosts):
        alarms.append(
            "Measured on a loop device: the file system below it was measured too. The figures are indicative, and "
            "carry no advice on a disk."
        )
    if len(hosts) > 1:
        alarms.append(
            "These samples come from machines, or from states of one, that differ (see Machine). Ratios are made "
            "within a run only; medians are of all."
        )
    alarms += [
        f"{group.name}: these samples have {len(group.parameters)} different sizes or settings, and are shown together."
        for group in experiments
        if len(group.parameters) > 1
    ]
    alarms += [f"Not read: {problem}" for problem in problems]
    if failed:
        made = sum(1 for one in samples if one["kind"] != "absent")
        notes.append(f"{len(failed)} of {made} samples failed and count for nothing: they are listed below.")
    if any(is_virtual(host) for host in hosts):
        notes.append(
            "Measured in a virtual machine: what its neighbours did at the time is in the latencies and in the noise."
        )
    return [{"level": "alarm", "text": text} for text in alarms] + [{"level": "note", "text": text} for text in notes]


def _scenario(
    group: Group, found: Iterable[Finding], runs: Sequence[Mapping[str, Any]], *, seed: int
) -> dict[str, Any]:
    counted = group.counted
    metrics = figures.metric_table(counted)
    anchor = anchor_of(group.name)
    stacks = list(by_stack(counted))
    baseline = _baseline(stacks, runs)
    ours = [one for one in found if one.experiment == group.name]
    scenario, variant = counted[0]["scenario"], counted[0]["variant"]
    return {
        "name": group.name,
        "scenario": scenario,
        "variant": variant,
        "anchor": anchor,
        "title": f"{scenario} ({variant})" if variant else scenario,
        "subtitle": _about(group, stacks),
        "parameters": [dict(parameters) for parameters in group.parameters],
        "stacks": stacks,
        "baseline": baseline,
        "ratios": ratio_rows(ours, baseline=baseline, stacks=stacks),
        "moments": moment_families(counted, metrics, anchor=anchor, seed=seed),
        "curves": figures.curves(counted),
        "timelines": figures.timelines(counted),
        "layouts": figures.layouts(counted),
        "metrics": metrics,
        "notes": _notes(counted),
    }


def _baseline(stacks: Sequence[str], runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the stack to draw the others against: the first one requested, else a control, else the first."""
    asked: list[str] = [stack for run in runs for stack in (run.get("arguments") or {}).get("stacks") or ()]
    return next(stack for stack in (*asked, *_CONTROLS, *stacks) if stack in stacks)


def _about(group: Group, stacks: Sequence[str]) -> str:
    counted = group.counted
    kinds = Counter(one["kind"] for one in group.samples)
    blocks = len({(one["run"], one["block"]) for one in counted})
    twins = f", {_count(kinds['a/a'], 'A/A sample')}" if kinds["a/a"] else ", no A/A samples"
    parameters = group.parameters[0]
    size = f"{format_size(int(parameters['size_bytes']))} of data, " if parameters.get("size_bytes") else ""
    return (
        f"{size}profile {parameters.get('profile', 'unknown')}: {_count(len(counted), 'sample')} in "
        f"{_count(blocks, 'block')} on "
        f"{', '.join(stacks)}{twins}."
    )


def _notes(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return the notes of the samples, each once, with its stacks, its number of samples, and the total number.

    Notes that differ in nothing but folders are one, because each sample has a folder of its own.
    """
    rows: dict[str, dict[str, Any]] = {}
    for stack, ours in by_stack(samples).items():
        said = [{_FOLDERS.sub("…/", note): note for note in one["notes"]} for one in ours]
        for key, n in Counter(key for notes in said for key in notes).items():
            text = next(notes[key] for notes in said if key in notes)
            row = rows.setdefault(key, {"stacks": [], "text": text, "n": 0, "of": 0})
            if any(notes.get(key, row["text"]) != row["text"] for notes in said):
                row["text"] = key
            row["stacks"].append(stack)
            row["n"] += n
            row["of"] += len(ours)
    return list(rows.values())


def _by_host(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Return the samples of each machine; one whose relevant facts change counts as another."""
    found: dict[str, list[Sample]] = {}
    for one in samples:
        # A sample that could not run says nothing about the machine of the others.
        if one["host"] and one["kind"] != "absent":
            found.setdefault(json.dumps(telling(one["host"]), sort_keys=True), []).append(one)
    return list(found.values())


def _hosts(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    return [
        {
            "n": len(members),
            "runs": list(dict.fromkeys(one["run"] for one in members)),
            "words": _sentence(f"{device_words(members[0]['host'])}; {machine_words(members[0]['host'])}"),
            "facts": members[0]["host"],
            "lines": facts(members[0]["host"]),
        }
        for members in _by_host(samples)
    ]


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _example(group: Group) -> dict[str, Any]:
    """Return the commands of one sample of each stack, so that anyone can repeat them manually."""
    firsts = [ours[0] for ours in by_stack(group.counted).values()]
    # Most job files are the same on all stacks.
    jobs: dict[tuple[str, str], list[str]] = {}
    for one in firsts:
        for name, text in one["jobs"].items():
            jobs.setdefault((name, text), []).append(one["stack"])
    return {
        "experiment": group.name,
        "parameters": dict(firsts[0]["parameters"]),
        "jobs": [{"name": name, "text": text, "stacks": stacks} for (name, text), stacks in jobs.items()],
        "stacks": [
            {
                "stack": one["stack"],
                "id": one["id"],
                "commands": [_command(command) for command in one["commands"][:_COMMANDS]],
                "more": max(len(one["commands"]) - _COMMANDS, 0),
                "provisioned": dict(one["provisioned"]),
            }
            for one in firsts
        ],
    }


def _command(command: str | Sequence[str]) -> str:
    text = command if isinstance(command, str) else shlex.join(map(str, command))
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]} … ({len(text)} characters, see the sample)"
