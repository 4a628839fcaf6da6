"""Holds the published experiments as data: figures, hardware, conclusions; `judgement` evaluates them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from snapmgr.physical.tuning.outcome import PUBLISHED as PREPARE_LADDER

Want = Literal[
    "published variant", "real device", "spinning disk", "solid-state disk", "regressed kernel", "object store"
]
"""Conditions under which results must have been measured to be comparable."""

SPINNING = "one spinning disk, 100 GB of data: LVM + ext4 (75 % of the group, the rest for the snapshot) and btrfs"
BLOGBENCH = "the same disk: blogbench 1.1, 30 intervals of 10 s, 3 writers, 1 rewriter, 5 commenters, 100 readers"
INNODB = "fio's model of InnoDB, 1 to 512 threads, kernel 5.3 with ext4's regression against 4.4 or the fix"
LADDER = (
    "JuiceFS on an object store: prepare of an 11 GB backup, one run of each rung, by hand, perhaps warm at the end"
)
_ON_THE_DISK: tuple[Want, ...] = ("published variant", "real device", "spinning disk")


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two figures of a ratio."""

    words: str
    """The storage: "LVM + ext4"."""
    stack: str
    metric: str
    """Name of our metric; "" if no scenario has that figure."""
    value: float | None = None
    """The published figure, in `Claim.unit`; None if only the ratio was published."""


@dataclass(frozen=True, kw_only=True)
class _Published:
    key: str
    """"random-update/read": unique, for documents and links."""
    title: str
    conclusion: str
    """A sentence that is true if the figure agrees: a ratio is on the published side of 1."""
    measured_on: str
    wants: tuple[Want, ...] = _ON_THE_DISK
    remark: str = ""
    """Known errors of the published figure."""

    @property
    def scenario(self) -> str:
        """Return the name of our scenario that repeats it."""
        return self.key.partition("/")[0]


@dataclass(frozen=True, kw_only=True)
class Claim(_Published):
    """One published ratio and its conclusion."""

    over: Side
    under: Side
    """The ratio is `over` ÷ `under`."""
    unit: str
    ratio: tuple[float, float]
    """The published ratio: the same number twice, or the ends of a published range."""


@dataclass(frozen=True, kw_only=True)
class StallClaim(_Published):
    """A published count of intervals in which nothing was written."""

    stack: str
    curves: tuple[str, ...]
    """Our curves per second, to be added up; a star stands for the moment in their names."""
    interval_s: int
    stalled: int
    intervals: int


def _against(
    key: str, title: str, metric: str, values: tuple[float, float], *, so: str, unit: str = "s", remark: str = ""
) -> Claim:
    """Return a claim of LVM + ext4 against btrfs."""
    over = Side(words="LVM + ext4", stack="lvm+ext4", metric=metric, value=values[0])
    under = Side(words="btrfs", stack="btrfs", metric=metric, value=values[1])
    return Claim(
        key=key,
        title=title,
        over=over,
        under=under,
        unit=unit,
        ratio=(values[0] / values[1],) * 2,
        conclusion=so,
        measured_on=BLOGBENCH if key.startswith("blog/") else SPINNING,
        remark=remark,
    )


def _within(
    key: str, title: str, metric: str, values: tuple[float, float], *, stack: str, so: str, remark: str = ""
) -> Claim:
    """Return a claim of one stack, after ÷ before; a star in `metric` stands for the moment."""
    return Claim(
        key=key,
        title=title,
        over=Side(words="after", stack=stack, metric=metric.replace("*", "after"), value=values[1]),
        under=Side(words="before", stack=stack, metric=metric.replace("*", "before"), value=values[0]),
        unit="",
        ratio=(values[1] / values[0],) * 2,
        conclusion=so,
        measured_on=BLOGBENCH if key.startswith("blog/") else SPINNING,
        remark=remark,
    )


def _innodb(key: str, title: str, over: Side, under: Side, ratio: tuple[float, float], *, so: str) -> Claim:
    return Claim(
        key=f"innodb-io/{key}",
        title=title,
        over=over,
        under=under,
        unit="1/s",
        ratio=ratio,
        conclusion=so,
        measured_on=INNODB,
        wants=("real device", "regressed kernel", "solid-state disk"),
    )


# Our metric for each rung above the first; there, 64 threads come together with the cache and have no own figure.
_RUNGS = ("memory_s", "threads_s", "writeback_s", "", "cache_s")


def _rungs() -> tuple[Claim, ...]:
    (first, base), *rest = PREPARE_LADDER
    return tuple(
        Claim(
            key=f"prepare/rung-{number}",
            title=f"Prepare: {rung}",
            over=Side(words=rung, stack="juicefs", metric=metric, value=took),
            under=Side(words=first, stack="juicefs", metric="default_s", value=base),
            unit="s",
            ratio=(took / base,) * 2,
            conclusion=f"prepare is faster with {rung.removeprefix('+ ')} and all before it than by default",
            measured_on=LADDER,
            wants=("object store",),
        )
        for number, ((rung, took), metric) in enumerate(zip(rest, _RUNGS, strict=True), start=2)
    )


_UNSYNCED = "timed without a sync at its end: most of it is the page cache's"
_IN_PLACE = "updates in place cannot raise the count of a file on ext4: the script had truncated or shared the file"
_SPARSE = "100 GB in 294 s is more than one spinning disk gives: the script had read a partly empty file"

