"""Installs and removes schedules: systemd units, or a file for cron.

Each file begins with a line that names its job and snapmgr; a file without that line is never touched.
"""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec import Struct, field

from snapmgr.contract.errors import CommandError, MissingRequirementError, SnapmgrError
from snapmgr.schedule.command import own_command
from snapmgr.schedule.cron import ENVIRONMENT, cron_text, shell_command
from snapmgr.schedule.systemd import PATH, service_text, timer_text
from snapmgr.system.command import CommandRunner
from snapmgr.system.files import is_abandoned, replace_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.catalog.manifest import Schedule
    from snapmgr.catalog.store import Catalog
    from snapmgr.config.model import Job
    from snapmgr.contract.backend import Runner

Kind = Literal["systemd", "cron"]

_MAX_BYTES = 1 << 16
_CHECK_S = 120.0


class Machine(Struct, frozen=True, kw_only=True):
    """The machine that schedules are installed on. `root` is its root directory: "/" except for tests and images."""

    root: Path = Path("/")
    runner: Runner = field(default_factory=CommandRunner)

    @property
    def units(self) -> Path:
        """The folder of the administrator's units."""
        return self.root / "etc/systemd/system"

    @property
    def crontabs(self) -> Path:
        """The folder of the system's crontabs."""
        return self.root / "etc/cron.d"

    @property
    def runs_systemd(self) -> bool:
        """Whether systemd is the machine's init now (sd_booted(3))."""
        return (self.root / "run/systemd/system").is_dir()

    @property
    def has_cron(self) -> bool:
        """Whether a cron is installed that reads /etc/cron.d."""
        return self.crontabs.is_dir() and any(
            (self.root / folder / name).exists() for folder in ("usr/sbin", "sbin") for name in ("cron", "crond")
        )

    def choose(self) -> Kind | None:
        """Return the scheduler to use: systemd if it runs, else cron if it is installed, else None."""
        if self.runs_systemd:
            return "systemd"
        return "cron" if self.has_cron else None

    def paths(self, job: str) -> dict[Kind, tuple[Path, ...]]:
        """Return the files of a job's schedule, the service before the timer that starts it."""
        name = unit_name(job)
        return {
            "systemd": (self.units / f"{name}.service", self.units / f"{name}.timer"),
            "cron": (self.crontabs / name,),
        }


def unit_name(job: str) -> str:
    """Return the name of a job's units (without ".timer" and ".service") and of its cron file."""
    return f"snapmgr-{job}"


def marker(job: str) -> str:
    """Return the first line of every file of a job's schedule: only files with this line are ours."""
    return f"# Written by `snapmgr schedule install {job}`; removed by `snapmgr schedule remove {job}`."


class SchedulePlan(Struct, frozen=True, kw_only=True):
    """The schedule and the files that `install` writes."""

    schedule: Schedule
    files: dict[Path, str]
    """The texts, by path, in the order in which they are written."""
    command: tuple[str, ...]


def plan_install(machine: Machine, job: Job, schedule: Schedule, config_path: Path) -> SchedulePlan:
    """Return what `install` would write. Raises ConfigError if the files cannot express the schedule."""
    command = own_command(config_path, job.name)
    line = marker(job.name)
    if schedule.kind == "systemd":
        texts: tuple[str, ...] = (
            service_text(line, job.name, command, job.source),
            timer_text(line, job.name, schedule.expression, schedule.delay_s),
        )
    else:
        texts = (cron_text(line, schedule.expression, command),)
    return SchedulePlan(
        schedule=schedule, files=dict(zip(machine.paths(job.name)[schedule.kind], texts, strict=True)), command=command
    )


def check_command(machine: Machine, plan: SchedulePlan) -> None:
    """Run the scheduled command line with ``--dry-run`` in its later, nearly empty environment.

    Raises SnapmgrError with its message if it fails.
    """
    dry = (*plan.command, "--dry-run")
    argv = ("env", "-i", f"PATH={PATH}", *dry)
    if plan.schedule.kind == "cron":
        given = {**ENVIRONMENT, "HOME": "/root", "LOGNAME": "root"}
        argv = ("env", "-i", *(f"{name}={value}" for name, value in given.items()), "sh", "-c", shell_command(dry))
    try:
        machine.runner.run(argv, timeout_s=_CHECK_S)
    except CommandError as error:
        raise SnapmgrError(
            f"the command of the schedule does not work in an empty environment: {error.message}",
            hint=f"see: snapmgr doctor {plan.schedule.job}; to install it anyway: --unchecked",
        ) from None


