"""Defines the options and arguments that several commands share, with their shell completion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

from snapmgr.cli.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from snapmgr.config.model import Config

    # Generic only in click's newest versions.
    _NameType = click.ParamType[str]
    _NumberType = click.ParamType[float]
    _SizeType = click.ParamType[int]
else:
    _NameType = _NumberType = _SizeType = click.ParamType

_Number = TypeVar("_Number", int, float)
_Command = TypeVar("_Command", bound="Callable[..., Any]")


def _completion_config(ctx: click.Context) -> Config | None:
    """Return the configuration for shell completion; None if it is invalid, as this is not the time to report it."""
    from pathlib import Path

    from snapmgr.config.load import load_config
    from snapmgr.contract.errors import SnapmgrError

    path: str | None = ctx.find_root().params.get("config_path")
    try:
        return load_config(Path(path) if path is not None else None)
    except SnapmgrError:
        return None


def _items(incomplete: str, words: Iterable[tuple[str, str | None]]) -> list[click.shell_completion.CompletionItem]:
    """Return the words that begin with `incomplete`, each with its explanation."""
    return [
        click.shell_completion.CompletionItem(word, help=about) for word, about in words if word.startswith(incomplete)
    ]


class JobName(_NameType):
    """The name of a configured job."""

    name = "job"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """Return the jobs that begin with `incomplete`."""
        config = _completion_config(ctx)
        given = ctx.params.get(param.name or "") or ()
        return _items(incomplete, ((name, None) for name in config.jobs if name not in given) if config else ())


class SnapshotName(_NameType):
    """A snapshot: an id, the start of one or of its random part, or [JOB@]latest[-verified]."""

    name = "id"

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,
        incomplete: str,
    ) -> list[click.shell_completion.CompletionItem]:
        """Return the ids, and the names of the newest ones, that begin with `incomplete`."""
        from snapmgr.catalog.store import Catalog
        from snapmgr.contract.errors import SnapmgrError

        config = _completion_config(ctx)
        if config is None:
            return []
        try:
            snapshots = Catalog(config.state_dir).summaries()[0]
        except SnapmgrError:
            return []
        ready = [one for one in snapshots if one.state == "ready"]
        usable = dict.fromkeys(one.job for one in ready if not one.failed)
        verified = dict.fromkeys(one.job for one in ready if one.verified)
        words: list[tuple[str, str | None]] = [("latest", "the newest one")] if usable else []
        words += [("latest-verified", "the newest VERIFIED one")] if verified else []
        words += [(f"{job}@latest", f"the newest one of {job}") for job in usable]
        words += [(f"{job}@latest-verified", f"the newest VERIFIED one of {job}") for job in verified]
        # The random part alone is quicker to type; it is offered once the user begins with it.
        for one in reversed(snapshots):
            words.append((one.id, one.state))
            if incomplete:
                words.append((one.short_id, one.id))
        return _items(incomplete, words)


class SnapshotOrFolder(SnapshotName):
    """A snapshot, or the path of a folder, which contains a slash."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """Return what begins with `incomplete`; the shell completes paths itself."""
        if incomplete.startswith((".", "/")) or "/" in incomplete:
            return [click.shell_completion.CompletionItem(incomplete, type="dir")]
        return super().shell_complete(ctx, param, incomplete)


class MountName(SnapshotName):
    """A mount: its point, or the snapshot's name."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """Return the mount points and the ids of mounted snapshots that begin with `incomplete`."""
        from snapmgr.catalog.store import Catalog
        from snapmgr.contract.errors import SnapmgrError

        config = _completion_config(ctx)
        if config is None:
            return []
        try:
            leases = Catalog(config.state_dir).leases()[0]
        except SnapmgrError:
            return []
        words: dict[str, str | None] = {lease.point: lease.snapshot_id for lease in leases}
        # Ids are offered only once the user begins one.
        if incomplete:
            for snapshot_id in dict.fromkeys(lease.snapshot_id for lease in leases):
                words |= {snapshot_id: "mounted", snapshot_id.rpartition(".")[2]: snapshot_id}
        return _items(incomplete, words.items())


def _parsed(
    kind: click.ParamType[Any],
    parse: Callable[[str], _Number],
    text: str,
    param: click.Parameter | None,
    ctx: click.Context | None,
    *,
    zero: bool = False,
) -> _Number:
    """Return a number more than 0; with `zero` at least 0. The option fails otherwise."""
    try:
        number = parse(text)
    except ValueError as error:
        kind.fail(str(error), param, ctx)
    if number <= 0 and not zero:
        kind.fail("it must be more than 0", param, ctx)
    return number


class DurationText(_NumberType):
    """A duration such as "2h" or "1h30m"; its value is seconds."""

    name = "duration"

    def __init__(self, *, zero: bool = False) -> None:
        self._zero = zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401
        """Return seconds."""
        from snapmgr.contract.units import parse_duration

        return value if isinstance(value, float) else _parsed(self, parse_duration, value, param, ctx, zero=self._zero)


class SizeText(_SizeType):
    """A size such as "4G" or "512M"; its value is bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401
        """Return bytes."""
        from snapmgr.contract.units import parse_size

        return value if isinstance(value, int) else _parsed(self, parse_size, value, param, ctx)


class ShareText(_NumberType):
    """A share of all: "all" or a percentage; its value is greater than 0 and at most 1."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401 - click's signature
        """Return the share."""
        if isinstance(value, float):
            return value
        from snapmgr.config.model import Verify
        from snapmgr.config.values import read_table

        errors: list[str] = []
        # The configuration's parser, so that grammar and messages are the same.
        values = read_table({"tables": value}, Verify, "", errors, skip=frozenset())
        if errors:
            self.fail(errors[0].partition(": ")[2], param, ctx)
        return float(values["tables_share"])


def _want_json(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        session = ctx.ensure_object(Session)
        session.json = True
        session.command = ctx.command_path.partition(" ")[2]


def json_option(command: _Command) -> _Command:
    """Add ``--json``: one document on stdout, see docs/reference/json.md."""
    return click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_want_json,
        help="Print one JSON document on stdout (docs/reference/json.md).",
    )(command)


def unverified_option(command: _Command) -> _Command:
    """Add ``--unverified``: see `snapmgr.cli.choice.choose`."""
    return click.option("--unverified", is_flag=True, help="Use the snapshot although its verification failed.")(
        command
    )


def dry_run_option(command: _Command) -> _Command:
    """Add ``-n`` and ``--dry-run``."""
    return click.option(
        "-n",
        "--dry-run",
        is_flag=True,
        is_eager=True,
        callback=_note_dry_run,
        help="Show what would be done; change and lock nothing.",
    )(command)


def _note_dry_run(ctx: click.Context, _param: click.Parameter, value: bool) -> bool:
    """Note it for the document of a command that fails."""
    if value and not ctx.resilient_parsing:
        ctx.ensure_object(Session).dry_run = True
    return value
