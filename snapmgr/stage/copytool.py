"""What mariadb-backup and XtraBackup have in common: both copy a running server's files and apply redo log to them."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from snapmgr.contract.errors import CommandError, ConfigError, MissingRequirementError, NotQuiescedError, StorageError
from snapmgr.contract.records import Reason
from snapmgr.mysql.connect.identity import program_of
from snapmgr.mysql.datadir.origin import version_number
from snapmgr.stage.infofile import read_state
from snapmgr.stage.request import BrokenChainError, Filled, Staged
from snapmgr.stage.source import Source, open_source
from snapmgr.stage.stagefolder import give_to, measure, require_empty
from snapmgr.stage.toolrun import login_file, require_completed, run_tool
from snapmgr.stage.toolwatch import Watch
from snapmgr.system.command import CommandRunner, find_program
from snapmgr.system.trust import changeable, exchangeable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.catalog.manifest import Position, SourcePosition
    from snapmgr.catalog.physical import ToolName
    from snapmgr.stage.request import ApplyRequest, FillRequest

_VERSION = re.compile(r"(?:MariaDB server|version) (?P<version>\d+\.\d+\.\d+\S*)")
# Options that we give ourselves, that make no folder of files, or that take away what makes a backup whole or its
# position exact. By the start of their names: the tools take any beginning that is unique.
_OURS = re.compile(
    r"--(?:defaults|no-defaults|print-defaults|login-path|backup$|prepare|copy-back|move-back|decompress|decrypt|target"
    r"|incremental|user|password|host|port|socket|protocol|ssl|datadir|stream|compress|encrypt|no-lock|apply-log"
    r"|databases|tables|export|history|slave-info|parallel|throttle|use-memory|log-copy-interval=0|extra-lsndir)"
)
_OURS_SHORT = re.compile(r"-[a-zA-Z]")


def fill_options(request: FillRequest, *, replica: bool) -> list[str]:
    """Return the end of a backup's command line, which is the same for all of these tools."""
    return [
        f"--parallel={request.parallel}",
        *([f"--throttle={request.throttle}"] if request.throttle else []),
        *([f"--incremental-lsn={request.from_lsn}"] if request.from_lsn else []),
        *(["--slave-info"] if replica else []),
        *request.options,
    ]


def apply_options(request: ApplyRequest) -> list[str]:
    """Return the same of applying redo, or an increment."""
    return [
        f"--target-dir={request.folder}",
        *([f"--use-memory={request.use_memory_bytes}"] if request.use_memory_bytes else []),
        *([f"--incremental-dir={request.increment}"] if request.increment else []),
        *request.options,
    ]


