"""Runs external programs: the only user of subprocess.

Argument lists only, stdin closed, a clean environment with a fixed locale, exit codes declared by the caller, bounded
stderr in errors, secrets redacted, children ended and reaped on any exception. Output goes to memory files rather than
pipes: so an abandoned program is not killed by SIGPIPE, and a daemon that it leaves with its stdout open does not block
us.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO, Self

from snapmgr.contract.errors import CommandError, MissingRequirementError
from snapmgr.contract.records import Completed, Reason
from snapmgr.contract.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROGRAM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Variables that programs may need from our caller; all others (LD_PRELOAD, TERM, LANG, passwords, …) are dropped.
_KEPT = ("HOME", "TMPDIR", "LVM_SYSTEM_DIR", "DM_DISABLE_UDEV")
_STDERR_SHOWN = 2000
_TERM_GRACE_S = 5.0

# The type that `running` yields, for modules that may not import subprocess.
Process = subprocess.Popen[bytes]

# The Debian package of each program.
_PACKAGES = {
    "mariadbd": "mariadb-server-core",
    "mariadb-install-db": "mariadb-server-core",
    "mysqld": "mysql-server-core",
    "btrfs": "btrfs-progs",
    "mkfs.btrfs": "btrfs-progs",
    "mkfs.xfs": "xfsprogs",
    "xfs_io": "xfsprogs",
    "lvs": "lvm2",
    "fio": "fio",
}


def clean_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Return the environment that every program gets: a fixed PATH and locale, HOME and TMPDIR, and `extra`."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return {"PATH": PROGRAM_PATH, "LC_ALL": "C.UTF-8"} | kept | (extra or {})


def _which(name: str) -> str | None:
    """Return the path of a program. As shutil.which, without its import of four compressors."""
    for path in (name,) if "/" in name else (os.path.join(folder, name) for folder in PROGRAM_PATH.split(":")):
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def find_program(name: str) -> str:
    """Given a program's name, return its path. Raises MissingRequirementError with the package to install."""
    found = _which(name)
    if found is None:
        package = _PACKAGES.get(name)
        hint = (
            f"apt-get install {package}" if package else f"install it, or correct its name; searched in {PROGRAM_PATH}"
        )
        raise MissingRequirementError(f"the program {name} is not installed", hint=hint)
    return found


def missing_programs(*names: str) -> tuple[Reason, ...]:
    """Return a reason for each program that is not installed."""
    found = []
    for name in names:
        try:
            find_program(name)
        except MissingRequirementError as error:
            found.append(Reason(what=error.message, hint=error.hint or ""))
    return tuple(found)


