"""The entry point: options of all commands, commands loaded when they are called, errors turned into exit codes."""

from __future__ import annotations

import os
import select
import sys
from importlib import import_module
from pathlib import Path
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
# Each is the module of the same name here. The texts are the commands' own (a test compares), so that the list needs
# none of the modules.
COMMANDS = {
    "backup": "Take a snapshot of each JOB, then do what its after_backup says.",
    "list": "List the snapshots, oldest first.",
    "show": "Show all that is known of one snapshot.",
    "mount": "Mount a snapshot, or a writable clone of it, and print the data's path.",
    "umount": "Undo mounts, and remove the clones that they were of.",
    "verify": "Prove on a writable clone that a snapshot restores.",
    "restore": "Copy what a snapshot holds to DEST, a new or empty folder.",
    "prepare": "Mount a recovered, cleanly shut-down copy of a datadir, and print its path.",
    "clone": "Let a development server run on a writable clone of a snapshot.",
    "pin": "Keep snapshots, whatever the retention rules say.",
    "unpin": "Leave pinned snapshots to the retention rules again.",
    "delete": "Delete the snapshots that are named.",
    "prune": "Delete the snapshots that no retention rule keeps.",
    "status": "Say whether every job has its snapshots.",
    "schedule": "Let jobs run at given times, by systemd or by cron.",
    "trace": "Record what a JuiceFS mount does, add it up, judge it and draw it.",
    "bench": "Measure what snapshots cost here, on which storage.",
    "config": "Write or check the configuration.",
    "doctor": "Look for what is lacking, wrong with a job or left over; --fix mends it.",
    "completion": "Print the script that completes words in a shell.",
}
_EPILOG = """\b
Examples:
  snapmgr config init -o /etc/snapmgr/snapmgr.toml
  snapmgr doctor
  snapmgr backup --all
  snapmgr list

\b
Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 another run is
active, 4 database not quiesced and nothing taken, 5 snapshot kept but a
later step failed, 6 verification failed, 7 something is lacking here,
130 interrupted.
"""


class LazyGroup(click.Group):
    """Commands whose modules are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the work."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, its module imported now."""
        if cmd_name not in COMMANDS:
            return None
        return cast("click.Command", import_module(f"snapmgr.cli.{cmd_name}").command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; a mistyped one is answered with the nearest."""
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
    type=click.Path(path_type=Path),
    envvar="SNAPMGR_CONFIG",
    help="Configuration file.  [env SNAPMGR_CONFIG; default: /etc/snapmgr/snapmgr.toml]",
)
@click.option("-q", "--quiet", is_flag=True, help="On stderr only warnings and errors.")
@click.option("-v", "--verbose", is_flag=True, help="On stderr also each program that is run, with the time of day.")
@click.option("--debug", is_flag=True, help="A traceback with every error.")
@click.version_option(__version__, "-V", "--version", message="snapmgr %(version)s")
@click.pass_context
def cli(ctx: click.Context, config_path: Path | None, quiet: bool, verbose: bool, debug: bool) -> None:
    """Take the options that stand before the command."""
    if quiet and verbose:
        raise click.UsageError("--quiet and --verbose contradict each other.")
    session: Session = ctx.obj
    session.config_path = config_path
    session.quiet, session.verbose, session.debug = quiet, verbose, debug
    session.console = Console(quiet=quiet, verbose=verbose)
    session.command = ctx.invoked_subcommand or ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with `argv` (default: the process's own arguments) and return its exit code."""
    prepare_streams()
    # A throwaway server of another user must be able to pass through our folders; what is not for others gets its mode
    # where it is made.
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
    # Or Python flushes at its own exit, and complains of a reader that is gone.
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
            # click's own printing of help; work never gets here by it (see output.py).
            return EXIT_OK
        failure = _in_our_words(session, error)
        if failure is None:
            raise
        return _end(session, failure)


def _in_our_words(session: Session, error: BaseException) -> SnapmgrError | None:
    """Return what to say of whatever ended the command; None: it is not ours to handle (SystemExit)."""
    if isinstance(error, click.ClickException):
        return _usage_error(error)
    if isinstance(error, Interrupted):
        return InterruptedRunError(str(error), hint="what was begun is undone, or completed by the next run")
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
            hint = f"it goes before the command: {PROGRAM} {error.option_name} …" if error.option_name in own else hint
    return ConfigError(error.format_message().rstrip("."), hint=hint)


def _end(session: Session, error: SnapmgrError) -> int:
    """Say what failed, in JSON too if that was asked for, and return the exit code."""
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
