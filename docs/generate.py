"""Writes docs/configuration.md from the settings of the daemon; with the argument -, prints it.

Owns: how settings look as Markdown. Does not own: the settings (tensord.daemon). tests/public/test_generated.py refuses
a page that is not as this program writes it.
"""

from __future__ import annotations

import inspect
import sys
import typing
from pathlib import Path
from typing import Any, Final

from tensord.daemon.config.config import Config
from tensord.daemon.config.settings import Setting, flag_of, settings_of, variable_of

PAGE: Final = Path(__file__).with_name("configuration.md")
SAMPLE: Final = "limits.clients_max"

CONFIGURATION_INTRODUCTION: Final = f"""\
# Configuration

This page is generated from the settings of the daemon: `python docs/generate.py`.

The daemon needs no configuration. Each setting can be given in three ways. A flag wins over a variable, a variable over
the file, the file over the default:

| way | example |
|---|---|
| flag | `{flag_of(SAMPLE)} 64` |
| environment variable | `{variable_of(SAMPLE)}=64` |
| TOML file | `clients_max = 64` under `[limits]` |

`--config` names the file. Without it the file is `$TENSORD_CONFIG`, else the user's `~/.config/tensord/tensord.toml` or
the system's `/etc/tensord/tensord.toml`. `systemd/tensord.toml` is an example with every setting.

Sizes are bytes or texts such as `4GiB`. Durations are seconds or texts such as `10m`. `none` stands for no value. A
setting that is true or false has the two flags `--NAME` and `--no-NAME`.

A wrong value, an unknown flag and an unknown key in the file stop the daemon, with exit status 2 and the nearest known
name. An unknown `TENSORD_*` variable does not: the daemon logs a warning and ignores it. Kubernetes sets `TENSORD_PORT`
and more for a Service called tensord, and clients read variables such as `TENSORD_VLLM_PROCESSOR_CACHE`.

A setting with "yes" under "reload" changes in a running daemon: `systemctl reload tensord`, or SIGHUP. Any other
setting needs a restart. `tensorctl config check` shows the value and the source of every setting.
"""


def configuration_text() -> str:
    """The page of all settings, section by section."""
    lines = CONFIGURATION_INTRODUCTION.splitlines()
    sections = {name: of for name, of in typing.get_type_hints(Config).items() if isinstance(of, type)}
    table = None
    for key, setting, default in settings_of(Config):
        section, _, name = key.rpartition(".")
        if section != table:
            table = section
            said = inspect.getdoc(sections[section]) or "" if section else "Keys at the top of the file."
            lines += ["", f"## {section or 'General'}", "", said.split("\n\n")[0].replace("\n", " "), ""]
            lines += ["| setting | default | value | reload | meaning |", "|---|---|---|---|---|"]
        lines.append(row_of(name, setting, default))
    return "\n".join(lines) + "\n"


def row_of(name: str, setting: Setting, default: Any) -> str:
    """A setting's row."""
    shown = setting.derived or f"`{setting.show(default)}`"
    wants = setting.wants.removeprefix("must be ")
    cells = [f"`{name}`", shown, wants, "yes" if setting.reload else "", setting.doc[0].upper() + setting.doc[1:]]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "\\<") for cell in cells) + " |"


if __name__ == "__main__":
    if sys.argv[1:] == ["-"]:
        sys.stdout.write(configuration_text())
    else:
        PAGE.write_text(configuration_text())
