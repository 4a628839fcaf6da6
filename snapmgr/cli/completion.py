"""``snapmgr completion``."""

from __future__ import annotations

import click

from snapmgr.cli.output import write_result
from snapmgr.contract.errors import EXIT_OK


@click.command(
    epilog="""\b
Examples:
  snapmgr completion bash > /etc/bash_completion.d/snapmgr
  snapmgr completion zsh > ~/.zfunc/_snapmgr
  snapmgr completion fish > ~/.config/fish/completions/snapmgr.fish
"""
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> int:
    """Print the completion script for a shell.

    It completes commands, options, job names and snapshot ids.
    """
    from click.shell_completion import ShellComplete, get_completion_class

    from snapmgr.cli.main import COMPLETE_VARIABLE, PROGRAM, cli

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"There is no completion for {shell}.")
    # The base class's method, as the one for bash starts bash to ask for its version.
    write_result(ShellComplete.source(kind(cli, {}, PROGRAM, COMPLETE_VARIABLE)) + "\n")
    return EXIT_OK
