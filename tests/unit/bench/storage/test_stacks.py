"""The storages that are compared: their names, what a machine lacks for them, and what they are set to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from snapmgr.api import MissingRequirementError, Provisioner, Reason, StorageError
from snapmgr.bench.measure import memory
from snapmgr.bench.measure.quiet import requests, wait_until_idle
from snapmgr.bench.model import Parameters
from snapmgr.bench.storage import stacks
from snapmgr.bench.storage.stacks import STACKS, backend_table, missing_requirements, provisioner_of
from snapmgr.config.plugins import make_backend
from snapmgr.system.command import CommandRunner
from snapmgr.system.mount import KernelMounter
from snapmgr_lvm.config import LvmConfig, size_of

_PARAMETERS = Parameters(profile="smoke", variant="", size_bytes=1, memory_bytes=1, seed=1)


def test_stacks_that_were_asked_for_are_there():
    named = "btrfs btrfs-nocow xfs-reflink lvm+ext4 lvm+xfs lvm-thin+ext4 lvm-thin+xfs juicefs ext4 xfs"
    assert set(named.split()) <= set(STACKS)
    assert {stack.name for stack in STACKS.values() if stack.backend is None} >= {"ext4", "xfs"}
    assert all(name == stack.name and stack.title for name, stack in STACKS.items())


def test_lacking_programs_and_file_systems_are_told(monkeypatch):
    def absent(name):
        raise MissingRequirementError(f"the program {name} is not installed", hint=None)

    monkeypatch.setattr(stacks, "find_program", absent)
    monkeypatch.setattr(stacks, "_kernel_knows", lambda _: False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    reasons = missing_requirements(STACKS["ext4"])
    assert [reason.what for reason in reasons] == [
        "making and mounting file systems needs root",
        "the kernel has no ext4",
        "the program mkfs.ext4 is not installed",
    ]
    assert reasons[-1].hint == "apt-get install e2fsprogs"
    said = " ".join(reason.what for reason in missing_requirements(STACKS["lvm-thin+xfs"]))
    for program in ("mkfs.xfs", "pvcreate", "vgcreate", "thin_check"):
        assert f"the program {program} is not installed" in said


def test_lack_is_told_once(monkeypatch):
    monkeypatch.setattr(stacks, "_kernel_knows", lambda _: False)
    told = [reason.what for reason in missing_requirements(STACKS["btrfs"])]
    assert len(told) == len(set(told))
    assert "the kernel has no btrfs" in told


def test_backend_that_is_broken_is_a_reason(monkeypatch):
    def broken(name, *_):
        raise MissingRequirementError(f"the backend {name} cannot be imported", hint="install it again")

    monkeypatch.setattr(stacks, "make_backend", broken)
    assert missing_requirements(STACKS["btrfs"])[-1] == Reason(
        what="the backend btrfs cannot be imported", hint="install it again"
    )


def test_backend_without_the_ability_makes_nothing():
    class NoProvisioner:
        pass

    with pytest.raises(MissingRequirementError, match="cannot make its storage"):
        provisioner_of(STACKS["btrfs"], NoProvisioner(), CommandRunner(), KernelMounter())


@pytest.mark.parametrize(("at_once", "share"), [(1, "33.00%"), (10, "3.30%")])
def test_classic_snapshots_share_the_room(at_once, share):
    given = Parameters(profile="smoke", variant="", size_bytes=1, memory_bytes=1, seed=1, extra={"snapshots": at_once})
    assert backend_table(STACKS["lvm+ext4"], given)["cow_size"] == share


@pytest.mark.parametrize(("extra", "size"), [({}, 128 << 20), ({"scratch_bytes": (5 << 30) - 1}, 5 << 30)])
def test_an_attachment_takes_no_share_of_a_large_volume(extra, size):
    given = Parameters(profile="paper", variant="", size_bytes=1 << 40, memory_bytes=1, seed=1, extra=extra)
    assert size_of(LvmConfig(**backend_table(STACKS["lvm+ext4"], given)).scratch_size, 1 << 40) == size


@pytest.mark.parametrize("name", ["btrfs", "lvm-thin+xfs", "xfs", "xfs-reflink"])
def test_other_stacks_need_no_setting(name):
    assert backend_table(STACKS[name], _PARAMETERS) == {}


# ------------------------------------------------------------------------------------------------------------- memory


def _groups(folder, *, controllers="cpu memory", enabled=""):
    (folder / "cgroup.controllers").write_text(controllers)
    (folder / "cgroup.subtree_control").write_text(enabled)
    (folder / "cgroup.procs").write_text("")
    return folder


def test_memory_controller_is_enabled(tmp_path):
    root = _groups(tmp_path)
    assert memory.missing_requirement(root) is None
    assert (root / "cgroup.subtree_control").read_text() == "+memory"


def test_no_memory_controller_is_told(tmp_path):
    reason = memory.missing_requirement(_groups(tmp_path, controllers="cpu pids"))
    assert reason is not None
    assert "no memory controller" in reason.what


def test_no_control_groups_are_told(tmp_path):
    reason = memory.missing_requirement(tmp_path)
    assert reason is not None
    assert "no control groups of version 2" in reason.what


def test_no_bound_is_needed_for_all_of_the_memory(tmp_path):
    with memory.bounded("x", memory.memory_bytes(), root=tmp_path) as needed:
        assert not needed
    assert list(tmp_path.iterdir()) == []


def test_memory_is_told_the_same_after_a_boot_that_kept_more_for_itself():
    mib = 1 << 20
    assert {memory.nominal_bytes(found) for found in (368_955_392, 381_157_376)} == {384 * mib}
    assert memory.nominal_bytes(int(62.8 * 1024) * mib) == 64 * 1024 * mib
    assert memory.nominal_bytes(2048 * mib) == 2048 * mib


def test_too_little_memory_is_refused(tmp_path):
    with (
        pytest.raises(StorageError, match=r"1\.0 MiB of memory are too little"),
        memory.bounded("x", 1 << 20, root=tmp_path),
    ):
        pass


def test_refused_group_is_told(tmp_path, monkeypatch):
    root = _groups(tmp_path)
    monkeypatch.setattr(Path, "mkdir", _refuse)
    with pytest.raises(MissingRequirementError, match="cannot limit memory"), memory.bounded("x", 128 << 20, root=root):
        pass


def _refuse(*_, **__):
    raise PermissionError(1, "Operation not permitted")


# -------------------------------------------------------------------------------------------------------------- quiet


def test_device_that_is_never_idle_is_told(tmp_path, monkeypatch):
    looks = iter(range(10_000))
    monkeypatch.setattr("snapmgr.bench.measure.quiet.requests", lambda _: (((next(looks), 0, 0),), 0))
    monkeypatch.setattr("snapmgr.bench.measure.quiet.flush", lambda *_: None)
    told = []
    waited_s = wait_until_idle(tmp_path, ["/dev/sdx"], CommandRunner(), told.append, at_most_s=0.6)
    assert 0.6 <= waited_s < 5
    assert told
    assert "/dev/sdx" in told[0]


def test_requests_under_way_are_no_rest(tmp_path, monkeypatch):
    under_way = iter([1] * 10 + [0] * 1000)
    monkeypatch.setattr("snapmgr.bench.measure.quiet.requests", lambda _: (((7, 7, 7),), next(under_way)))
    monkeypatch.setattr("snapmgr.bench.measure.quiet.flush", lambda *_: None)
    assert wait_until_idle(tmp_path, ["/dev/sdx"], CommandRunner(), lambda _: None) >= 0.7


def test_nothing_to_count_is_idle():
    assert requests([]) == ((), 0)


@pytest.mark.parametrize("name", sorted({stack.backend for stack in STACKS.values() if stack.backend}))
def test_each_backend_of_a_stack_makes_its_storage(name):
    assert isinstance(make_backend(name, {}, CommandRunner(), KernelMounter()), Provisioner)
