"""Runs the program: global options, commands imported when they are called, errors turned into exit codes."""

from __future__ import annotations

import os
import select
import sys
from importlib import import_module
from typing import TYPE_CHECKING, cast

import click

from snapmgr import __version__
from snapmgr.cli.failures import foreseen
from snapmgr.cli.output import Console, flush_results, prepare_streams
from snapmgr.cli.session import Session
from snapmgr.cli.signals import Interrupted, ending_by_signal
from snapmgr.contract.errors import EXIT_OK, ConfigError, InterruptedRunError, SnapmgrError

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "snapmgr"
COMPLETE_VARIABLE = "_SNAPMGR_COMPLETE"
# Each name is a module of this package. The texts repeat the commands' own docstrings (a test compares them), so that
# printing the list imports no command.
COMMANDS = {
    "backup": "Take a snapshot of each JOB, then run its after_backup steps.",
    "list": "List snapshots, oldest first.",
    "show": "Show everything known about one snapshot.",
    "mount": "Mount a writable clone of a snapshot, or the snapshot itself, and print its path.",
    "umount": "Unmount snapshots and remove their writable clones.",
    "verify": "Test on a writable clone that a snapshot can be restored.",
    "restore": "Copy a snapshot to DEST, a new or empty directory.",
    "prepare": "Mount a recovered, cleanly shut-down copy of a datadir, and print its path.",
    "clone": "Start a development server on a writable clone of a snapshot.",
    "pin": "Keep snapshots regardless of the retention rules.",
    "unpin": "Apply the retention rules to pinned snapshots again.",
    "delete": "Delete the named snapshots.",
    "prune": "Delete snapshots that no retention rule keeps.",
    "status": "Report whether every job's snapshots are up to date.",
    "schedule": "Run jobs at given times, with systemd or cron.",
    "trace": "Record, analyse and draw the operations of a JuiceFS mount.",
    "bench": "Benchmark snapshots on this machine's storage.",
    "config": "Write or check the configuration.",
    "doctor": "Check requirements, jobs and leftovers; --fix repairs what it can.",
    "completion": "Print the completion script for a shell.",
}
_EPILOG = """\b
Examples:
  snapmgr config init -o /etc/snapmgr/snapmgr.toml
  snapmgr doctor
  snapmgr backup --all
  snapmgr list

\b
Exit codes: 0 success, 1 failure, 2 usage or configuration error, 3 another run
is active, 4 database not quiesced and no snapshot taken, 5 snapshot kept but a
later step failed, 6 verification failed, 7 a requirement is missing: a program,
a privilege, or a kernel feature, 130 interrupted.
"""


class LazyGroup(click.Group):
    """Commands whose modules are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order in which a user needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command's module and return the command."""
        if cmd_name not in COMMANDS:
            return None
        return cast("click.Command", import_module(f"snapmgr.cli.{cmd_name}").command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command. The error for a mistyped one suggests the nearest name."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=1)
            ctx.fail(f"there is no command {args[0]!r}." + (f" Did you mean {near[0]}?" if near else ""))
        return super().resolve_command(ctx, args)


@click.group(
    cls=LazyGroup,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Consistent, proven snapshots of MySQL, MariaDB and directories on copy-on-write storage.",
)
@click.option(
    "-c",
    "--config",
    "config_path",
    metavar="FILE",
    type=click.Path(),
    envvar="SNAPMGR_CONFIG",
    help="Configuration file.  [env SNAPMGR_CONFIG; default: /etc/snapmgr/snapmgr.toml]",
)
@click.option("-q", "--quiet", is_flag=True, help="Print only warnings and errors on stderr.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Also print each program that is run on stderr, with the time of day."
)
@click.option("--debug", is_flag=True, help="Print a traceback with every error.")
@click.version_option(__version__, "-V", "--version", message="snapmgr %(version)s")
@click.pass_context
def cli(ctx: click.Context, config_path: str | None, quiet: bool, verbose: bool, debug: bool) -> None:
    """Store the options that stand before the command."""
    if quiet and verbose:
        raise click.UsageError("--quiet and --verbose cannot be combined.")
    session: Session = ctx.obj
    from pathlib import Path

    session.config_path = Path(config_path) if config_path is not None else None
    session.quiet, session.verbose, session.debug = quiet, verbose, debug
    session.console = Console(quiet=quiet, verbose=verbose)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with `argv` (default: the process's own arguments) and return its exit code."""
    prepare_streams()
    # A throwaway server of another user must be able to enter our directories; private files get their mode where they
    # are created.
    os.umask(0o022)
    arguments = list(sys.argv[1:] if argv is None else argv)
    instruction = os.environ.get(COMPLETE_VARIABLE)
    if instruction:
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, PROGRAM, COMPLETE_VARIABLE, instruction)
    session = Session()
    try:
        code = _run(session, arguments)
    finally:
        session.console.close()
    # Otherwise Python flushes at exit, and complains if the reader has gone.
    flush_results()
    return code


def _run(session: Session, arguments: list[str]) -> int:
    try:
        # Not cli.main(): even without its standalone mode it would turn any EPIPE into a silent exit code 1.
        with ending_by_signal(), cli.make_context(PROGRAM, arguments, obj=session) as ctx:
            return int(cli.invoke(ctx))
    except click.exceptions.Exit as error:
        # --help and --version.
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        # Its message is the help.
        sys.stderr.write(error.format_message() + "\n")
        return error.exit_code
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            # click was printing help. Our own output never raises it (see output.py).
            return EXIT_OK
        failure = _in_our_words(session, error)
        if failure is None:
            raise
        return _end(session, failure)


def _in_our_words(session: Session, error: BaseException) -> SnapmgrError | None:
    """Return the error that describes what ended the command; None if we must not handle it (SystemExit)."""
    if isinstance(error, click.ClickException):
        return _usage_error(error)
    if isinstance(error, Interrupted):
        return InterruptedRunError(str(error), hint="unfinished work is undone, or completed by the next run")
    if isinstance(error, click.Abort):
        return InterruptedRunError("interrupted")
    return foreseen(session, error) if isinstance(error, Exception) else None


def _usage_error(error: click.ClickException) -> SnapmgrError:
    hint: str | None = None
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx is not None else PROGRAM
        hint = f"see: {where} --help"
        root = error.ctx.find_root() if error.ctx is not None else None
        if isinstance(error, click.NoSuchOption) and root is not None and root is not error.ctx:
            own = {name for option in root.command.params for name in option.opts}
            hint = f"put it before the command: {PROGRAM} {error.option_name} …" if error.option_name in own else hint
    return ConfigError(error.format_message().rstrip("."), hint=hint)


def _end(session: Session, error: SnapmgrError) -> int:
    """Report the error, with --json also as a document, and return its exit code."""
    session.console.close()
    session.console.fail(error)
    if session.json and not session.documented:
        try:
            session.document(error.exit_code, error)
        except SnapmgrError as failure:
            session.console.fail(failure)
    return error.exit_code


def _reader_is_gone() -> bool:
    poll = select.poll()
    poll.register(1, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
