"""Implements the common part of mariadb-backup and XtraBackup, which copy a server's files and apply redo log."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import asdict

from snapmgr.contract.errors import CommandError, ConfigError, MissingRequirementError, NotQuiescedError, StorageError
from snapmgr.contract.records import Reason
from snapmgr.mysql.connect.identity import program_of
from snapmgr.mysql.datadir.origin import version_number
from snapmgr.physical.tools.infofile import read_info
from snapmgr.physical.tools.request import BackupInfo, BrokenChainError, ToolBackup
from snapmgr.physical.tools.source import BackupSource, open_source
from snapmgr.physical.tools.stagefolder import give_to, measure, require_empty
from snapmgr.physical.tools.toolrun import login_file, require_completed, run_tool
from snapmgr.physical.tools.toolwatch import Watch
from snapmgr.system.command import CommandRunner, find_program
from snapmgr.system.trust import changeable, exchangeable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.catalog.manifest import Position, SourcePosition
    from snapmgr.catalog.physical import ToolName
    from snapmgr.physical.tools.request import ApplyRequest, CopyRequest

_VERSION = re.compile(r"(?:MariaDB server|version) (?P<version>\d+\.\d+\.\d+\S*)")
# Options that we set ourselves, that do not make a folder of files, or that make a backup incomplete or its position
# inexact. Matched by the start of their names, because the tools accept any unique prefix.
_OURS = re.compile(
    r"--(?:defaults|no-defaults|print-defaults|login-path|backup$|prepare|copy-back|move-back|decompress|decrypt|target"
    r"|incremental|user|password|host|port|socket|protocol|ssl|datadir|stream|compress|encrypt|no-lock|apply-log"
    r"|databases|tables|export|history|slave-info|parallel|throttle|use-memory|log-copy-interval=0|extra-lsndir)"
)
_OURS_SHORT = re.compile(r"-[a-zA-Z]")


class CopyTool(ABC):
    """A program that copies the files of a running server; see `snapmgr.physical.tools.request.Tool`."""

    name: ToolName
    increments = True
    programs: ClassVar[tuple[str, ...]]
    package: ClassVar[str]

    def __init__(
        self, *, program: str | None = None, server_version: str = "", server_program: str | None = None
    ) -> None:
        """Use only the program at `program`, or else a fitting version beside the server's program or in the PATH."""
        self._program = program
        self._server_version = server_version
        self._server_program = server_program

    def backup_argv(self, program: str, login: str, request: CopyRequest, *, replica: bool) -> list[str]:
        """Return the command line of a backup; `login` is the option file to log in with."""
        return [
            program,
            # Must come first. The tools read no other option file.
            f"--defaults-file={login}",
            "--backup",
            f"--target-dir={request.folder}",
            *self.own_backup_options(request),
            f"--parallel={request.parallel}",
            *([f"--throttle={request.throttle}"] if request.throttle else []),
            *([f"--incremental-lsn={request.from_lsn}"] if request.from_lsn else []),
            *(["--slave-info"] if replica else []),
            *request.options,
        ]

    def own_backup_options(self, request: CopyRequest) -> list[str]:  # noqa: ARG002 - for the tools that have some
        """Return the options of a backup that the other tool does not have."""
        return []

    def apply_argv(self, program: str, request: ApplyRequest) -> list[str]:
        """Return the command line that applies redo, or an increment."""
        return [
            program,
            # Ignore this machine's options: those of the server are in backup-my.cnf.
            "--no-defaults",
            "--prepare",
            *self.own_apply_options(request),
            f"--target-dir={request.folder}",
            *([f"--use-memory={request.use_memory_bytes}"] if request.use_memory_bytes else []),
            *([f"--incremental-dir={request.increment}"] if request.increment else []),
            *request.options,
        ]

    def own_apply_options(self, request: ApplyRequest) -> list[str]:  # noqa: ARG002 - the same
        """Return the options of a prepare that the other tool does not have."""
        return []

    @abstractmethod
    def why_inexact(self, source: BackupSource) -> str:
        """Return why the positions that the tool records are not exact; "" if they are. Raises MysqlError."""

    @abstractmethod
    def positions(
        self, source: BackupSource, info: BackupInfo, folder: str
    ) -> tuple[Position | None, tuple[SourcePosition, ...]]:
        """Return the exact positions among those that the tool recorded. Raises MysqlError, StorageError."""

    def missing(self) -> tuple[Reason, ...]:
        """Return the missing requirements."""
        try:
            self._find(self._server_version, self._server_program)
        except MissingRequirementError as error:
            return (Reason(what=error.message, hint=error.hint or ""),)
        return ()

    def back_up(self, request: CopyRequest) -> ToolBackup:
        """Back up the server into the folder."""
        _check_options(request.options)
        program = self._find(request.identity.version, self._server_program or program_of(request.identity.pid))
        require_empty(request.folder)
        with open_source(request.credentials, request.identity, self.name) as source:
            source.require_lsn(request.from_lsn)
            inexact = self.why_inexact(source)
            expected = None if request.from_lsn else source.data_bytes()
            watch = Watch(request.progress, expected, current_lsn=source.current_lsn, redo_bytes=source.redo_bytes())
            with _nothing_finished_on_failure(request.folder):
                with login_file(request.credentials) as login:
                    argv = self.backup_argv(program, login, request, replica=bool(source.channels))
                    ended = run_tool(argv, log=request.log, time_limit_s=request.time_limit_s, watch=watch.look)
                require_completed(ended, f"{self.name}: the backup", account=source.account)
                info = read_info(request.folder)
                _require_what_was_asked(info, request, self.name)
                position, sources = (None, ()) if inexact else self._positions(source, info, request)
                if os.geteuid() == 0:
                    give_to(request.folder, request.identity.uid, request.identity.gid)
                size_bytes, files = measure(request.folder)
        known = asdict(info) | {"position": position}
        return ToolBackup(**known, sources=sources, size_bytes=size_bytes, files=files)

    def _positions(
        self, before: BackupSource, info: BackupInfo, request: CopyRequest
    ) -> tuple[Position | None, tuple[SourcePosition, ...]]:
        """Return the exact positions, judged also by the server's state after the backup.

        None if the server can no longer be reached: the backup itself is complete.
        """
        with (
            suppress(NotQuiescedError, MissingRequirementError),
            open_source(request.credentials, request.identity, self.name) as now,
        ):
            same = {one.title for one in before.channels} == {one.title for one in now.channels}
            if same and not self.why_inexact(now):
                return self.positions(now, info, request.folder)
        return None, ()

    def apply(self, request: ApplyRequest) -> None:
        """Apply redo, or an increment, in place."""
        _check_options(request.options)
        before = read_info(request.folder)
        program = self._find(before.server_version, self._server_program)
        increment = None if request.increment is None else read_info(request.increment)
        require_applicable(before, increment, request, self.name)
        info = os.stat(request.folder)
        watch = Watch(request.progress)
        ended = run_tool(
            self.apply_argv(program, request), log=request.log, time_limit_s=request.time_limit_s, watch=watch.look
        )
        require_completed(ended, f"{self.name}: the prepare")
        after = read_info(request.folder)
        wanted = before.to_lsn if increment is None else increment.to_lsn
        if after.state == "raw" or after.to_lsn < wanted:
            raise StorageError(
                f"{self.name} reports success, but {request.folder} is {after.state}, up to LSN {after.to_lsn} of "
                f"{wanted}",
                hint=f"the log: {request.log}",
            )
        if os.geteuid() == 0:
            give_to(request.folder, info.st_uid, info.st_gid)

    def _find(self, wanted: str, server_program: str | None) -> str:
        """Return the path of the program that fits a server of the version `wanted`. Raises MissingRequirementError."""
        seen: list[str] = []
        for path in self._candidates(server_program):
            try:
                answer = CommandRunner().run([path, "--version"])
            except (CommandError, MissingRequirementError) as error:
                seen.append(error.message)
                continue
            match = _VERSION.search(answer.stdout + answer.stderr)
            if match is None:
                seen.append(f"{path} is not {self.name}")
            elif fits(match["version"], wanted):
                return path
            else:
                seen.append(f"{path} has version {match['version']}, the server {wanted}")
        raise MissingRequirementError(
            f"no {self.name} for this server: {'; '.join(seen) or 'it is not installed'}",
            hint=f"apt-get install {self.package} in the server's series (another series may silently make damaged "
            "backups), or name its program in the configuration",
        )

    def _candidates(self, server_program: str | None) -> Iterator[str]:
        if self._program is not None:
            yield self._program
            return
        if server_program is not None:
            folder = os.path.dirname(server_program)
            for name in self.programs:
                for path in (os.path.join(folder, name), os.path.join(os.path.dirname(folder), "bin", name)):
                    # Others name this path: as root we run only programs that root installed.
                    with suppress(OSError):
                        if changeable(os.stat(path)) is None and exchangeable(Path(path)) is None:
                            yield path
        for name in self.programs:
            with suppress(MissingRequirementError):
                yield find_program(name)