def install(machine: Machine, catalog: Catalog, plan: SchedulePlan) -> None:
    """Write the files, check them, and enable the schedule.

    After a failure the files are as before. A schedule of the other kind is removed. Raises
    MissingRequirementError without the privilege or the program, SnapmgrError if another file has the name or systemd
    rejects the units.
    """
    job = plan.schedule.job
    for paths in machine.paths(job).values():
        for path in paths:
            _refuse_foreign(path, job)
    catalog.make()
    fresh = not any(path.exists() for path in plan.files)
    before = next((one for one in catalog.schedules()[0] if one.job == job), None)
    # Recorded first: if we are killed now, `status` reports missing runs instead of watching nothing.
    catalog.write_schedule(plan.schedule)
    try:
        with _restored_on_failure(tuple(plan.files)):
            for path, text in plan.files.items():
                _write(path, text.encode())
            if plan.schedule.kind == "systemd":
                _verify_units(machine, tuple(plan.files))
                _enable(machine, job)
    except BaseException:
        with suppress(SnapmgrError):  # report only the first error
            if before is None:
                catalog.drop_schedule(job)
            else:
                catalog.write_schedule(before)
            if plan.schedule.kind == "systemd":
                _forget_units(machine, job, gone=fresh)
        raise
    other: Kind = "cron" if plan.schedule.kind == "systemd" else "systemd"
    _take_away(machine, job, other)


def remove(machine: Machine, catalog: Catalog, job: str) -> list[Path]:
    """Remove a job's schedule, of either kind, and return the removed files; idempotent.

    Raises SnapmgrError, and removes nothing, if one of the files is not ours.
    """
    for paths in machine.paths(job).values():
        for path in paths:
            _refuse_foreign(path, job)
    removed = [path for kind in ("systemd", "cron") for path in _take_away(machine, job, kind)]
    catalog.drop_schedule(job)
    return removed


def installed_files(machine: Machine, job: str) -> list[Path]:
    """Return the existing files of a job's schedule that are ours."""
    return [path for paths in machine.paths(job).values() for path in paths if _owner(path, job) == "ours"]


def is_waiting(machine: Machine, job: str) -> bool | None:
    """Return whether systemd waits for a job's next time; None where it does not run."""
    if not machine.runs_systemd:
        return None
    return (
        machine.runner.run(["systemctl", "is-active", "--quiet", f"{unit_name(job)}.timer"], ok=tuple(range(256)))
    ).returncode == 0


def last_result(machine: Machine, job: str) -> str | None:
    """Return how the last scheduled run ended, in words; None if systemd does not know."""
    if not machine.runs_systemd:
        return None
    names = ("Result", "ExecMainStatus", "ExecMainExitTimestamp")
    try:
        said = machine.runner.run(
            ["systemctl", "show", f"{unit_name(job)}.service", *(f"--property={name}" for name in names)]
        ).stdout
    except SnapmgrError:
        return None
    facts = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    if not facts.get("ExecMainExitTimestamp"):
        return None
    return (
        f"{facts.get('Result', '?')}, exit code {facts.get('ExecMainStatus', '?')}, "
        f"ended {facts['ExecMainExitTimestamp']}"
    )


# ---- files


def _owner(path: Path, job: str) -> Literal["nobody", "ours", "foreign"]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return "nobody"
    except PermissionError:
        raise MissingRequirementError(f"no right to read {path}", hint="run as root") from None
    except OSError:
        return "foreign"  # a symlink: `systemctl mask` makes one
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return "foreign"
        return "ours" if file.read(_MAX_BYTES).startswith(f"{marker(job)}\n".encode()) else "foreign"


def _refuse_foreign(path: Path, job: str) -> None:
    if _owner(path, job) == "foreign":
        raise SnapmgrError(
            f"{path} was not written by snapmgr: its first line differs, or it is not a regular file",
            hint="inspect it and move it away",
        )


