"""Private mounts: with what options, what becomes of what is written there, and what a killed process leaves."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from snapmgr.api import ClientOptions, StorageError
from snapmgr.testing import processes
from snapmgr_juicefs import JuicefsConfig, private
from support.juicefs import JuicefsVolume, juicefs_volume
from support.juicefslab import JuicefsLab
from support.processes import wait_until

pytestmark = pytest.mark.needs("root", "juicefs", "redis")
_PASSWORD = "open sesame"


@pytest.fixture(scope="module")
def locked() -> JuicefsVolume:
    with juicefs_volume("redis", password=_PASSWORD, base=Path("/dev/shm")) as made:
        yield made


@pytest.fixture
def lab(locked: JuicefsVolume) -> JuicefsLab:
    secret = locked.folder / "password"
    secret.write_text(f"{_PASSWORD}\n")
    secret.chmod(0o600)
    caches = locked.folder / "caches"
    caches.mkdir(exist_ok=True)
    config = JuicefsConfig(ask_metadata=False, password_file=str(secret), cache_root=str(caches))
    return JuicefsLab(locked, config)


def _commands() -> str:
    return "\n".join(
        (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        for process in Path("/proc").glob("[0-9]*")
        if os.path.exists(process / "cmdline")
    )


def _chunk(point: str, name: str) -> int:
    return int(json.loads(Path(point, ".config").read_text())["Chunk"][name])


def test_what_is_written_gets_to_the_volume(lab: JuicefsLab, locked: JuicefsVolume) -> None:
    origin = lab.make_origin()
    told: list[int] = []
    options = ClientOptions(writeback=True, upload_delay_s=3600, cache_bytes=64 << 20)
    with lab.backend().client_mount(str(origin), options) as mount:
        assert os.stat(mount.point).st_mode & 0o077 == 0 or os.stat(Path(mount.point).parent).st_mode & 0o077 == 0
        assert _PASSWORD not in _commands()
        Path(mount.path, "file").write_bytes(bytes(9 << 20))
        assert mount.counters()["juicefs_staging_block_bytes"] == 9 << 20
        mount.settle(60, told.append)
        assert mount.counters()["juicefs_staging_block_bytes"] == 0
        Path(mount.path, "later").write_bytes(b"x" * 1000)
        mount.warm_up(mount.path)
    assert told[-1] == 0
    assert (origin / "file").read_bytes() == bytes(9 << 20)
    assert (origin / "later").read_bytes() == b"x" * 1000
    assert os.listdir(locked.folder / "caches") == []
    assert private.abandoned(locked.configuration()["Format"]["UUID"]) == []


@pytest.mark.parametrize(("delay_s", "shrunk"), [(0, True), (3600, False)])
def test_more_staged_blocks_than_the_client_queues_do_not_wait_for_its_look_once_a_minute(
    lab: JuicefsLab, locked: JuicefsVolume, delay_s: float, shrunk: bool
) -> None:
    origin = lab.make_origin()
    away = locked.objects.with_name("objects-away")
    with lab.backend().client_mount(str(origin), ClientOptions(writeback=True, upload_delay_s=delay_s)) as mount:
        # Until all is staged nothing can be uploaded.
        locked.objects.rename(away)
        locked.objects.write_bytes(b"no folder: nothing can be put here")
        for number in range(2300):
            Path(mount.path, str(number)).write_bytes(b"x")
        locked.objects.unlink()
        away.rename(locked.objects)
        assert _chunk(mount.point, "MaxUpload") == 20
        # Also if the queue is short when it is looked at: what it had no room for waits all the same.
        if shrunk:
            wait_until(lambda: 0 < mount.counters()["juicefs_staging_blocks"] < 1000, 60)
        begun = time.monotonic()
        mount.settle(50)
        assert time.monotonic() - begun < 30
        assert _chunk(mount.point, "MaxUpload") == 100
        assert _chunk(mount.point, "UploadDelay") == 10**9


@pytest.mark.parametrize("way", ["doctor", "another mount"])
def test_killed_with_a_full_cache(lab: JuicefsLab, locked: JuicefsVolume, way: str) -> None:
    origin = lab.make_origin()
    pool = lab.take_one(origin).pool

    def work() -> None:
        options = ClientOptions(writeback=True, upload_delay_s=3600)
        with lab.backend().client_mount(str(origin), options) as mount:
            Path(mount.path, "staged").write_bytes(bytes(5 << 20))
            Path(mount.path, "done").touch()
            time.sleep(60)

    child = processes.spawn(work)
    wait_until(lambda: (origin / "done").exists(), 60)
    # Its owner lives: it is nobody's to clear.
    assert [found for found in lab.found(pool) if found.kind == "debris"] == []
    os.kill(child, 9)
    os.waitpid(child, 0)
    (debris,) = (found for found in lab.found(pool) if found.kind == "debris")
    point = Path(private.root(), debris.name.partition("@")[2], "mnt")
    if way == "doctor":
        locked.unmount(point)  # as after a reboot: the client is gone, too
    if way == "doctor":
        lab.repair_all(pool)
    else:
        with lab.backend().client_mount(str(origin), ClientOptions()):
            pass
    assert [found for found in lab.found(pool) if found.kind == "debris"] == []
    assert (origin / "staged").read_bytes() == bytes(5 << 20)
    assert os.listdir(locked.folder / "caches") == []
    assert not point.exists()


def test_passwords(lab: JuicefsLab, locked: JuicefsVolume) -> None:
    origin = lab.make_origin()
    secret = Path(lab.config.password_file)
    secret.chmod(0o640)
    with pytest.raises(StorageError, match="others may read"), lab.backend().client_mount(str(origin), ClientOptions()):
        pass
    secret.chmod(0o600)
    secret.write_text("wrong\n")
    with pytest.raises(StorageError) as caught, lab.backend().client_mount(str(origin), ClientOptions()):
        pass
    assert "wrong" not in str(caught.value).replace("WRONGPASS", "")
    assert os.listdir(locked.folder / "caches") == []
    lab.config = JuicefsConfig(meta_url=f"redis://:{_PASSWORD}@127.0.0.1:1/0")
    told = pytest.raises(StorageError, match="has a password in it")
    with told as caught, lab.backend().client_mount(str(origin), ClientOptions()):
        pass
    assert _PASSWORD not in str(caught.value)
