"""Runs external programs: the only user of subprocess.

Argument lists only, stdin closed, a clean environment with a fixed locale, exit codes declared by the caller, bounded
stderr in errors, secrets redacted, children ended and reaped on any exception.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, BinaryIO

from snapmgr.errors import CommandError, LackingError
from snapmgr.records import Completed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What programs may need from our caller; everything else (LD_PRELOAD, TERM, LANG, passwords, …) stays out.
_KEPT = ("HOME", "TMPDIR", "LVM_SYSTEM_DIR", "DM_DISABLE_UDEV", "META_PASSWORD")
_STDERR_SHOWN = 2000
_TERM_GRACE_S = 5.0

# Debian's names of the packages that bring a program.
_PACKAGES = {
    "mariadbd": "mariadb-server-core",
    "mariadb-install-db": "mariadb-server-core",
    "mysqld": "mysql-server-core",
    "btrfs": "btrfs-progs",
    "mkfs.btrfs": "btrfs-progs",
    "mkfs.xfs": "xfsprogs",
    "xfs_io": "xfsprogs",
    "lvs": "lvm2",
}


def clean_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Return the environment that every program gets: a fixed PATH and locale, HOME and TMPDIR, and `extra`."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return {"PATH": _PATH, "LC_ALL": "C.UTF-8"} | kept | (extra or {})


def find_program(name: str) -> str:
    """Given a program's name, return its path. Raises LackingError with the package to install."""
    found = shutil.which(name, path=_PATH)
    if found is None:
        package = _PACKAGES.get(name, name)
        raise LackingError(f"the program {name} is not installed", hint=f"apt-get install {package}")
    return found


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
        program = find_program(argv[0]) if "/" not in argv[0] else argv[0]
        shown = redact(" ".join(argv), secrets)
        try:
            process = subprocess.Popen(
                [program, *argv[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=clean_environment(env),
                cwd="/",
                # Ctrl-C is ours to handle: the program must not get it from the terminal as well.
                start_new_session=True,
            )
        except OSError as error:
            raise CommandError(f"cannot start {shown}: {error.strerror}") from error
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            if not abandon:
                end_process(process)
            raise CommandError(
                f"{shown} did not finish within {timeout_s:.0f} s" + (" and was left running" if abandon else ""),
            ) from None
        except BaseException:
            end_process(process)
            raise
        stdout, stderr = (redact(data.decode("utf-8", "replace"), secrets) for data in (out, err))
        if process.returncode not in ok:
            how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
            said = _tail(stderr) or _tail(stdout)
            raise CommandError(f"{shown} failed ({how})" + (f": {said}" if said else ""))
        return Completed(argv=tuple(argv), returncode=process.returncode, stdout=stdout, stderr=stderr)


def end_process(process: subprocess.Popen[bytes], *, grace_s: float = _TERM_GRACE_S) -> None:
    """End a child that runs in a session of its own, with its whole process group, and reap it.

    SIGTERM first, SIGKILL after `grace_s`. A process stuck in the kernel (state D) cannot be reaped: it is left after one
    more grace period rather than waited for forever.
    """
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        if process.returncode is None:
            _signal_group(process, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
    for stream in (process.stdout, process.stderr, process.stdin):
        if stream is not None:
            stream.close()


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextmanager
def running(
    argv: Sequence[str],
    *,
    output: BinaryIO,
    env: dict[str, str] | None = None,
    grace_s: float = 30.0,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a long-living program (a throwaway server) while the context lasts; it is always ended and reaped.

    `output` gets its stdout and stderr. The caller prefixes ``setpriv --pdeathsig KILL`` where the program must not
    outlive even a SIGKILL of ours.
    """
    process = subprocess.Popen(
        [find_program(argv[0]) if "/" not in argv[0] else argv[0], *argv[1:]],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=clean_environment(env),
        cwd="/",
        start_new_session=True,
    )
    try:
        yield process
    finally:
        end_process(process, grace_s=grace_s)


def pipeline(argvs: Sequence[Sequence[str]], *, timeout_s: float, secrets: tuple[str, ...] = ()) -> bytes:
    """Run programs joined by pipes and return the last one's stdout; fails when *any* member fails.

    Raises CommandError that names the first failing member, or after `timeout_s`; all members are ended and reaped.
    """
    deadline = time.monotonic() + timeout_s
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for index, argv in enumerate(argvs):
            upstream = processes[-1].stdout if processes else None
            processes.append(
                subprocess.Popen(
                    [find_program(argv[0]), *argv[1:]],
                    stdin=upstream if upstream is not None else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL if index < len(argvs) - 1 else subprocess.PIPE,
                    env=clean_environment(),
                    cwd="/",
                    start_new_session=True,
                )
            )
            # Our copy must be closed, or the upstream never gets SIGPIPE when its reader dies.
            if upstream is not None:
                upstream.close()
        out, err = processes[-1].communicate(timeout=max(deadline - time.monotonic(), 0.001))
        codes = [process.wait(max(deadline - time.monotonic(), 0.001)) for process in processes]
    except subprocess.TimeoutExpired:
        raise CommandError(f"{redact(' | '.join(' '.join(argv) for argv in argvs), secrets)} did not finish within {timeout_s:.0f} s") from None
    finally:
        for process in processes:
            end_process(process)
    for argv, code in zip(argvs, codes, strict=True):
        if code != 0:
            said = _tail(redact(err.decode("utf-8", "replace"), secrets))
            raise CommandError(f"{redact(' '.join(argv), secrets)} failed (exit code {code})" + (f": {said}" if said else ""))
    return out
