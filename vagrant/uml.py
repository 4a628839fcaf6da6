#!/usr/bin/python3
"""Boot a User Mode Linux guest and run a command in it; see docs/how-to/test-lvm.md.

Two processes here: this one copies the guest's output, minds the time limit and passes the status on; its keeper, in a
session of its own, starts the guest, ends it and removes the work folder as soon as this one is gone, however it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent
INIT = HERE / "uml-init"
XSTATE = HERE / "uml-xstate.c"
KERNEL = "linux.uml"
MODULES = Path("/usr/lib/uml/modules")
# What tests and the programs in them look at; nothing else of our environment reaches the guest.
PASSED = re.compile(r"(SNAPMGR|PYTEST|HYPOTHESIS)_\w+|CI|NO_COLOR|PY_COLORS|FORCE_COLOR|TZ")
# Variables for a library that is loaded into the guest's kernel.
LAB = "SNAPMGR_LAB_"
DISK = "/dev/ubda"
IN_MEMORY, ON_DISK = "/dev/shm", "/var/tmp"  # noqa: S108 - mkdtemp makes a folder of its own in them
NO_STATUS, TIMED_OUT, LACKING = 99, 124, 7
CONSOLE_LINES = 40
WAKE_MS = 5000
# So long before its time limit the command gets SIGTERM: it may say how far it came.
TERM_GRACE_S = 20.0
PR_SET_PDEATHSIG = 1
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class GuestError(Exception):
    """The guest cannot be run; the message says why and what to do."""


class Ended(BaseException):
    """A signal asks us to end."""

    def __init__(self, number: int) -> None:
        self.number = number


def size(text: str) -> int:
    """Given "8G", return bytes."""
    found = re.fullmatch(r"([0-9]+)([KMG]?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 512M or 8G")
    return int(found[1]) * UNITS[found[2]]


def arguments() -> argparse.Namespace:
    """Return the options and the command."""
    parser = argparse.ArgumentParser(
        prog="./run guest",
        usage="./run guest [OPTION…] -- COMMAND [ARG…]",
        description="Boots User Mode Linux on this machine's own files (read-only, a writable layer in memory above) "
        "and runs COMMAND as root in the checkout, which is writable. /dev/ubda ($SNAPMGR_TEST_DEV) is a scratch disk.",
        epilog="Exit code: the command's; 128+N if signal N ended it, or us; 124 after the time limit; 99 if the guest "
        "ended without one; 7 if this machine cannot run guests. Nothing is left behind, however this ends.",
    )
    add = parser.add_argument
    add("--disk", metavar="FILE", type=Path, help="the scratch disk: kept, and made if absent; boot twice for a reboot")
    add("--disk-size", metavar="SIZE", type=size, default=size("8G"), help="of a new, sparse one (default: 8G)")
    add("--keep", metavar="FOLDER", type=Path, help="a folder that the guest writes to as well ($SNAPMGR_GUEST_KEEP)")
    add("--memory", metavar="SIZE", type=size, default=size("2G"), help="default: 2G; 1G is enough without a server")
    add("--time-limit", metavar="SECONDS", type=float, default=900.0, help="default: 900")
    add("--silence", metavar="SECONDS", type=float, help="kill a guest that prints nothing for so long")
    add("--processor", metavar="N", type=int, help="the one that the guest runs on, 0 or more (default: any one)")
    add("--preload", metavar="LIBRARY", type=Path, help="loaded into the guest's kernel: for a disk of tests/lab/disk")
    add("--udev", action="store_true", help="run systemd-udevd in the guest, and LVM with the distribution's settings")
    add("--name", default="guest", help="what messages call it")
    add("--console", action="store_true", help="print the kernel's messages as well, to stderr")
    add("command", nargs="+", metavar="COMMAND")
    return parser.parse_args()


def check(options: argparse.Namespace) -> str:
    """Return the kernel's path. Raises GuestError with everything that is lacking."""
    kernel = shutil.which(KERNEL)
    lacking = [] if kernel else [f"{KERNEL} is not installed"]
    lacking += [] if MODULES.is_dir() else [f"{MODULES} is not there"]
    lacking += [] if shutil.which("busybox") else ["busybox is not installed"]
    if lacking or kernel is None:
        raise GuestError(f"{'; '.join(lacking)}; apt-get install user-mode-linux lvm2 kmod busybox-static")
    for path in (CHECKOUT, options.keep):
        if path is not None and ("," in str(path) or not path.is_dir()):
            raise GuestError(f"{path} is no folder that a guest can mount (there must be no comma in its name)")
    return kernel


