"""Documents of samples as the benchmark writes them, with made-up but likely figures: for reports and comparisons."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

GIB = 1 << 30
HOST: dict[str, Any] = {
    "kernel": "6.12.30",
    "cpu": {"model": "Example CPU", "count": 2},
    "virtualisation": "kvm",
    "device": {"kind": "device", "model": "Example SSD 870", "size_bytes": 500 * 10**9, "rotational": False},
}
STACKS = ("btrfs", "xfs-reflink", "lvm-thin+xfs", "ext4")


def info(title: str, unit: str, better: str, *, headline: bool = False) -> dict[str, Any]:
    return {"title": title, "unit": unit, "better": better, "headline": headline}


def sample(number: int, scenario: str, stack: str, **changed: Any) -> dict[str, Any]:
    """Return one sample, empty but for what is given."""
    return {
        "schema": 1,
        "id": f"{number:04d}-{scenario}-{stack}",
        "run": "run-1",
        "scenario": scenario,
        "variant": "",
        "stack": stack,
        "kind": "measured",
        "block": 0,
        "position": 0,
        "at": "2026-11-22T03:00:00Z",
        "seconds": 12.5,
        "parameters": {
            "profile": "quick",
            "variant": "",
            "size_bytes": GIB,
            "memory_bytes": 2 * GIB,
            "seed": 1,
            "extra": {},
        },
        "metrics": {},
        "infos": {},
        "series": {},
        "axes": {},
        "layouts": {},
        "checks": [{"name": "snapshot holds the old data", "ok": True, "detail": ""}],
        "notes": [],
        "spent": {"seconds": 3.5, "cpu_seconds": 1.25, "written_bytes": GIB, "read_bytes": 0, "steal_seconds": 0.0},
        "commands": [["mkfs." + stack, "/dev/EXAMPLE"]],
        "jobs": {"update": "[global]\nrw=randwrite\nbs=16k\n"},
        "provisioned": {"mount_options": "rw,noatime"},
        "host": HOST,
        "failure": "",
        **changed,
    }


_UPDATE = {"btrfs": 2.1, "xfs-reflink": 1.55, "lvm-thin+xfs": 1.9, "ext4": 1.0}
_UPDATE_INFOS = {
    "update_first_s": info("Random update, first pass after the snapshot", "s", "less", headline=True),
    "update_second_s": info("Random update, second pass", "s", "less"),
    "read_before_bytes_s": info("Linear read, cold, before the update", "B/s", "more"),
    "read_after_bytes_s": info("Linear read, cold, after the update", "B/s", "more", headline=True),
    "amplification": info("Bytes written to the device for each byte asked for", "", "less"),
    "create_s": info("Creating the snapshot", "s", "less"),
}


def random_updates(*, blocks: int = 8, noise: float = 0.06, seed: int = 1) -> list[dict[str, Any]]:
    """Return blocks of random-update on `STACKS` in the order A B … B A, with A/A pairs, layouts and latency curves."""
    rng = random.Random(seed)
    found: list[dict[str, Any]] = []
    for block in range(1, blocks + 1):
        twin = STACKS[block % len(STACKS)]
        entries = [*((stack, "measured") for stack in STACKS), (twin, "a/a")]
        for position, (stack, kind) in enumerate(entries if block % 2 else entries[::-1]):
            found.append(_update(len(found) + 1, stack, rng, noise, block=block, position=position, kind=kind))
    return found


def _update(number: int, stack: str, rng: random.Random, noise: float, **changed: Any) -> dict[str, Any]:
    factor = _UPDATE[stack]

    def near(value: float) -> float:
        return value * rng.lognormvariate(0, noise)

    metrics = {
        "update_first_s": near(4.0 * factor),
        "update_second_s": near(4.0 * (1 + (factor - 1) * 0.3)),
        "read_before_bytes_s": near(500e6),
        "read_after_bytes_s": near(500e6 / (1 + (factor - 1) * 0.8)),
        "amplification": near(1 + (factor - 1) * 0.5),
        "create_s": near(0.012),
    }
    if stack == "ext4":
        del metrics["create_s"]
    threads = [1, 4, 16, 64, 256, 512]
    return sample(
        number,
        "random-update",
        stack,
        variant="database",
        metrics=metrics,
        infos=_UPDATE_INFOS,
        series={
            "p999_by_threads": [near(0.0004 * factor * (1 + count / 20)) for count in threads],
        },
        axes={
            "p999_by_threads": {
                "title": "Latency of a write, 99.9th percentile",
                "x_title": "threads",
                "x_unit": "",
                "x": threads,
                "unit": "s",
            }
        },
        layouts={"before": layout(6, rng), "after": layout(6 if stack == "ext4" else 9000, rng)},
        notes=["btrfs wrote buffered although O_DIRECT was asked for."] if stack == "btrfs" else [],
        **changed,
    )


def layout(extents: int, rng: random.Random, size_bytes: int = GIB) -> dict[str, Any]:
    """Return a file's layout with at most 2,000 points: whole pieces first, then rewritten ones, written elsewhere."""
    shown = min(extents, 2000)
    length = size_bytes // shown
    moved = extents > 100
    points = [
        [
            number * length,
            GIB + (rng.randrange(4 * GIB) if moved and rng.random() < 0.5 else number * length),
            length,
        ]
        for number in range(shown)
    ]
    return {
        "size_bytes": size_bytes,
        "mapped_bytes": size_bytes,
        "extents": extents,
        "gaps": extents - 1,
        "gaps_per_gib": float(extents - 1),
        "runs": extents,
        "points": points,
        "caveats": [],
    }


