"""``snapmgr config``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from snapmgr.cli.output import write_result
from snapmgr.cli.params import json_option
from snapmgr.contract.errors import EXIT_OK, ConfigError, MissingRequirementError, SnapmgrError

if TYPE_CHECKING:
    from snapmgr.cli.session import Session
    from snapmgr.config.model import Config
    from snapmgr.mysql.connect.running import RunningServer


@click.group(
    epilog="""\b
Examples:
  snapmgr config init -o /etc/snapmgr/snapmgr.toml
  snapmgr config validate
"""
)
def command() -> None:
    """Write or check the configuration."""


@command.command(
    epilog="""\b
Examples:
  snapmgr config init
  snapmgr config init --socket /run/mysqld/mysqld.sock -o /etc/snapmgr/snapmgr.toml
"""
)
@click.option("--socket", metavar="PATH", help="Socket of the server.  [default: all that are found]")
@click.option("--defaults-file", metavar="PATH", help="Option file with user and password for the job.")
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="Write to a new file instead of stdout."
)
@click.pass_obj
def init(session: Session, *, socket: str | None, defaults_file: str | None, output: Path | None) -> int:
    """Write a commented configuration with a job for each server that runs here.

    With --socket or --defaults-file: a job for that server alone. The result is valid without changes. An existing
    file is never overwritten.
    """
    from snapmgr.config.example import example_config

    servers = _chosen(socket, defaults_file)
    text = example_config(
        [(server.socket, server.datadir) for server in servers],
        defaults_file=os.path.abspath(defaults_file) if defaults_file else None,
        without_binlog={server.socket for server in servers if not _may_log(server.socket, defaults_file)},
    )
    if output is None:
        write_result(text)
        return EXIT_OK
    _write_new(output, text)
    session.console.tell(f"wrote {output}; next: snapmgr --config {output} doctor")
    return EXIT_OK


def _may_log(socket: str, defaults_file: str | None) -> bool:
    """Return whether the server writes binary logs; also if we may not ask it."""
    from snapmgr.mysql.connect.client import Credentials, MysqlError, connect

    try:
        with connect(Credentials(socket=socket, defaults_file=defaults_file)) as connection:
            return connection.variables("log_bin").get("log_bin") != "OFF"
    except MysqlError:
        return True


def _chosen(socket: str | None, defaults_file: str | None) -> list[RunningServer]:
    """Return the server that the options name, or all that run. Raises ConfigError if they name none, or two."""
    from snapmgr.mysql.connect.client import Credentials, login_socket
    from snapmgr.mysql.connect.running import running_servers, server_at

    if socket is None and defaults_file is None:
        return running_servers()
    given = os.path.abspath(socket) if socket is not None else None
    if defaults_file is None:
        return [server_at(str(given))]
    named = login_socket(Credentials(defaults_file=defaults_file))
    if given is not None and os.path.realpath(given) != os.path.realpath(named):
        raise ConfigError(
            f"{defaults_file} leads to the server at {named}, not to the one at {given}",
            hint=f"write socket = {given} into its [client] group, or leave out --socket",
        )
    return [server_at(named)]


def _write_new(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        raise ConfigError(f"{path} exists already and is not overwritten", hint="write to another file") from None
    except PermissionError:
        raise MissingRequirementError(f"no right to write {path}", hint="run as root, or name another file") from None
    except OSError as error:
        raise SnapmgrError(f"cannot write {path}: {error.strerror}") from None
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        # Half a configuration would make the next attempt fail.
        path.unlink(missing_ok=True)
        raise SnapmgrError(f"cannot write {path}: {error.strerror}") from None


@command.command(
    epilog="""\b
Examples:
  snapmgr config validate
  snapmgr config validate ./snapmgr.toml --json
"""
)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@json_option
@click.pass_obj
def validate(session: Session, file: Path | None) -> int:
    """Check a configuration, together with conf.d beside it.

    All errors are printed together, each with the path of its key. If there are any, the exit code is 2.
    """
    from snapmgr.config.load import load_config
    from snapmgr.config.load import validate as find_problems

    path = file or session.config_path
    problems = find_problems(path) or _backend_problems(load_config(path))
    if problems:
        error = ConfigError("\n".join(problems))
        if session.json:
            session.document(error.exit_code, error, valid=False, problems=problems, files=[], jobs=[])
        raise error
    config = load_config(path)
    files = [str(one) for one in config.files]
    lines = [*(f"{one}: valid" for one in files), f"jobs: {', '.join(config.jobs) or 'none'}"]
    return session.report(lines, valid=True, problems=[], files=files, jobs=list(config.jobs))


def _backend_problems(config: Config) -> list[str]:
    """Return errors in the backends that jobs name and in the tables ``[backend.NAME]``.

    Only a backend knows its keys. Whether it can work on this machine is reported by doctor.
    """
    from snapmgr.config.plugins import make_backend
    from snapmgr.system.command import CommandRunner
    from snapmgr.system.mount import KernelMounter

    named = {f"job.{job.name}.backend": job.backend for job in config.jobs.values() if job.backend != "auto"}
    named |= {f"backend.{name}": name for name in config.backends}
    # Which of the files has the table is known only while they are read.
    files = " or ".join(str(file) for file in config.files)
    problems: list[str] = []
    for place, name in named.items():
        try:
            make_backend(name, config.backends.get(name, {}), CommandRunner(), KernelMounter())
        except ConfigError as error:
            of_its_table = error.message.startswith("backend.")
            shown = error.message if of_its_table else f"{place}: {error.message}; {error.hint}"
            problems += [f"{files}: {line}" for line in shown.split("\n")]
        except SnapmgrError:
            continue
    return list(dict.fromkeys(problems))
