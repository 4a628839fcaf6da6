"""Killing and stopping LVM's own programs, alone and with snapmgr: afterwards the origin goes on, and all converges.

By default a few of the system calls of each; all with SNAPMGR_CRASH_EVERY=1 or SNAPMGR_CAMPAIGN=1.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from snapmgr.backup import fire as firing
from snapmgr_lvm import report
from support import lvm, tracer
from support.thoroughness import CAMPAIGN, crash_every
from support.volumescene import Strike, suspended, volume_scene

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.lvm import VolumeGroup
    from support.volumescene import VolumeScene

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(3600)]

_EVERY = crash_every(120)
_PATIENCE_S = 120.0
_CHECKS = {"ext4": ("e2fsck", "-f", "-n"), "xfs": ("xfs_repair", "-n")}


def _devices() -> set[str]:
    """Return the names of all device-mapper devices."""
    return {row for row in lvm.run("dmsetup", "info", "-c", "--noheadings", "-o", "name").split() if row != "No"}


def _choose(calls: list[tracer.Call]) -> list[tracer.Call]:
    """Return every N-th of the calls that change something, and the first ones that let devices go on again."""
    changing = [number for number, call in enumerate(calls) if call.name != "metadata"]
    # Before the first change of a device LVM has read its metadata, and written them at most once.
    calls = calls[max(0, changing[0] - 2) :]
    resuming = next(call for call, last in zip(calls[::-1], calls[-2::-1], strict=False) if last.name != "suspend")
    return sorted({*calls[::_EVERY], resuming}, key=lambda call: call.number)


def _require_sound(scene: VolumeScene, before: set[str], when: str) -> None:
    """Nothing stands still, nothing is there but READY snapshots, and the origin can be written."""
    assert suspended() == [], when
    scene.data.joinpath("file").write_text("data")
    with (scene.data / "file").open("rb") as file:
        os.fsync(file.fileno())
    names = {f"snapmgr.{entry.manifest.id}" for entry in scene.entries() if entry.manifest.state == "ready"}
    assert set(scene.ours()) == names, when
    # The devices of a classic snapshot and of its origin's chain stay with it alone.
    if not names:
        assert _devices() == before, when


def _prepare(scene: VolumeScene, program: str) -> tuple[str, ...]:
    """Return the command that calls `program`, when all is ready for it."""
    if program != "lvremove":
        return ("backup", "demo")
    scene.ok("backup", "demo")
    return ("delete", "--force", "--yes", scene.entries()[-1].manifest.id)


def _forget_all(scene: VolumeScene) -> None:
    names = [entry.manifest.id for entry in scene.entries()]
    if names:
        scene.ok("delete", "--force", "--yes", *names)


def _next_run(scene: VolumeScene) -> None:
    scene.ok("backup", "demo")


def _doctor(scene: VolumeScene) -> None:
    done = scene.call("doctor", "--fix")
    assert done.returncode == 0, done


@pytest.mark.parametrize(
    ("kind", "program"),
    [
        *product(("classic", "thin"), ("lvcreate", "lvremove")),
        ("thin", "lvchange"),
        *([("classic", "lvchange")] if CAMPAIGN else []),
    ],
)
def test_a_program_of_lvm_is_killed(vg: VolumeGroup, kind: Literal["classic", "thin"], program: str) -> None:
    with volume_scene(vg, kind) as scene:
        before = _devices()
        strike = Strike(program=program, log=scene.folder / "log")
        done = scene.call(*_prepare(scene, program), strike=strike)
        assert done.returncode == 0, done
        calls = strike.changes()
        _forget_all(scene)
        assert _devices() == before
        cures: list[Callable[[VolumeScene], None]] = [_doctor, _next_run]
        chosen = _choose(calls) if program != "lvchange" else calls[-1:]
        for turn, call in enumerate(chosen):
            with_us = bool(turn % 3)
            arguments = _prepare(scene, program)
            kill = tracer.Kill(call=call)
            done = scene.call(*arguments, strike=replace(strike, kill=kill, with_us=with_us))
            when = f"{program} killed {kill}{', with us' if with_us else ''}: {done}"
            # What did not go away is removed once more.
            alone = 0 if program == "lvremove" else 1
            assert done.returncode == (-signal.SIGKILL if with_us else alone), when
            if with_us or program != "lvcreate":
                cures[turn % 2](scene)
            _require_sound(scene, before, when)
            if turn % 2 == 0:
                _next_run(scene)
            _forget_all(scene)
            _require_sound(scene, before, when)
        lvm.run("umount", scene.origin.point)
        lvm.run(*_CHECKS[scene.origin.fs_type], scene.origin.device)


def _find_stopped(device: str) -> int:
    """Return the pid of the lvcreate that stands still, and with it `device`."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        for entry in Path("/proc").glob("[0-9]*/comm") if device in suspended() else ():
            with suppress(OSError):
                # Its trap, a script, has the same name.
                if entry.read_text() == "lvcreate\n" and (entry.parent / "exe").readlink().name == "lvm":
                    # Traced, it stops at each call.
                    turns = [line for line in (entry.parent / "status").read_text().splitlines() if "_switches" in line]
                    time.sleep(0.5)
                    if all(line in (entry.parent / "status").read_text() for line in turns):
                        return int(entry.parts[2])
        time.sleep(0.05)
    raise AssertionError("no lvcreate stands still")


