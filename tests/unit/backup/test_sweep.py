"""What a sweep does about the snapshots of killed runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from snapmgr.backup import sweep as room
from snapmgr.catalog.store import Catalog
from snapmgr.config.load import load_config
from snapmgr.context import Context
from snapmgr.contract.errors import StorageError
from snapmgr.contract.records import Found
from support.sample import POOL, manifest

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_predecessor_gets_the_settle_timeout_of_its_job_and_all_of_them_together(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with config.open("a") as file:
        file.write('settle_timeout = "20s"\n')
    catalog = Catalog(tmp_path / "state")
    catalog.make()
    pending = [replace(manifest(number), state="pending") for number in range(3)]
    for one in pending:
        catalog.write(one)
    ctx = Context(config=load_config(config), catalog=catalog)
    held = [Found(kind="snapshot", pool=POOL, name="x", ref=one.members[0].ref) for one in pending]
    storage: Any = SimpleNamespace(missing=tuple, inventory=lambda *_, **_named: held)
    monkeypatch.setitem(ctx._backends, "reflink", storage)
    monkeypatch.setattr(room, "mark_lost_in", lambda *_: ())
    clock, given = [1000.0], []
    monkeypatch.setattr(room.time, "monotonic", lambda: clock[0])

    def hang(_ctx: Context, _manifest: object, *, settle_timeout_s: float) -> None:
        given.append(settle_timeout_s)
        clock[0] += settle_timeout_s
        raise StorageError("it was not durable in time")

    monkeypatch.setattr(room, "publish", hang)
    assert len(room.sweep(ctx, "nightly")) == 3
    assert given == [20.0, 1.0, 1.0]
    assert room.job_settle_timeout_s(ctx, "not configured any more") == 300.0
