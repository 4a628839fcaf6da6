"""Sums up each measured storage in one row: guarantee, lock, snapshot call, cost of writes and of reads. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

from snapmgr.bench.statistics.findings import usable
from snapmgr.bench.statistics.uses import LockName, lock_of
from snapmgr.contract.records import Capabilities

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from snapmgr.bench.statistics.findings import Finding, Sample

Cost = Literal["writes", "reads"]
# The figure of each scenario that stands for the cost of writes or reads; the first that was measured is used.
_COSTS: Mapping[Cost, Sequence[tuple[str, str]]] = {
    "writes": (
        ("random-update", "update_first_s"),
        ("oltp", "after_tps"),
        ("aging", "write_s_many"),
        ("blog", "files_written_after"),
    ),
    "reads": (("random-update", "read_after_bytes_s"), ("aging", "read_bytes_s_many"), ("blog", "reads_after")),
}


@dataclass(frozen=True, kw_only=True)
class StorageRow:
    """One storage."""

    stack: str
    control: bool
    """Whether it has no snapshots, and is there to be compared with."""
    guarantee: Capabilities | None
    """What its backend promises; None: no snapshots, or not asked."""
    lock: LockName | None
    """What a running server needs; None: the same."""
    create_s: float | None
    """Median of the snapshot call; None: not measured."""
    writes: Finding | None
    """Its cost of writes, seen from it, against the control; None: no control was measured, or it is one."""
    reads: Finding | None


def guarantees(samples: Iterable[Sample]) -> dict[str, Capabilities]:
    """Return what the backend of each stack promised when it was measured."""
    return {one["stack"]: Capabilities(**one["guarantee"]) for one in samples if one.get("guarantee")}


def storage_rows(
    samples: Sequence[Sample], findings: Sequence[Finding], *, controls: Collection[str]
) -> tuple[StorageRow, ...]:
    """Return a row for each stack that was measured, in the order of the samples, controls last."""
    known = guarantees(samples)
    stacks = list(dict.fromkeys(one["stack"] for one in samples if one["kind"] == "measured" and usable(one)))
    against = next((stack for stack in controls if stack in stacks), None)
    return tuple(
        StorageRow(
            stack=stack,
            control=stack in controls,
            guarantee=known.get(stack),
            lock=lock_of(known[stack]) if stack in known else None,
            create_s=_create_s(samples, stack),
            writes=_cost("writes", stack, against, findings),
            reads=_cost("reads", stack, against, findings),
        )
        for stack in sorted(stacks, key=lambda stack: stack in controls)
    )


def _create_s(samples: Iterable[Sample], stack: str) -> float | None:
    ours = [one for one in samples if one["stack"] == stack and one["kind"] == "measured" and usable(one)]
    figures = [one["metrics"]["create_s"] for one in ours if "create_s" in one["metrics"]]
    return float(median(figures)) if figures else None


def _cost(cost: Cost, stack: str, against: str | None, findings: Sequence[Finding]) -> Finding | None:
    if against is None or stack == against:
        return None
    ours = {
        (one.experiment.split()[0], one.metric.name): one.seen_from(stack)
        for one in findings
        if {stack, against} == {one.stack, one.against}
    }
    return next((ours[figure] for figure in _COSTS[cost] if figure in ours), None)
