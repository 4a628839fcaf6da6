"""The client killed in a clone, the object store cut off, the metadata server restarted."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

from snapmgr.api import FireError, StorageError
from snapmgr.testing import fingerprint, processes
from snapmgr.testing.lab import new_id
from snapmgr.testing.trees import same
from snapmgr_juicefs import JuicefsConfig
from support.juicefs import JuicefsVolume, juicefs_volume
from support.juicefslab import JuicefsLab
from support.processes import ended, wait_until

pytestmark = pytest.mark.needs("root", "juicefs", "redis")
_DAY_S = 24 * 3600
_FILES = 3000


@pytest.fixture(scope="module")
def on_redis() -> JuicefsVolume:
    with juicefs_volume("redis", mount_options=("--writeback",), base=Path("/dev/shm")) as made:
        yield made


@pytest.fixture
def lab(on_redis: JuicefsVolume) -> JuicefsLab:
    config = JuicefsConfig(meta_url=on_redis.meta_url)
    return JuicefsLab(on_redis, config)


def test_client_killed_in_a_clone(lab: JuicefsLab, on_redis: JuicefsVolume) -> None:
    origin = lab.make_origin()
    (origin / "0").mkdir()
    for number in range(_FILES // 6):
        (origin / "0" / str(number)).touch()
    for number in range(1, 6):
        on_redis.juicefs("clone", str(origin / "0"), str(origin / str(number)))
    volume, snapshot_id = lab.volume(origin), new_id()

    def fire() -> None:
        with lab.backend().arm((volume,), snapshot_id) as armed:
            armed.launched = True
            with pytest.raises(FireError):
                armed.fire(time.monotonic() + 60)

    def detached() -> int:
        return int(on_redis.redis.command("ZCARD", "detachedNodes") or 0)

    with socket.create_connection(("127.0.0.1", on_redis.redis.port), timeout=60) as asking:
        child = processes.spawn(fire)
        # The clone is on its way once its first nodes are there, out of sight; that takes a tenth of a second.
        answer, deadline = b":0\r\n", time.monotonic() + 60
        while answer == b":0\r\n":
            assert time.monotonic() < deadline, "no clone was seen on its way"
            asking.sendall(b"ZCARD detachedNodes\r\n")
            answer = asking.recv(100)
        clients = on_redis.kill_client()
    assert processes.succeeds(child)
    assert all(ended(pid) for pid in clients)
    on_redis.mount("--writeback")
    (debris,) = lab.found(volume.pool)
    assert (debris.kind, debris.snapshot_id) == ("debris", snapshot_id)
    lab.repair_all(volume.pool)
    assert lab.found(volume.pool) == ()
    # What the clone had made is too young to be collected: that is said, and nothing is wrong.
    assert detached()
    assert any("interrupted clone" in text for text in lab.volume(origin).warnings)
    on_redis.juicefs("gc", "--delete", on_redis.meta_url)
    assert detached()

    # A day later.
    for node in on_redis.redis.command("ZRANGE", "detachedNodes", "0", "-1").split():
        on_redis.redis.command("ZADD", "detachedNodes", str(int(time.time()) - 2 * _DAY_S), node)
    noted = lab.store / "interrupted.json"
    noted.write_text(json.dumps([when - 2 * _DAY_S for when in json.loads(noted.read_text())]))
    (debris,) = lab.found(volume.pool)
    assert "collects garbage" in debris.cure
    lab.repair_all(volume.pool)
    assert detached() == 0
    assert lab.found(volume.pool) == ()
    assert not any("interrupted clone" in text for text in lab.volume(origin).warnings)
    ref = lab.take_one(origin)
    lab.backend().delete(ref)


def test_object_store_cut_off(lab: JuicefsLab, on_redis: JuicefsVolume) -> None:
    origin = lab.make_origin()
    (origin / "file").write_bytes(b"before")
    volume, snapshot_id = lab.volume(origin), new_id()
    away = on_redis.objects.with_name("objects-away")
    wait_until(lambda: not on_redis.counter("juicefs_staging_blocks"), 60)
    on_redis.objects.rename(away)
    on_redis.objects.write_bytes(b"no folder: nothing can be put here")
    try:
        (origin / "file").write_bytes(os.urandom(1 << 20))
        before = fingerprint(origin)
        with lab.backend().arm((volume,), snapshot_id) as armed:
            armed.launched = True
            (shot,) = armed.fire(time.monotonic() + 60)
        # It is all in the local cache: not READY.
        with pytest.raises(StorageError, match="still only in the cache"):
            lab.backend().settle((shot.ref,), 1.0)
        assert (lab.store / shot.ref.name / "made.json").exists()
    finally:
        on_redis.objects.unlink()
        away.rename(on_redis.objects)
    # The client tries again by itself, in its own time; one that is started anew does so at once.
    on_redis.unmount()
    on_redis.mount("--writeback")
    lab.backend().settle((shot.ref,), 60)
    assert (lab.store / shot.ref.name / "complete.json").exists()
    on_redis.unmount()
    with on_redis.mounted(cache=on_redis.folder / "another-cache"), lab.attached(shot.ref, writable=False) as reached:
        same(before, fingerprint(reached))
    on_redis.mount("--writeback")


def test_metadata_server_restarted(lab: JuicefsLab, on_redis: JuicefsVolume) -> None:
    origin = lab.make_origin()
    (origin / "file").write_bytes(b"content")
    ref = lab.take_one(origin)
    volume = lab.volume(origin)
    with lab.backend().arm((volume,), new_id()) as armed:
        on_redis.redis.restart()
        armed.sync()
        armed.launched = True
        (shot,) = armed.fire(time.monotonic() + 60)
    lab.backend().settle((shot.ref,), 60)
    assert {found.ref for found in lab.found(ref.pool)} >= {ref, shot.ref}