_BLOG_INFOS = {
    "reads_before": info("Blogs read before the snapshot", "", "more"),
    "reads_after": info("Blogs read after the snapshot", "", "more", headline=True),
    "writes_before": info("Blogs written before the snapshot", "", "more"),
    "writes_after": info("Blogs written after the snapshot", "", "more", headline=True),
}


def blogs(*, pairs: int = 6, seed: int = 2) -> list[dict[str, Any]]:
    """Return pairs of blog on btrfs and lvm+ext4, which stalls after the snapshot."""
    rng = random.Random(seed)
    found: list[dict[str, Any]] = []
    ends = [10.0 * (number + 1) for number in range(30)]
    for block in range(1, pairs + 1):
        for position, stack in enumerate(("btrfs", "lvm+ext4") if block % 2 == 0 else ("lvm+ext4", "btrfs")):
            series: dict[str, list[float]] = {}
            for moment in ("before", "after"):
                for what, rate in (("reads", 60_000), ("writes", 900)):
                    values = [rate * rng.lognormvariate(0, 0.25) for _ in ends]
                    if stack == "lvm+ext4" and moment == "after":
                        values = [
                            value * (0 if 4 <= place < 10 or place in {22, 27, 28} else 0.5)
                            for place, value in enumerate(values)
                        ]
                    series[f"{what}_{moment}"] = [round(value) for value in values]
            metrics = {name: sum(values) / 1000 for name, values in series.items()}
            found.append(
                sample(
                    len(found) + 1001,
                    "blog",
                    stack,
                    block=block,
                    position=position,
                    metrics=metrics,
                    infos=_BLOG_INFOS,
                    series=series,
                    axes={
                        name: {
                            "title": f"Files {name.replace('_', ' ')} the snapshot",
                            "x_title": "time",
                            "x_unit": "s",
                            "x": ends,
                            "unit": "",
                        }
                        for name in series
                    },
                )
            )
    return found


def absent(scenario: str, stack: str, why: str) -> dict[str, Any]:
    return sample(9001, scenario, stack, kind="absent", failure=why, checks=[], metrics={}, infos={})


def altered(
    samples: Iterable[Mapping[str, Any]], *, stack: str, metric: str, factor: float, **changed: Any
) -> list[dict[str, Any]]:
    """Return copies with one metric of one stack multiplied, and `changed` in all."""
    return [
        {
            **one,
            **changed,
            "metrics": {
                name: value * (factor if name == metric and one["stack"] == stack else 1)
                for name, value in one["metrics"].items()
            },
        }
        for one in samples
    ]


_PUBLISHED_INFOS = {
    "fill_unsynced_s": info("Fill, without the last sync", "s", "less"),
    "update_first_unsynced_s": info("Random update, without the last sync", "s", "less"),
    "update_first_s": info("Random update, until durable", "s", "less", headline=True),
    "read_after_buffered_s": info("Linear read, cold, buffered, after it", "s", "less", headline=True),
    "extents_before": info("Extents before the update", "", "less"),
    "extents_after": info("Extents after it", "", "less"),
}


def repeated(
    ratios: Mapping[str, float], *, variant: str = "repaired", host: Mapping[str, Any] = HOST, pairs: int = 8
) -> list[dict[str, Any]]:
    """Return pairs of random-update as published, with LVM + ext4 ÷ btrfs near `ratios` (by metric; others: 1)."""
    rng = random.Random(3)
    found: list[dict[str, Any]] = []
    for block in range(1, pairs + 1):
        for stack in ("lvm+ext4", "btrfs"):
            metrics = {
                name: 10.0 * (ratios.get(name, 1.0) if stack == "lvm+ext4" else 1.0) * rng.lognormvariate(0, 0.03)
                for name in _PUBLISHED_INFOS
            }
            metrics["extents_after"] *= 300 if stack == "btrfs" else 1
            found.append(
                sample(
                    len(found) + 1,
                    "random-update",
                    stack,
                    variant=variant,
                    block=block,
                    metrics=metrics,
                    infos=_PUBLISHED_INFOS,
                    host=host,
                )
            )
    return found