def work_base(memory: int) -> str:
    """Return where the guest's memory and scratch disk go: in memory if there is room for both, else /var/tmp."""
    with contextlib.suppress(OSError):
        room = os.statvfs(IN_MEMORY)
        return IN_MEMORY if room.f_bavail * room.f_frsize >= 2 * memory else ON_DISK
    return ON_DISK


def make_disk(path: Path, size_bytes: int) -> None:
    """Make the sparse file `path` unless it is there."""
    with contextlib.suppress(FileExistsError), path.open("xb") as file:
        file.truncate(size_bytes)


def fill(work: Path, options: argparse.Namespace, keep: Path | None) -> None:
    """Write what the guest's init reads."""
    settings = {
        "share": str(CHECKOUT),
        "keep": str(keep or ""),
        "udev": "yes" if options.udev else "no",
        "term_at": f"{time.time() + options.time_limit - min(TERM_GRACE_S, options.time_limit / 4):.0f}",
    }
    (work / "settings").write_text("".join(f"{name}={shlex.quote(value)}\n" for name, value in settings.items()))
    passed = {name: value for name, value in os.environ.items() if PASSED.fullmatch(name)}
    passed |= {"SNAPMGR_TEST_DEV": DISK} | ({"SNAPMGR_GUEST_KEEP": str(keep)} if keep else {})
    exports = [f"export {name}={shlex.quote(value)}\n" for name, value in sorted(passed.items())]
    (work / "command").write_text(
        "".join(exports) + f"echo $$ >/run/snapmgr-command.pid\nexec {shlex.join(options.command)}\n"
    )
    (work / "uml").mkdir()


def kernel_line(kernel: str, work: Path, memory: int, outputs: tuple[int, int]) -> list[str]:
    """Return the command that boots the guest: console on its stdout, the command's output on `outputs`."""
    return [
        kernel,
        f"mem={memory >> 20}M",
        f"uml_dir={work}/uml",
        "umid=guest",
        # Named so, or lsblk and findmnt take the scratch disk for what / is mounted from.
        *("root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro"),
        f"init={INIT}",
        f"ubd0{'' if can_be_locked(work / 'disk') else 'c'}={work}/disk",
        *("con=null", "ssl=null", "con0=null,fd:1", f"con1=null,fd:{outputs[0]}", f"con2=null,fd:{outputs[1]}"),
        *("quiet", "loglevel=4"),
        # 512 devices in /dev that nobody uses, and each of LVM's programs looks at all.
        "pty.legacy_count=0",
        f"snapmgr_work={work}",
    ]


def can_be_locked(disk: Path) -> bool:
    """Whether the guest may ask for a lock on its disk: it does not boot where a FUSE file system refuses that."""
    with disk.open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
    return True


def preloaded(work: Path, asked: Path | None) -> dict[str, str]:
    """Return the variables with which the guest's kernel has what is asked for, and needed here. Raises GuestError."""
    libraries = [*needed(work), *([asked.resolve()] if asked else [])]
    lab = {name: value for name, value in os.environ.items() if asked and name.startswith(LAB)}
    return lab | ({"LD_PRELOAD": ":".join(map(str, libraries))} if libraries else {})


