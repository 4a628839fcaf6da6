"""The Vagrant machine, as far as it can be looked at without a hypervisor."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.needs("vagrant")
def test_vagrant_takes_the_vagrantfile_and_refuses_a_broken_one(tmp_path):
    def validate(text: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / str(len(text))
        folder.mkdir()
        (folder / "Vagrantfile").write_text(text)
        (folder / "provision.sh").touch()
        # Without a hypervisor no provider can be had, and what is said of providers is not looked at.
        environment = {**os.environ, "HOME": str(tmp_path), "VAGRANT_HOME": str(tmp_path / "home")}
        argv = ["vagrant", "validate", "--ignore-provider"]
        return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=False)

    text = (ROOT / "vagrant" / "Vagrantfile").read_text()
    done = validate(text)
    assert done.returncode == 0, done
    assert validate(text.replace("vm.hostname", "vm.hosts_name")).returncode != 0


def test_vagrant_provides_what_run_installs_for_the_guest_but_the_guest_itself():
    def packages(file: str, array: str) -> set[str]:
        found = re.search(rf"^{array}=\(([^)]*)\)", (ROOT / file).read_text(), re.MULTILINE)
        assert found is not None
        return set(found[1].split())

    of_uml, of_rsync = {"user-mode-linux", "busybox-static"}, {"rsync"}
    assert packages("vagrant/provision.sh", "packages") - of_rsync == packages("run", "guest_packages") - of_uml