def redact(text: str, secrets: tuple[str, ...]) -> str:
    """Return `text` with every non-empty secret replaced by "***"."""
    for secret in sorted((secret for secret in secrets if secret), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _tail(text: str) -> str:
    stripped = text.strip()
    return stripped if len(stripped) <= _STDERR_SHOWN else "…" + stripped[-_STDERR_SHOWN:]


class CommandRunner:
    """The `Runner` that backends get; see `snapmgr.api.Runner` for the contract."""

    def run(
        self,
        argv: Sequence[str],
        *,
        ok: tuple[int, ...] = (0,),
        timeout_s: float | None = 60.0,
        secrets: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        abandon: bool = False,
    ) -> Completed:
        """Run `argv` to its end and return what it printed."""
        shown = redact(" ".join(argv), secrets)
        _reap_abandoned()
        with _memory_file() as out, _memory_file() as err:
            process = _start(argv, secrets=secrets, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env)
            finished = False
            try:
                finished = wait_for(process, timeout_s)
            finally:
                # Also on Ctrl-C: a program that may be abandoned must not be killed.
                if not finished and abandon:
                    _abandoned.append(process)
                elif not finished:
                    end_process(process)
            if not finished:
                raise CommandError(
                    f"{shown} did not finish within {format_duration(timeout_s or 0)}"
                    + (" and was left running" if abandon else ""),
                    hint=f"see process {process.pid}" if abandon else None,
                )
            stdout, stderr = _text(out), _text(err)
        if process.returncode not in ok:
            raise _failure(shown, process.returncode, redact(stderr, secrets) or redact(stdout, secrets))
        return Completed(argv=tuple(argv), returncode=process.returncode, stdout=stdout, stderr=stderr)

    def hold(self, argv: Sequence[str]) -> HeldCommand:
        """Start a process that becomes `argv` when told to; see `snapmgr.api.Runner.hold`."""
        return HeldCommand(argv)


class HeldCommand:
    """A program that waits to begin; see `snapmgr.api.Held`."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = tuple(argv)
        program = argv[0] if "/" in argv[0] else find_program(argv[0])
        with ExitStack() as stack:
            self._out = stack.enter_context(_memory_file())
            self._err = stack.enter_context(_memory_file())
            self._process = _start(
                ["sh", "-c", _GATE, "sh", program, *argv[1:]],
                stdin=subprocess.PIPE,
                stdout=self._out,
                stderr=self._err,
            )
            self._files = stack.pop_all()

    def run(self) -> Completed:
        """Let it begin, and wait for its end without a limit."""
        process = self._process
        _open_gate(process)
        try:
            process.wait()
        finally:
            if process.returncode is None:
                _abandoned.append(process)
        stdout, stderr = _text(self._out), _text(self._err)
        if process.returncode != 0:
            raise _failure(" ".join(self._argv), process.returncode, stderr or stdout)
        return Completed(argv=self._argv, returncode=0, stdout=stdout, stderr=stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()
        stream = self._process.stdin
        if stream is not None and not stream.closed:
            # It was never told to begin, so it ends by itself.
            stream.close()
            self._process.wait()


def _start(
    argv: Sequence[str],
    *,
    stdin: int | IO[bytes],
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
    secrets: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
) -> Process:
    program = argv[0] if "/" in argv[0] else find_program(argv[0])
    try:
        return subprocess.Popen(
            [program, *argv[1:]],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=clean_environment(env),
            cwd="/",
            # We handle Ctrl-C: the terminal must not send it to the program too.
            start_new_session=True,
        )
    except FileNotFoundError:
        raise MissingRequirementError(f"the program {program} does not exist") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise CommandError(f"cannot start {redact(' '.join(argv), secrets)}: {why}") from None


def _memory_file() -> IO[bytes]:
    return os.fdopen(os.memfd_create("output"), "w+b")


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def _failure(shown: str, returncode: int, said: str) -> CommandError:
    how = f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
    return CommandError(f"{shown} failed ({how})" + (f": {_tail(said)}" if said.strip() else ""))


def wait_for(process: Process, timeout_s: float | None) -> bool:
    """Wait for the end of a child and reap it; False if it still runs after `timeout_s` (None: no limit).

    With a pidfd, as `Popen.wait` with a timeout polls, which adds up to 50 ms.
    """
    if process.returncode is None and timeout_s is not None:
        descriptor = os.pidfd_open(process.pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if not poll.poll(max(timeout_s, 0.0) * 1000):
                return False
        finally:
            os.close(descriptor)
    process.wait()
    return True


_abandoned: list[Process] = []


def _reap_abandoned() -> None:
    _abandoned[:] = [process for process in _abandoned if process.poll() is None]


def end_process(process: Process, *, grace_s: float = _TERM_GRACE_S) -> None:
    """End a child that runs in its own session, with its whole process group, and reap it.

    SIGTERM first, after `grace_s` SIGKILL to the rest of the group. A process stuck in the kernel (state D) cannot be
    reaped: it is left running after one more grace period.
    """
    # A child that is not reaped yet keeps its pid, so the group is still ours; after that the number may be reused.
    if process.returncode is None:
        try:
            _signal_group(process, signal.SIGTERM)
            # A stopped program acts on SIGTERM only when it continues.
            _signal_group(process, signal.SIGCONT)
            deadline = time.monotonic() + grace_s
            while _group_lives(process.pid) and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            # Also if a second Ctrl-C interrupts the wait.
            _signal_group(process, signal.SIGKILL)
            wait_for(process, grace_s)
    for stream in (process.stdout, process.stderr, process.stdin):
        if stream is not None:
            stream.close()


def _signal_group(process: Process, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _group_lives(group: int) -> bool:
    """Whether any process of the group still runs; zombies (such as the unreaped leader) do not count."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # proc_pid_stat(5): the name in parentheses may contain anything; then state, parent, group.
            state, _parent, its_group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def dying_with_us() -> list[str]:
    """Return the prefix for a program that must end when we do, even by SIGKILL (prctl(2), PR_SET_PDEATHSIG).

    It ends with the *thread* that starts it. A change of its user must come before this prefix, as it clears the
    signal.
    """
    # If we die before the signal is set, none is sent, so the program checks its parent.
    alive = ["sh", "-c", '[ "$PPID" = "$0" ] && exec "$@"', str(os.getpid())]
    return ["setpriv", "--pdeathsig", "KILL", "--", *alive]


@contextmanager
def running(
    argv: Sequence[str],
    *,
    output: BinaryIO,
    env: dict[str, str] | None = None,
    grace_s: float = 30.0,
) -> Iterator[Process]:
    """Run a long-running program (a throwaway server) while the context lasts; it is always ended and reaped.

    `output` gets its stdout and stderr. Prefix it with `dying_with_us` if it must end even when we are killed. Raises
    as `CommandRunner.run` does if it cannot be started.
    """
    process = _start(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env)
    try:
        yield process
    finally:
        end_process(process, grace_s=grace_s)


# Waits for a word before it becomes the program, with the same pid, so that the starter can record the pid first. If
# the starter is gone, no word comes and it ends.
_GATE = 'IFS= read -r word && [ "$word" = go ] && exec "$@" </dev/null'
# Keeps their Popen objects, which complain when they are collected while the program still runs.
_lasting: list[Process] = []


def start_held(argv: Sequence[str], *, output: BinaryIO, env: dict[str, str] | None = None) -> Process:
    """Start a program that outlives us; it waits until `let_go`, and keeps its pid.

    It has its own session, no descriptor of ours except `output` (its stdout and stderr), and /dev/null as stdin. If we
    die before `let_go`, even by SIGKILL, it ends without having done anything. A missing program gives exit code 127.
    Raises as `CommandRunner.run` does if it cannot be started.
    """
    return _start(
        ["sh", "-c", _GATE, "sh", *argv], stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=env
    )


def let_go(process: Process) -> None:
    """Let a program of `start_held` begin.

    From now on it runs independently; its `poll` tells whether it still runs.
    """
    _open_gate(process)
    _lasting.append(process)


def _open_gate(process: Process) -> None:
    stream = process.stdin
    if stream is not None:
        with suppress(BrokenPipeError), stream:
            stream.write(b"go\n")


def start_for_user(argv: Sequence[str]) -> Process:
    """Start a user's command as a shell would: with our terminal, environment and folder, in our process group.

    Ctrl-C at a terminal reaches it too. Raises MissingRequirementError if there is no such program, CommandError if
    it cannot be started. The caller waits for it.
    """
    try:
        return subprocess.Popen(argv)
    except FileNotFoundError:
        raise MissingRequirementError(f"there is no program {argv[0]}") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise CommandError(f"cannot start {argv[0]}: {why}") from None
