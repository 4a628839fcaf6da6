"""Makes the first part of the report: the advice for each use, and a row for each storage."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from snapmgr.bench.statistics.advice import advise
from snapmgr.bench.statistics.comparison import ratio_document, ratio_words
from snapmgr.bench.statistics.storages import storage_rows
from snapmgr.bench.statistics.uses import USES, use_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr.bench.statistics.advice import Advice, Conditions, Sentence
    from snapmgr.bench.statistics.comparison import Sample
    from snapmgr.bench.statistics.findings import Finding, Findings
    from snapmgr.bench.statistics.storages import StorageRow
    from snapmgr.bench.statistics.uses import Use


def recommendation(samples: Sequence[Sample], found: Findings, conditions: Conditions) -> dict[str, Any]:
    """Return the advice, with links from each sentence to the findings that support it, and the rows of all storages.

    `uses` has the advice for each use that was measured; `chosen` and `sentences` are those of all uses together.
    """
    measured = {use_of(one["scenario"]) for one in samples if one["kind"] != "absent"} or {"oltp"}
    uses: list[dict[str, Any]] = []
    for name, use in USES.items():
        if name in measured:
            ours = [one for one in found.found if use_of(one.experiment.split()[0]) == name]
            uses.append(
                {
                    "use": name,
                    "scenarios": list(use.scenarios),
                    **_advice(advise(ours, conditions, use=use), use.title),
                    "without": _without(ours, conditions, use),
                }
            )
    sentences = {str(one): one for use in uses for one in use["sentences"]}
    problems = [{"kind": "limits", "text": text, "evidence": []} for text in found.problems]
    return {
        "chosen": uses[0]["chosen"],
        "sentences": [*sentences.values(), *problems],
        "problems": list(found.problems),
        "uses": uses,
        "storages": [_storage(row) for row in storage_rows(samples, found.found, controls=conditions.controls)],
    }


def _without(ours: Sequence[Finding], conditions: Conditions, use: Use) -> dict[str, Any] | None:
    """Return the advice among the storages without snapshots; None if there are not two, or if the use needs some."""
    among = [one for one in ours if {one.stack, one.against} <= set(conditions.controls)]
    if not among or not use.without:
        return None
    alone = replace(conditions, controls=(), absent={}, failed={})
    return _advice(advise(among, alone, use=replace(use, title=use.without, server=False)), use.without)


def _advice(advice: Advice, title: str) -> dict[str, Any]:
    return {
        "title": title,
        "chosen": advice.recommended,
        "sure": advice.sure,
        "order": [list(stacks) for stacks in advice.order],
        "sentences": _sentences(advice),
    }


def _sentences(advice: Advice) -> list[dict[str, Any]]:
    parts: list[tuple[str, Sequence[Sentence]]] = [
        ("lead", advice.sentences[:1]),
        ("guarantee", advice.guarantees),
        ("because", advice.sentences[1:]),
        ("avoid", advice.avoid),
        ("costs", advice.costs),
        ("not shown", advice.not_shown),
        ("confidence", advice.confidence),
        ("limits", advice.caveats),
    ]
    return [{"kind": kind, "text": one.text, "evidence": list(one.evidence)} for kind, said in parts for one in said]


def _storage(row: StorageRow) -> dict[str, Any]:
    return {
        "stack": row.stack,
        "control": row.control,
        "guarantee": None if row.guarantee is None else asdict(row.guarantee),
        "lock": row.lock,
        "create_s": row.create_s,
        "writes": _cost(row.writes),
        "reads": _cost(row.reads),
    }


def _cost(one: Finding | None) -> dict[str, Any] | None:
    if one is None:
        return None
    # As a cost: of a figure of which more is better, the inverse.
    cost = one.ratio.inverse() if one.metric.better == "more" else one.ratio
    return {
        **ratio_document(one.ratio),
        "cost_text": ratio_words(cost),
        "id": one.id,
        "title": one.metric.title,
        "better": one.metric.better,
        "against": one.against,
        "verdict": one.verdict,
    }
