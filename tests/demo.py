"""The demonstration: the main job, step by step, on a file system and a server of its own. Leaves nothing behind.

btrfs on a loop file, a private MariaDB in it under a real write load; then the real command line: backup, list, show,
mount, umount, verify, a second backup, prune, restore, and doctor --fix after the state directory was lost. Ends with
snapmgr's own exit code if a step fails, 130 when interrupted.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

sys.path.insert(0, str(Path(__file__).parent))

from support import requirements
from support.load import WriteLoad, write_load
from support.server import close_template, private_server
from support.storage import (
    LeftBehindError,
    leftovers,
    loop_filesystem,
    processes_of,
    shielded,
    sweep,
    sweep_dead,
    work_folder,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_NEEDS = ("root", "loop", "btrfs", "btrfsutil", "mariadbd")
_SIZE_BYTES = 1 << 30
_SNAPMGR = Path(sys.executable).parent / "snapmgr"
_END_GRACE_S = 30.0
_CONFIG = """\
state_dir = {state}
scratch_dir = {scratch}

[job.demo]
source = "mysql"
socket = {socket}
user = "root"
quiesce = "auto"

[job.demo.retention]
keep-last = 1
"""


class StepFailedError(Exception):
    """A command of snapmgr ended with another code than 0."""

    def __init__(self, command: str, code: int) -> None:
        super().__init__(f"{command} ended with exit code {code}")
        self.code = code


_swallowed: list[int] = []
"""Signals whose KeyboardInterrupt nobody has caught yet: one raised in a destructor, for instance, is lost."""


def _say(text: str = "") -> None:
    if _swallowed:
        raise KeyboardInterrupt
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # "| head" has seen enough: the rest goes nowhere, and all is cleared up as ever.
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), sys.stdout.fileno())


_COLOURED = sys.stdout.isatty() and "NO_COLOR" not in os.environ


def _title(text: str) -> None:
    _say(f"\n\033[1m== {text}\033[0m" if _COLOURED else f"\n== {text}")


class CommandLine:
    """Runs the real ``snapmgr`` and shows what it was told and what it said."""

    def __init__(self, config: Path) -> None:
        self._config = config

    def show(self, *arguments: str) -> str:
        """Run a command, print it with its output and time, and return its stdout. Raises StepFailedError."""
        command = " ".join(("snapmgr", *arguments))
        _say(f"$ {command}")
        began = time.monotonic()
        code, stdout = self._run(arguments)
        _say(f"  [{time.monotonic() - began:.2f} s]")
        if code != 0:
            raise StepFailedError(command, code)
        return stdout

    def _run(self, arguments: tuple[str, ...]) -> tuple[int, str]:
        lines = []
        process = None
        try:
            with shielded():
                process = subprocess.Popen(
                    [_SNAPMGR, "--config", self._config, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    # Ctrl-C comes to us, and we hand it on: the same whether it is typed or sent.
                    start_new_session=True,
                )
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                _say("  " + line.rstrip("\n"))
            process.wait()
        finally:
            with shielded():
                if process is not None:
                    _end(process)
        return process.returncode, "".join(lines)


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupt a command if it still runs, and let it clear up."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


@dataclass(frozen=True, kw_only=True)
class Laboratory:
    """What there is to work with."""

    snapmgr: CommandLine
    state: Path
    data: Path
    """The live server's datadir, a subvolume."""
    load: WriteLoad


def _prepare(stack: ExitStack) -> Laboratory:
    _title("A laboratory: btrfs on a loop file, a private MariaDB in a subvolume of it, four writers")
    folder = stack.enter_context(work_folder())
    system = stack.enter_context(loop_filesystem("btrfs", _SIZE_BYTES))
    stack.enter_context(_stragglers_ended(folder))
    data = system.point / "mysql"
    subprocess.run(["btrfs", "subvolume", "create", data], check=True, stdout=subprocess.DEVNULL)
    server = stack.enter_context(private_server(data))
    _say(f"  {system.device} on {system.point}, {_SIZE_BYTES >> 20} MiB")
    _say(f"  MariaDB {server.query('SELECT VERSION()')[0][0]}, process {server.pid}, socket {server.socket}")
    load = stack.enter_context(write_load(server.socket))
    load.warm_up()
    (folder / "state").mkdir(mode=0o700)
    # The throwaway server of a verify runs as the datadir's owner, and must get to its clone.
    (folder / "scratch").mkdir(mode=0o711)
    config = folder / "snapmgr.toml"
    config.write_text(
        _CONFIG.format(
            state=json.dumps(str(folder / "state")),
            scratch=json.dumps(str(folder / "scratch")),
            socket=json.dumps(server.socket),
        )
    )
    config.chmod(0o600)
    _say("  the configuration:")
    for line in config.read_text().splitlines():
        _say(f"    {line}")
    return Laboratory(snapmgr=CommandLine(config), state=folder / "state", data=data, load=load)