@contextmanager
def _restored_on_failure(paths: tuple[Path, ...]) -> Iterator[None]:
    before = {path: path.read_bytes() if path.exists() else None for path in paths}
    try:
        yield
    except BaseException:
        for path, content in before.items():
            if content is None:
                path.unlink(missing_ok=True)
            else:
                _write(path, content)
        raise


def _write(path: Path, content: bytes) -> None:
    """Replace a file atomically."""
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _clear_unfinished(path)
        # cron skips names with a dot, systemd names without a known suffix: neither reads the unfinished file.
        # cron obeys only files that root alone can write to.
        replace_file(path, content, mode=0o644)
    except PermissionError:
        raise MissingRequirementError(f"no right to write {path}", hint="run as root") from None
    except OSError as error:
        raise SnapmgrError(f"cannot write {path}: {error.strerror}") from None


def _clear_unfinished(path: Path) -> None:
    """Remove unfinished files of killed processes for `path`."""
    for fresh in path.parent.glob(f".{path.name}.*"):
        if is_abandoned(fresh):
            fresh.unlink(missing_ok=True)


def _take_away(machine: Machine, job: str, kind: Kind) -> list[Path]:
    """Disable the timer and remove the files of one kind; an active run continues."""
    for path in machine.paths(job)[kind]:
        _clear_unfinished(path)
    there = [path for path in machine.paths(job)[kind] if _owner(path, job) == "ours"]
    if kind == "systemd":
        # The timer first: without its service it would fail at each run.
        there.reverse()
        if there and machine.runs_systemd:
            _systemctl(machine, "disable", "--now", "--quiet", f"{unit_name(job)}.timer")
        _unlink(_link(machine, job))
    for path in there:
        _unlink(path)
    if there and kind == "systemd" and machine.runs_systemd:
        _systemctl(machine, "daemon-reload")
    return there


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except NotADirectoryError:
        return
    except PermissionError:
        raise MissingRequirementError(f"no right to remove {path}", hint="run as root") from None
    except OSError as error:
        raise SnapmgrError(f"cannot remove {path}: {error.strerror}") from None


# ---- systemd


def _verify_units(machine: Machine, paths: tuple[Path, ...]) -> None:
    """Check the units with systemd-analyze, if it is installed. Raises SnapmgrError with its complaints."""
    if shutil.which("systemd-analyze", path=PATH) is None:
        return
    done = machine.runner.run(
        ["systemd-analyze", "verify", "--man=no", *(str(path) for path in paths)], ok=tuple(range(256))
    )
    # It also checks the units that ours refer to; complaints about those are ignored.
    names = tuple(path.name for path in paths)
    complaints = [line for line in done.stderr.splitlines() if any(name in line for name in names)]
    if complaints:
        raise SnapmgrError("systemd-analyze verify complains: " + "; ".join(complaints), hint="nothing was installed")


def _enable(machine: Machine, job: str) -> None:
    timer = f"{unit_name(job)}.timer"
    if machine.runs_systemd:
        _systemctl(machine, "daemon-reload")
        _systemctl(machine, "enable", "--quiet", timer)
        # Not `enable --now`: an active timer would keep its old times.
        _systemctl(machine, "restart", timer)
    else:
        _systemctl(machine, "enable", "--quiet", timer)


def _forget_units(machine: Machine, job: str, *, gone: bool) -> None:
    """After a failure make systemd reload the restored files; `gone`: there are none."""
    if gone:
        _unlink(_link(machine, job))
    if machine.runs_systemd:
        if gone:
            machine.runner.run(["systemctl", "stop", f"{unit_name(job)}.timer"], ok=tuple(range(256)))
        _systemctl(machine, "daemon-reload")


def _link(machine: Machine, job: str) -> Path:
    """Return the symlink that enables a timer."""
    return machine.units / "timers.target.wants" / f"{unit_name(job)}.timer"


def _systemctl(machine: Machine, *arguments: str) -> None:
    root = () if machine.runs_systemd else (f"--root={machine.root}",)
    machine.runner.run(["systemctl", *root, *arguments])
