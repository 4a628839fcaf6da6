#!/usr/bin/env bash
# Makes a fresh Debian 12 ready for vagrant/guest-test: packages, .venv, and the scratch disk's name in a file.
set -euo pipefail

# The guest's packages of ./run, without User Mode Linux: this machine has a kernel with device-mapper.
packages=(cryptsetup-bin kmod lvm2 mdadm rsync thin-provisioning-tools udev)
export DEBIAN_FRONTEND=noninteractive
options=(-o DPkg::Lock::Timeout=300 -o Acquire::Retries=3)

apt-get "${options[@]}" update
apt-get "${options[@]}" install -y --no-install-recommends "${packages[@]}"
/snapmgr/run setup

disk=$(readlink -e /dev/disk/by-id/*snapmgr-scratch) || {
  printf 'provision: there is no scratch disk: no link in /dev/disk/by-id ends with "snapmgr-scratch"\n' >&2
  exit 1
}
printf '%s\n' "$disk" >/etc/snapmgr-test-dev
printf 'provision: ready; SNAPMGR_TEST_DEV=%s /snapmgr/vagrant/guest-test wipes that disk and runs the tests\n' "$disk"