class CopyTool(ABC):
    """A program that copies the files of a running server; see `snapmgr.stage.request.Tool`."""

    name: ToolName
    increments = True
    applies = True
    programs: ClassVar[tuple[str, ...]]
    package: ClassVar[str]

    def __init__(
        self, *, program: str | None = None, server_version: str = "", server_program: str | None = None
    ) -> None:
        """Take the program at `program` alone, or one beside the server's or in the PATH that fits its version."""
        self._program = program
        self._server_version = server_version
        self._server_program = server_program

    @abstractmethod
    def fill_argv(self, program: str, login: str, request: FillRequest, *, replica: bool) -> list[str]:
        """Return the command line of a backup; `login` is the option file to log in with."""

    @abstractmethod
    def apply_argv(self, program: str, request: ApplyRequest) -> list[str]:
        """Return the command line that applies redo, or an increment."""

    @abstractmethod
    def why_inexact(self, source: Source) -> str:
        """Return why no position that the tool writes down is exact; "" if they are. Raises MysqlError."""

    @abstractmethod
    def positions(
        self, source: Source, staged: Staged, folder: str
    ) -> tuple[Position | None, tuple[SourcePosition, ...]]:
        """Return what the tool wrote down where it is exact. Raises MysqlError, StorageError."""

    def missing(self) -> tuple[Reason, ...]:
        """Return what this machine lacks."""
        try:
            self._find(self._server_version, self._server_program)
        except MissingRequirementError as error:
            return (Reason(what=error.message, hint=error.hint or ""),)
        return ()

    def fill(self, request: FillRequest) -> Filled:
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
                    argv = self.fill_argv(program, login, request, replica=bool(source.channels))
                    ended = run_tool(argv, log=request.log, time_limit_s=request.time_limit_s, watch=watch.look)
                require_completed(ended, f"{self.name}: the backup", account=source.account)
                staged = read_state(request.folder)
                _require_what_was_asked(staged, request, self.name)
                position, sources = (None, ()) if inexact else self._positions(source, staged, request)
                if os.geteuid() == 0:
                    give_to(request.folder, request.identity.uid, request.identity.gid)
                size_bytes, files = measure(request.folder)
        return Filled(
            tool=self.name,
            tool_version=staged.tool_version,
            state=staged.state,
            from_lsn=staged.from_lsn,
            to_lsn=staged.to_lsn,
            last_lsn=staged.last_lsn,
            position=position,
            sources=sources,
            size_bytes=size_bytes,
            files=files,
        )

    def _positions(
        self, before: Source, staged: Staged, request: FillRequest
    ) -> tuple[Position | None, tuple[SourcePosition, ...]]:
        """Return the positions that are exact, also by what the server has become during the backup.

        None if it cannot be asked any more: the backup itself is whole.
        """
        with (
            suppress(NotQuiescedError, MissingRequirementError),
            open_source(request.credentials, request.identity, self.name) as now,
        ):
            same = {one.title for one in before.channels} == {one.title for one in now.channels}
            if same and not self.why_inexact(now):
                return self.positions(now, staged, request.folder)
        return None, ()

    def apply(self, request: ApplyRequest) -> None:
        """Apply redo, or an increment, in place."""
        _check_options(request.options)
        before = read_state(request.folder)
        program = self._find(before.server_version, self._server_program)
        increment = None if request.increment is None else read_state(request.increment)
        require_applicable(before, increment, request, self.name)
        info = os.stat(request.folder)
        watch = Watch(request.progress)
        ended = run_tool(
            self.apply_argv(program, request), log=request.log, time_limit_s=request.time_limit_s, watch=watch.look
        )
        require_completed(ended, f"{self.name}: the prepare")
        after = read_state(request.folder)
        wanted = before.to_lsn if increment is None else increment.to_lsn
        if after.state == "raw" or after.to_lsn < wanted:
            raise StorageError(
                f"{self.name} says that it applied all to {request.folder}, but its files do not: they are "
                f"{after.state}, up to LSN {after.to_lsn} of {wanted}",
                hint=f"the log: {request.log}",
            )
        if os.geteuid() == 0:
            give_to(request.folder, info.st_uid, info.st_gid)

    def _find(self, wanted: str, server_program: str | None) -> str:
        """Return the path of the program that fits a server of the version `wanted`. Raises MissingRequirementError."""
        seen: list[str] = []
        for path in self._candidates(server_program):
            try:
                said = CommandRunner().run([path, "--version"])
            except (CommandError, MissingRequirementError) as error:
                seen.append(error.message)
                continue
            match = _VERSION.search(said.stdout + said.stderr)
            if match is None:
                seen.append(f"{path} is no {self.name}")
            elif fits(match["version"], wanted):
                return path
            else:
                seen.append(f"{path} is of version {match['version']}, the server of {wanted}")
        raise MissingRequirementError(
            f"no {self.name} for this server: {'; '.join(seen) or 'it is not installed'}",
            hint=f"apt-get install {self.package} in the server's series: one of another series may make backups that "
            "are damaged, without a word; or name its program in the configuration",
        )

    def _candidates(self, server_program: str | None) -> Iterator[str]:
        if self._program is not None:
            yield self._program
            return
        if server_program is not None:
            folder = os.path.dirname(server_program)
            for name in self.programs:
                for path in (os.path.join(folder, name), os.path.join(os.path.dirname(folder), "bin", name)):
                    # What others named: as root we obey only what root has installed.
                    with suppress(OSError):
                        if changeable(os.stat(path)) is None and exchangeable(Path(path)) is None:
                            yield path
        for name in self.programs:
            with suppress(MissingRequirementError):
                yield find_program(name)


def fits(tool_version: str, server_version: str) -> bool:
    """Return whether a tool may be used on a server: both of one series (10.11, 8.4). Pure.

    mariadb-backup 10.11 backs up an 11.8 server without a complaint (tried), and what it does not know it leaves out.
    """
    return not version_number(server_version) or version_number(tool_version)[:2] == version_number(server_version)[:2]


def require_applicable(before: Staged, increment: Staged | None, request: ApplyRequest, tool: ToolName) -> None:
    """Raise unless redo, or this increment, can be applied to what is there: BrokenChainError, StorageError."""
    if before.tool != tool:
        raise StorageError(f"{request.folder} was made by {before.tool}, not by {tool}")
    if before.is_increment:
        raise StorageError(
            f"{request.folder} is an increment (from LSN {before.from_lsn}): by itself it is of no use",
            hint="apply it to the backup that it follows on",
        )
    if increment is None:
        return
    if increment.tool != tool or increment.state != "raw" or not increment.is_increment:
        raise BrokenChainError(f"{request.increment} is no increment of {tool} that can be applied")
    if before.state == "raw":
        raise StorageError(
            f"the redo log of {request.folder} has to be applied before an increment can be", hint="prepare it first"
        )
    if tool == "xtrabackup" and before.state == "prepared":
        raise BrokenChainError(
            f"{request.folder} was prepared without --apply-log-only: no increment can be applied any more",
            hint="a full backup is needed",
        )
    if increment.from_lsn != before.to_lsn:
        raise BrokenChainError(
            f"the increment {request.increment} begins at LSN {increment.from_lsn}, and what it is to be applied to "
            f"ends at {before.to_lsn}",
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
                hint="options of the form --name=value, and none that snapmgr gives itself or that leave data out",
            )


def _require_what_was_asked(staged: Staged, request: FillRequest, tool: ToolName) -> None:
    if staged.tool != tool or staged.state != "raw" or staged.from_lsn != request.from_lsn:
        raise StorageError(
            f"{tool} made a backup of {staged.tool} from LSN {staged.from_lsn} ({staged.state}), and was asked for one "
            f"from LSN {request.from_lsn}",
            hint=f"the log: {request.log}",
        )


@contextmanager
def _nothing_finished_on_failure(folder: str) -> Iterator[None]:
    """Make sure that what an exception leaves in the folder is not taken for a backup."""
    try:
        yield
    except BaseException:
        for name in ("mariadb_backup_info", "xtrabackup_info"):
            with suppress(OSError):
                os.unlink(os.path.join(folder, name))
        raise
