"""Holds what one call of the program shares: the global options, configuration, catalog and console."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from snapmgr.cli.output import Console, print_document, print_lines
from snapmgr.contract.errors import EXIT_OK, ConfigError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from snapmgr.catalog.recordfolder import Damaged
    from snapmgr.catalog.store import Catalog
    from snapmgr.config.model import Config, Job
    from snapmgr.context import Context
    from snapmgr.contract.errors import SnapmgrError


class Session:
    """What one call of the program shares among its parts. Commands receive it through ``click.pass_obj``."""

    def __init__(self) -> None:
        self.config_path: Path | None = None
        self.quiet = self.verbose = self.debug = self.json = self.dry_run = False
        self.command = ""
        self.console = Console()
        self.documented = False
        """Whether the one JSON document has been printed."""
        self._config: Config | None = None

    def config(self) -> Config:
        """Return the configuration, read once. Raises ConfigError."""
        if self._config is None:
            from snapmgr.config.load import load_config

            self._config = load_config(self.config_path)
            self.console.detail(f"configuration: {', '.join(map(str, self._config.files))}")
        return self._config

    def catalog(self) -> Catalog:
        """Return the catalog of the state directory, which is not created; resume servers that dead runs left stopped.

        Raises ConfigError, CatalogError, MissingRequirementError.
        """
        from snapmgr.access.resume import resume_servers
        from snapmgr.catalog.store import Catalog

        catalog = Catalog(self.config().state_dir)
        for line in resume_servers(catalog):
            self.console.warn(line)
        return catalog

    def context(self) -> Context:
        """Return the surroundings that jobs get, with this console. Raises as `catalog`."""
        return self._context(self.config(), self.catalog())

    def stateless_context(self) -> Context:
        """Return them also on a machine without a configuration; its state directory is not used."""
        from snapmgr.catalog.store import Catalog
        from snapmgr.config.load import DEFAULT_PATH, default_config

        config = self.config() if self.config_path is not None or DEFAULT_PATH.exists() else default_config()
        return self._context(config, Catalog(config.state_dir))

    def _context(self, config: Config, catalog: Catalog) -> Context:
        from snapmgr.cli.running import VerboseRunner
        from snapmgr.context import Context

        return Context(
            config=config,
            catalog=catalog,
            runner=VerboseRunner(self.console.detail),
            tell=self.console.tell,
            progress=self.console.progress,
        )

    def jobs(self, names: Iterable[str]) -> list[Job]:
        """Return the configured jobs of these names, each once. Raises ConfigError for an unknown one."""
        try:
            return [self.config().job(name) for name in dict.fromkeys(names)]
        except NotFoundError as error:
            # A mistyped name is a usage error: nothing was done.
            raise ConfigError(error.message, hint=error.hint) from None

    def damaged(self, damaged: Iterable[Damaged]) -> list[dict[str, Any]]:
        """Warn about files that cannot be read, and return them as documents."""
        documents = []
        for one in damaged:
            self.console.warn(f"{one.path}: {one.problem}")
            documents.append({"path": str(one.path), "problem": one.problem})
        return documents

    def report(self, lines: Sequence[str], **fields: Any) -> int:  # noqa: ANN401
        """Print the result of a successful command, as lines or with --json as a document; return its exit code."""
        if self.json:
            self.document(EXIT_OK, **fields)
        else:
            print_lines(lines)
        return EXIT_OK

    def document(self, exit_code: int, error: SnapmgrError | None = None, **fields: Any) -> None:  # noqa: ANN401
        """Print the one JSON document."""
        print_document(self.command, exit_code, error, {"dry_run": True} | fields if self.dry_run else fields)
        self.documented = True
