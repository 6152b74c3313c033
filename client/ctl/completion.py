"""`completion`: the shell scripts that complete tensorctl's commands, options and stored keys.

Owns: the choice of the shell. Does not own: the scripts, which are click's.
"""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from .daemon import NAME

_VARIABLE: Final = "_TENSORCTL_COMPLETE"
_SHELLS: Final[dict[str, type[ShellComplete]]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


@click.command()
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Prints the completion script of a shell.

    \b
    bash  tensorctl completion bash > ~/.local/share/bash-completion/completions/tensorctl
    zsh   tensorctl completion zsh > "${fpath[1]}/_tensorctl"
    fish  tensorctl completion fish > ~/.config/fish/completions/tensorctl.fish
    """
    made = _SHELLS[shell](ctx.find_root().command, {}, NAME, _VARIABLE)
    # `source()` would run bash to check its version; the script works with every bash since 4.4.
    click.echo(made.source_template % made.source_vars())