CLAIMS: tuple[Claim, ...] = (
    _against(
        "random-update/fill", "Fill", "fill_unsynced_s", (1329.09, 1723.24), so="LVM + ext4 fills faster than btrfs"
    ),
    _against(
        "random-update/update",
        "250,000 random updates after a snapshot",
        "update_first_unsynced_s",
        (202.87, 115.73),
        so="btrfs updates faster than LVM + ext4 after a snapshot",
        remark=_UNSYNCED,
    ),
    _against(
        "random-update/update-durable",
        "The same until durable (published: without a sync)",
        "update_first_s",
        (202.87, 115.73),
        so="btrfs updates faster than LVM + ext4 after a snapshot, also until it is durable",
        remark=_UNSYNCED,
    ),
    _against(
        "random-update/read",
        "Linear read afterwards",
        "read_after_buffered_s",
        (1006.11, 294.38),
        so="btrfs reads faster in order than LVM + ext4 after the updates",
        remark=_SPARSE,
    ),
    _within(
        "random-update/extents-lvm",
        "Extents on LVM + ext4",
        "extents_*",
        (69, 70_576),
        stack="lvm+ext4",
        so="random updates fragment the file on LVM + ext4",
        remark=_IN_PLACE,
    ),
    _within(
        "random-update/extents-btrfs",
        "Extents on btrfs",
        "extents_*",
        (100, 63_848),
        stack="btrfs",
        so="random updates fragment the file on btrfs",
    ),
    _against(
        "blog/reads-before",
        "Blogs read before the snapshot",
        "reads_before",
        (167_695, 346_567),
        so="btrfs reads more than LVM + ext4 without a snapshot",
        unit="",
    ),
    _against(
        "blog/writes-before",
        "Blogs written before the snapshot",
        "writes_before",
        (1155, 1436),
        so="btrfs writes more than LVM + ext4 without a snapshot",
        unit="",
    ),
    _against(
        "blog/reads-after",
        "Blogs read after the snapshot",
        "reads_after",
        (88_398, 233_204),
        so="btrfs reads more than LVM + ext4 after a snapshot",
        unit="",
    ),
    _against(
        "blog/writes-after",
        "Blogs written after the snapshot",
        "writes_after",
        (848, 964),
        so="btrfs writes more than LVM + ext4 after a snapshot",
        unit="",
    ),
    _within(
        "blog/reads-kept-lvm",
        "Blogs read on LVM + ext4",
        "reads_*",
        (167_695, 88_398),
        stack="lvm+ext4",
        so="a snapshot costs reads on LVM + ext4",
    ),
    _within(
        "blog/writes-kept-lvm",
        "Blogs written on LVM + ext4",
        "writes_*",
        (1155, 848),
        stack="lvm+ext4",
        so="a snapshot costs writes on LVM + ext4",
    ),
    _within(
        "blog/reads-kept-btrfs",
        "Blogs read on btrfs",
        "reads_*",
        (346_567, 233_204),
        stack="btrfs",
        so="a snapshot costs reads on btrfs",
    ),
    _within(
        "blog/writes-kept-btrfs",
        "Blogs written on btrfs",
        "writes_*",
        (1436, 964),
        stack="btrfs",
        so="a snapshot costs writes on btrfs",
    ),
    _innodb(
        "direct-nvme",
        "Pages per second, O_DIRECT, ext4 against XFS, NVMe",
        Side(words="ext4", stack="ext4", metric="iops_best_direct"),
        Side(words="XFS", stack="xfs", metric="iops_best_direct"),
        (0.2, 0.7),
        so="ext4's regression costs O_DIRECT on NVMe",
    ),
    _innodb(
        "direct-sata",
        "The same with the most threads, SATA SSD",
        Side(words="ext4", stack="ext4", metric="iops_most_direct"),
        Side(words="XFS", stack="xfs", metric="iops_most_direct"),
        (0.85, 0.9),
        so="ext4's regression costs O_DIRECT on a SATA SSD beyond 256 threads",
    ),
    _innodb(
        "dsync-best",
        "O_DSYNC on ext4 against O_DIRECT at its best",
        Side(words="O_DSYNC on ext4", stack="ext4", metric="iops_most_dsync"),
        Side(words="O_DIRECT on XFS", stack="xfs", metric="iops_most_direct"),
        (0.9, 0.9),
        so="O_DSYNC is slower than O_DIRECT without the regression",
    ),
    _innodb(
        "dsync-regressed",
        "O_DSYNC against O_DIRECT, both on ext4",
        Side(words="O_DSYNC", stack="ext4", metric="iops_most_dsync"),
        Side(words="O_DIRECT", stack="ext4", metric="iops_most_direct"),
        (1.35, 1.35),
        so="O_DSYNC is faster than O_DIRECT on ext4 with the regression",
    ),
    *_rungs(),
)

STALLS: tuple[StallClaim, ...] = (
    # These published intervals after the snapshot had no write: 5-9, 11, 23-25, 28-30.
    StallClaim(
        key="blog/stalls-lvm",
        title="Intervals without a write on LVM + ext4 after the snapshot",
        stack="lvm+ext4",
        curves=("written_each_s_*", "rewritten_each_s_*", "commented_each_s_*"),
        interval_s=10,
        stalled=12,
        intervals=30,
        conclusion="writes stall on LVM + ext4 after a snapshot",
        measured_on=BLOGBENCH,
    ),
)
