"""Samples of a benchmark, complete as the schema asks for."""

from __future__ import annotations

from typing import Any

INFO = {
    "update_s": {"title": "Random update", "unit": "s", "better": "less", "headline": True},
    "written_bytes": {"title": "Written below", "unit": "B", "better": "less", "headline": False},
}


def bench_run(**changed: Any) -> dict[str, Any]:
    """Return a ``run.json`` without its schema."""
    document = {
        "id": "20260101T000000Z.00000001",
        "at": "2026-01-01T00:00:00+00:00",
        "arguments": {"on": "loop:1G", "profile": "smoke"},
        "seed": 7,
        "versions": {"snapmgr": "0.1.0"},
    }
    return document | changed


def bench_sample(stack: str = "btrfs", update_s: float = 1.0, **changed: Any) -> dict[str, Any]:
    """Return a sample without its schema and id."""
    document = {
        "run": "20260101T000000Z.00000001",
        "scenario": "random-update",
        "variant": "database",
        "stack": stack,
        "kind": "measured",
        "block": 0,
        "position": 0,
        "at": "2026-01-01T00:00:00+00:00",
        "seconds": 2.0,
        "parameters": {"profile": "smoke", "size_bytes": 1 << 26},
        "metrics": {"update_s": update_s, "written_bytes": 4096.0},
        "infos": INFO,
        "series": {},
        "axes": {},
        "layouts": {},
        "checks": [{"name": "snapshot holds the old data", "ok": True, "detail": ""}],
        "notes": [],
        "spent": {},
        "commands": [],
        "jobs": {},
        "provisioned": {},
        "host": {"loop": True},
        "failure": "",
    }
    return document | changed