def needed(work: Path) -> list[Path]:
    """Return what the guest's kernel needs on this processor: see uml-xstate.c. Raises GuestError."""
    if re.search(r"^flags\b.*\bamx_tile\b", Path("/proc/cpuinfo").read_text(), re.MULTILINE) is None:
        return []
    library, compiler = work / "xstate.so", shutil.which("gcc")
    if compiler is None:
        raise GuestError(f"this processor has AMX, so that guests need {XSTATE.name} compiled; apt-get install gcc")
    try:
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, XSTATE], check=True)
    except subprocess.CalledProcessError as error:
        raise GuestError(f"{XSTATE.name} cannot be compiled: {error}") from None
    return [library]


def die_with(parent: int, number: int) -> None:
    """Let the kernel send us a signal when our parent ends; at once if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def stay_on_one(processor: int | None) -> None:
    """Keep this process and all that it starts on one of the processors that it may use.

    The guest has one, but each of its processes is one here, and its kernel waits for them at each system call: where
    they share a processor nobody has to wake up another one, which saves a tenth to a fifth of all.
    """
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[(os.getpid() if processor is None else processor) % len(allowed)]})


def keep_guest(
    line: list[str], work: Path, preload: dict[str, str], lifeline: int, outputs: tuple[int, int, int]
) -> None:
    """Run the guest until it ends, or until `lifeline` ends because nobody waits any more; then remove `work`."""
    os.setsid()
    for number in ENDING:
        # A handler, where SIG_IGN would be inherited by the guest.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    console, *others = outputs
    try:
        guest = subprocess.Popen(
            ["/usr/bin/setpriv", "--pdeathsig", "KILL", *line],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            # TMPDIR is where its memory is.
            env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(work), "TMPDIR": str(work)} | preload,
            pass_fds=others,
            process_group=0,
        )
        (work / "group").write_text(str(guest.pid))
        for fd in outputs:
            os.close(fd)
        poll = select.poll()
        poll.register(os.pidfd_open(guest.pid), select.POLLIN)
        poll.register(lifeline, select.POLLIN)
        while not poll.poll(WAKE_MS):
            wake(guest.pid)
        # Also after its own end: each process in the guest is one here, of the same group.
        os.killpg(guest.pid, signal.SIGKILL)
        guest.wait()
        # The status is read before the folder goes.
        os.read(lifeline, 1)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def wake(kernel: int) -> None:
    """Send the guest's kernel its timer's signal, if it handles that: once it has lost one, it waits for ever."""
    caught = re.search(r"^SigCgt:\t(.+)", Path(f"/proc/{kernel}/status").read_text(), re.MULTILINE)
    if caught and int(caught[1], 16) >> (signal.SIGALRM - 1) & 1:
        os.kill(kernel, signal.SIGALRM)


def kill_group(work: Path) -> None:
    """Kill what is left of a guest whose keeper has ended."""
    with contextlib.suppress(OSError, ValueError):
        os.killpg(int((work / "group").read_text()), signal.SIGKILL)


class Streams:
    """What the guest says: its console's last lines are remembered, the rest is passed on as it comes."""

    def __init__(self, *, console_to: int | None) -> None:
        self.ends: tuple[int, int, int]
        self._sources: dict[int, int | None] = {}
        ends = []
        for to in (console_to, sys.stdout.fileno(), sys.stderr.fileno()):
            source, end = os.pipe()
            self._sources[source] = to
            ends.append(end)
        self._console = min(self._sources)
        self.ends = (ends[0], ends[1], ends[2])
        self.tail = b""

    def copy(self, deadline: float, silence_s: float, keeper: int, work: Path) -> bool:
        """Copy until all has been said; False if that takes beyond `deadline`, or nothing is said for `silence_s`.

        Should somebody kill the keeper, its guest is killed, or its processes would keep the streams open.
        """
        poll = select.poll()
        poll.register(keeper, select.POLLIN)
        for source in self._sources:
            poll.register(source, select.POLLIN)
        while self._sources:
            if not (ready := poll.poll(min(max(0.0, deadline - time.monotonic()), silence_s) * 1000)):
                return False
            for source, _ in ready:
                if source == keeper:
                    poll.unregister(keeper)
                    kill_group(work)
                    continue
                self._pass_on(source, os.read(source, 65536), poll)
        return True

    def _pass_on(self, source: int, data: bytes, poll: select.poll) -> None:
        to = self._sources[source]
        if not data:
            poll.unregister(source)
            del self._sources[source]
            os.close(source)
            return
        if source == self._console:
            data = data.replace(b"\r", b"")
            self.tail = (self.tail + data)[-16384:]
        while data and to is not None:
            data = data[os.write(to, data) :]