def _wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while Path(f"/proc/{pid}/exe").exists():
        assert time.monotonic() < deadline, pid
        time.sleep(0.05)


def test_an_lvcreate_that_hangs_is_left_alone_and_what_it_makes_later_is_removed(vg: VolumeGroup) -> None:
    """Stopped while the origin is suspended: nobody kills it, and all that is asked meanwhile says who is to blame."""

    def be_impatient() -> None:
        # Time enough to begin on a busy machine.
        firing.UNLOCKED_FIRE_S = 8.0
        report.READ_TIMEOUT_S = 1.0

    with volume_scene(vg, "classic") as scene:
        before = _devices()
        strike = Strike(program="lvcreate", log=scene.folder / "log")
        assert scene.call("backup", "demo", strike=strike).returncode == 0
        *_, halt = (
            call
            for call, after in zip(strike.changes(), strike.changes()[1:], strict=False)
            if call.name == "suspend" and after.name == "metadata"
        )
        _forget_all(scene)
        stop = tracer.Kill(call=halt, after=True, victim=0, signal=signal.SIGSTOP)
        for our_end in (False, True):
            start = time.monotonic()
            running = scene.begin("backup", "demo", first=be_impatient, strike=replace(strike, kill=stop))
            stopped = _find_stopped(f"{vg.name}-{scene.origin.lv}")
            if our_end:
                (entry,) = scene.entries()
                assert entry.manifest.helper is not None
                for pid in (running.pid, entry.manifest.helper.pid):
                    os.kill(pid, signal.SIGKILL)
            done = running.end()
            assert time.monotonic() - start < _PATIENCE_S
            if not our_end:
                assert done.returncode == 1, done
                assert "the storage call had not returned at the deadline" in done.stderr
            again = scene.call("backup", "demo", first=be_impatient)
            assert again.returncode == 1, again
            told = scene.call("doctor", first=be_impatient)
            assert told.returncode == 1
            assert f"lvcreate (pid {stopped}, stopped) holds the lock of {vg.name}" in told.stdout, told
            os.kill(stopped, signal.SIGCONT)
            _wait_for_end(stopped)
            if not our_end:
                (entry,) = [one for one in scene.entries() if one.manifest.state == "pending"]
                assert entry.manifest.helper is not None
                _wait_for_end(entry.manifest.helper.pid)
                assert scene.ours() == []
            _next_run(scene)
            _require_sound(scene, before, str(done))
            _forget_all(scene)
            _require_sound(scene, before, str(done))