@contextmanager
def _stragglers_ended(folder: Path) -> Iterator[None]:
    """At the end kill what still works in `folder`: a throwaway server of a verify that was itself killed."""
    try:
        yield
    finally:
        with shielded():
            for pid in processes_of(folder):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _backup(snapmgr: CommandLine, load: WriteLoad) -> None:
    load.check_alive()
    since_ns = time.monotonic_ns()
    snapmgr.show("backup", "demo")
    seen = load.statistics(since_ns=since_ns)
    usual = load.statistics(until_ns=since_ns)
    _say(
        f"  the writers meanwhile: {seen.writes} writes, the longest {seen.worst_s * 1000:.0f} ms"
        f" (before: p50 {usual.p50_s * 1000:.0f} ms, longest {usual.worst_s * 1000:.0f} ms)"
    )


def _look_inside(snapmgr: CommandLine) -> None:
    said = snapmgr.show("mount", "latest").splitlines()
    point = next(Path(word) for line in said for word in line.split() if Path(word).is_dir() and word.startswith("/"))
    names = sorted(path.name for path in point.iterdir())
    _say(f"$ ls {point}\n  {'  '.join(names)}")
    frame = point / "load_test" / "ledger.frm"
    _say(f"$ head -c 16 {frame} | xxd -p\n  {frame.read_bytes()[:16].hex()}")
    (point / "written-by-the-demo").write_text("the clone is writable, the snapshot never changes\n")
    _say(f"$ cat {point}/written-by-the-demo\n  {(point / 'written-by-the-demo').read_text().rstrip()}")
    snapmgr.show("umount", "latest")


def _restore(lab: Laboratory) -> None:
    dest = lab.data.parent / "restored"
    said = lab.snapmgr.show("restore", "latest", str(dest))
    options = next(line.partition("server options: ")[2] for line in said.splitlines() if "server options: " in line)
    _say("$ mariadbd <the server options above> --socket=…")
    with private_server(dest, shlex.split(options), install_options=None) as server:
        count = "SELECT COUNT(*) FROM load_test.ledger"
        _say(f"$ mariadb -e '{count}'\n  {server.query(count)[0][0]}")


def _lose_the_state_directory(lab: Laboratory) -> None:
    shutil.rmtree(lab.state)
    _say(f"$ rm -r {lab.state}")
    lab.snapmgr.show("list")
    lab.snapmgr.show("doctor", "--fix")
    lab.snapmgr.show("list")


def _demonstrate(stack: ExitStack) -> None:
    lab = _prepare(stack)
    snapmgr, load = lab.snapmgr, lab.load
    _title("Back up: the lock is held for the snapshot call only")
    _backup(snapmgr, load)
    _title("What there is, and what is known of it")
    snapmgr.show("list")
    snapmgr.show("show", "latest")
    _title("Look inside, on a writable clone")
    _look_inside(snapmgr)
    _title("Prove that it restores: a throwaway server on a clone, while the live one goes on")
    snapmgr.show("verify", "latest")
    _title("A second one; then only the newest is to be kept, and the newest that is proved")
    _backup(snapmgr, load)
    snapmgr.show("verify", "latest")
    snapmgr.show("prune", "--dry-run", "demo")
    snapmgr.show("prune", "demo")
    snapmgr.show("list")
    _title("Restore to a new folder, and start a server on it with the options that were printed")
    _restore(lab)
    _title("Lose the state directory, and have it rebuilt from the notes beside the snapshots")
    _lose_the_state_directory(lab)
    load.check_alive()
    load.stop()
    total = load.statistics()
    _title("The writers, over the whole demonstration")
    _say(
        f"  {total.writes} writes in {total.elapsed_s:.0f} s, none failed;"
        f" p50 {total.p50_s * 1000:.0f} ms, p95 {total.p95_s * 1000:.0f} ms, longest {total.worst_s * 1000:.0f} ms"
    )


def _main() -> int:
    absent = requirements.lacking(_NEEDS)
    if absent:
        _say("The demonstration cannot run here:")
        for reason in absent:
            _say(f"  - {reason}")
        return 7
    sweep_dead()
    began = time.monotonic()
    code = 0
    try:
        with ExitStack() as stack:
            _demonstrate(stack)
    except StepFailedError as error:
        _say(f"\nFAILED: {error}")
        code = error.code
    except LeftBehindError as error:
        _say(f"\nFAILED: {error}")
        code = 1
    except KeyboardInterrupt:
        _swallowed.clear()
        _say("\ninterrupted: everything has been removed")
        code = 130
    _deafen()
    close_template()
    left = leftovers()
    if left:
        _say("\nLEFT BEHIND (removed now): " + "; ".join(left))
        sweep(os.getpid())
        return code or 1
    _say(f"\nNothing is left behind: no mount, no loop device, no process, no folder. {time.monotonic() - began:.0f} s")
    return code


def _listen() -> None:
    def interrupt(number: int, _frame: object) -> NoReturn:
        _swallowed.append(number)
        raise KeyboardInterrupt

    # Also where we were started with SIGINT ignored (in the background of a script).
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)


def _deafen() -> None:
    """From here on only cleaning up is left, and that is not to be interrupted."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    _listen()
    try:
        ended_with = _main()
    except KeyboardInterrupt:
        # A second Ctrl-C, while the first was being dealt with.
        _deafen()
        sweep(os.getpid())
        ended_with = 130
    sys.exit(ended_with)