def run(options: argparse.Namespace) -> int:
    """Boot, run, and return the exit code."""
    kernel = check(options)
    keep = options.keep.resolve() if options.keep else None
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    work = Path(tempfile.mkdtemp(prefix="snapmgr-guest-", dir=work_base(options.memory)))
    try:
        if options.disk:
            # By a name of ours: the kernel's command line takes no spaces.
            (work / "disk").symlink_to(options.disk.resolve())
        make_disk(options.disk or work / "disk", options.disk_size)
        fill(work, options, keep)
        preload = preloaded(work, options.preload)
    except GuestError:
        shutil.rmtree(work)
        raise
    except OSError as error:
        shutil.rmtree(work)
        raise GuestError(f"cannot prepare the guest: {error}") from None
    lifeline, our_end = os.pipe()
    streams = Streams(console_to=sys.stderr.fileno() if options.console else None)
    keeper = os.fork()
    if keeper == 0:
        try:
            os.close(our_end)
            stay_on_one(options.processor)
            line = kernel_line(kernel, work, options.memory, streams.ends[1:])
            keep_guest(line, work, preload, lifeline, streams.ends)
        finally:
            os._exit(0)
    for fd in (lifeline, *streams.ends):
        os.close(fd)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        deadline, silence_s = time.monotonic() + options.time_limit, options.silence or options.time_limit
        if not streams.copy(deadline, silence_s, os.pidfd_open(keeper), work):
            late = time.monotonic() >= deadline
            why = f"did not end within {options.time_limit:g} s" if late else f"printed nothing for {silence_s:g} s"
            say(f"{options.name} {why} and was killed", streams.tail)
            return TIMED_OUT
        if (work / "late").exists():
            say(f"{options.name} was near its time limit of {options.time_limit:g} s, so its command was ended")
            return TIMED_OUT
        try:
            return int((work / "rc").read_text())
        except (OSError, ValueError):
            say(f"{options.name} ended without a status: the guest failed, not the command", streams.tail)
            return NO_STATUS
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        os.close(our_end)
        os.waitpid(keeper, 0)
        # The keeper has done both, unless somebody killed it.
        kill_group(work)
        shutil.rmtree(work, ignore_errors=True)


def say(message: str, console: bytes = b"") -> None:
    """Print a message, and the end of the guest's console."""
    lines = console.decode("utf-8", "replace").splitlines()[-CONSOLE_LINES:]
    sys.stderr.write(f"run guest: {message}\n")
    sys.stderr.writelines(f"  | {line}\n" for line in lines)
    sys.stderr.flush()


def main() -> int:
    """Run what the command line says and return the exit code."""
    options = arguments()

    def end(number: int, _frame: object) -> None:
        raise Ended(number)

    for number in ENDING:
        # Under nohup we are meant to outlive whoever called us.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        die_with(os.getppid(), signal.SIGTERM)
    try:
        return run(options)
    except GuestError as error:
        say(str(error))
        return LACKING
    except BrokenPipeError:
        return 128 + signal.SIGPIPE
    except Ended as ended:
        say(f"{options.name} was ended by {signal.Signals(ended.number).name}")
        return 128 + ended.number


if __name__ == "__main__":
    sys.exit(main())
