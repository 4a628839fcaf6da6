"""Facts about machines that the tests do not run on, from what their kernels would show."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from snapmgr.bench.device import hostfacts
from snapmgr.bench.device.hostfacts import cpu_facts, host_facts, tool_versions, virtualisation
from snapmgr.contract.errors import CommandError, MissingRequirementError
from snapmgr.contract.records import Completed
from snapmgr.system.command import CommandRunner


class Programs:
    """A runner whose programs print what they are told to."""

    def __init__(self, **printed: tuple[int, str, str]) -> None:
        self.printed = printed

    def run(self, argv, *, ok=(0,), **_options):
        if argv[0] not in self.printed:
            raise MissingRequirementError(f"the program {argv[0]} is not installed")
        code, out, err = self.printed[argv[0]]
        if code not in ok:
            raise CommandError(f"{argv[0]} failed")
        return Completed(argv=tuple(argv), returncode=code, stdout=out, stderr=err)


@pytest.fixture(name="roots")
def _roots(tmp_path):
    proc, sysfs = tmp_path / "proc", tmp_path / "sys"
    cpus = sysfs / "devices/system/cpu"
    (cpus / "cpu0/cpufreq").mkdir(parents=True)
    (cpus / "vulnerabilities").mkdir()
    (cpus / "smt").mkdir()
    (cpus / "smt/active").write_text("1\n")
    (cpus / "cpu0/cpufreq/scaling_governor").write_text("powersave\n")
    (cpus / "vulnerabilities/l1tf").write_text("Not affected\n")
    (cpus / "vulnerabilities/mds").write_text("Mitigation: Clear CPU buffers\n")
    proc.mkdir()
    return {"proc": proc, "sysfs": sysfs}


def test_a_processor_with_what_slows_it(roots):
    (roots["proc"] / "cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD  EPYC 7B13\nflags\t\t: fpu sse\n")
    facts = cpu_facts(**roots)
    assert (facts["model"], facts["smt"], facts["governor"]) == ("AMD EPYC 7B13", True, "powersave")
    assert facts["mitigations"] == {"mds": "Mitigation: Clear CPU buffers"}


def test_a_kernel_in_user_mode_is_told_and_its_hosts_name_is_not(roots):
    (roots["proc"] / "cpuinfo").write_text(
        "processor\t: 0\nvendor_id\t: User Mode Linux\nmodel name\t: UML\nmode\t\t: skas\n"
        "host\t\t: Linux secret-host 6.1.0 #1 SMP x86_64\n"
    )
    assert virtualisation(Programs(), **roots)["vm"] == "uml"
    assert "secret-host" not in json.dumps([cpu_facts(**roots), virtualisation(Programs(), **roots)])


@pytest.mark.parametrize(
    ("flags", "detected", "vm"),
    [
        ("fpu", (1, "none\n", ""), "none"),
        ("fpu hypervisor", (1, "none\n", ""), "unknown hypervisor"),
        ("fpu hypervisor", (0, "kvm\n", ""), "kvm"),
        ("fpu", None, None),
        ("fpu hypervisor", None, "unknown hypervisor"),
    ],
)
def test_a_hypervisor_is_found_by_systemd_or_by_the_processor(roots, flags, detected, vm):
    (roots["proc"] / "cpuinfo").write_text(f"flags\t\t: {flags}\n")
    programs = Programs(**({"systemd-detect-virt": detected} if detected else {}))
    assert virtualisation(programs, **roots)["vm"] == vm


def test_a_machines_make_is_told(roots):
    folder = roots["sysfs"] / "class/dmi/id"
    folder.mkdir(parents=True)
    (folder / "sys_vendor").write_text("QEMU\n")
    (folder / "product_name").write_text("Standard PC\n")
    assert virtualisation(Programs(), **roots)["dmi"] == "QEMU Standard PC"


def test_versions_are_picked_out_of_what_programs_print():
    printed = {
        "mkfs.btrfs": (0, "mkfs.btrfs, part of btrfs-progs v6.2\n", ""),
        "mkfs.ext4": (0, "", "mke2fs 1.47.0 (5-Feb-2023)\n"),
        "lvm": (0, "  LVM version:     2.03.16(2) (2022-05-18)\n", ""),
        "fio": (0, "fio-3.33\n", ""),
        "mariadbd": (0, "mariadbd  Ver 10.11.6-MariaDB-0+deb12u1 for debian-linux-gnu on x86_64\n", ""),
        "sysbench": (127, "", "broken\n"),
    }
    assert tool_versions(Programs(**printed)) == {
        "mkfs.btrfs": "6.2",
        "mkfs.ext4": "1.47.0",
        "lvm": "2.03.16",
        "fio": "3.33",
        "mariadbd": "10.11.6-MariaDB-0+deb12u1",
        "sysbench": "unknown",
    }


def test_a_scheduler_is_the_one_in_brackets():
    assert [hostfacts._chosen(text) for text in ("none [mq-deadline] bfq", "none", "")] == ["mq-deadline", "none", None]


@pytest.mark.skipif(not list(Path("/dev").glob("[sv]d[a-z]")), reason="no disk here")
def test_this_machines_facts_are_json_without_its_name_unless_asked():
    disk = str(next(Path("/dev").glob("[sv]d[a-z]")))
    plain, named = (json.dumps(host_facts(disk, name=name, runner=Programs())) for name in (False, True))
    host = os.uname().nodename
    assert json.loads(named)["host"] == host
    assert "host" not in json.loads(plain)
    facts = json.loads(plain)
    assert facts["kernel"] == os.uname().release
    assert facts["device"]["size_bytes"] > 0
    assert facts["cpu"]["usable"] >= 1
    assert facts["packages"]["snapmgr"]


@pytest.mark.skipif(shutil.which("wipefs", path="/usr/sbin:/sbin") is None, reason="no util-linux")
def test_an_installed_program_tells_its_version():
    assert tool_versions(CommandRunner())["wipefs"][0] in "23"