def fits(tool_version: str, server_version: str) -> bool:
    """Return whether a tool fits a server: both must be of one series (10.11, 8.4). Pure.

    mariadb-backup 10.11 backs up an 11.8 server without an error (tested), and leaves out objects it does not know.
    """
    return not version_number(server_version) or version_number(tool_version)[:2] == version_number(server_version)[:2]


def require_applicable(before: BackupInfo, increment: BackupInfo | None, request: ApplyRequest, tool: ToolName) -> None:
    """Raise BrokenChainError or StorageError unless redo, or this increment, can be applied to the backup."""
    if before.tool != tool:
        raise StorageError(f"{request.folder} was made by {before.tool}, not by {tool}")
    if before.is_increment:
        raise StorageError(
            f"{request.folder} is an increment (from LSN {before.from_lsn}), not a whole backup",
            hint="apply it to the backup that it follows on",
        )
    if increment is None:
        return
    if increment.tool != tool or increment.state != "raw" or not increment.is_increment:
        raise BrokenChainError(f"{request.increment} is not an applicable increment of {tool}")
    if before.state == "raw":
        raise StorageError(f"{request.folder} needs its redo log applied before an increment", hint="prepare it first")
    if tool == "xtrabackup" and before.state == "prepared":
        raise BrokenChainError(
            f"{request.folder} was prepared without --apply-log-only: it takes no further increment",
            hint="a full backup is needed",
        )
    if increment.from_lsn != before.to_lsn:
        raise BrokenChainError(
            f"the increment {request.increment} begins at LSN {increment.from_lsn}, but {request.folder} ends at "
            f"{before.to_lsn}",
            hint="a full backup is needed",
        )
    if version_number(increment.server_version) != version_number(before.server_version):
        raise BrokenChainError(
            f"the server was {before.server_version} and is {increment.server_version}", hint="a full backup is needed"
        )


def _check_options(options: tuple[str, ...]) -> None:
    for option in options:
        if not option.startswith("--") or _OURS.match(option.replace("_", "-")) or _OURS_SHORT.match(option):
            raise ConfigError(
                f"the tool option {option.partition('=')[0]} is not allowed",
                hint="use the form --name=value; options that snapmgr sets, or that leave out data, are refused",
            )


def _require_what_was_asked(info: BackupInfo, request: CopyRequest, tool: ToolName) -> None:
    if info.tool != tool or info.state != "raw" or info.from_lsn != request.from_lsn:
        raise StorageError(
            f"{tool} made a backup of {info.tool} from LSN {info.from_lsn} ({info.state}) instead of one from LSN "
            f"{request.from_lsn}",
            hint=f"the log: {request.log}",
        )


@contextmanager
def _nothing_finished_on_failure(folder: str) -> Iterator[None]:
    """After an exception make sure that nothing looks like a finished backup."""
    try:
        yield
    except BaseException:
        for name in ("mariadb_backup_info", "xtrabackup_info"):
            with suppress(OSError):
                os.unlink(os.path.join(folder, name))
        raise
