"""The tables of the site that are made from the source: settings, metrics, and the commands of tensorctl.

Owns: how these look as Markdown. Does not own: their texts, which `systemd/tensord.toml`, /metrics and `tensorctl
COMMAND --help` show too. site_pages.py appends the tables to the pages of the same names.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from tensord.client.ctl.app import cli
from tensord.daemon.config.config import SETTINGS, TABLES
from tensord.daemon.config.settings import Setting
from tensord.daemon.config.usage import descriptions
from tensord.daemon.web import metrics
from tests.client.ctl import documents


def settings() -> Iterator[str]:
    """All settings, section by section."""
    table, said_of = None, descriptions()
    for key, setting in SETTINGS.items():
        section, _, name = key.rpartition(".")
        if section != table:
            table = section
            said = inspect.getdoc(TABLES[section]) or "" if section else "Keys at the top of the file."
            yield from ("", f"## {section or 'General'}", "", said.split("\n\n")[0].replace("\n", " "), "")
            yield from ("| setting | default | value | reload | meaning |", "|---|---|---|---|---|")
        yield row_of(name, setting, said_of[key])


def row_of(name: str, setting: Setting, said: str) -> str:
    """A setting's row."""
    shown = setting.derived or f"`{setting.show(setting.default)}`"
    wants = setting.wants.removeprefix("must be ")
    cells = [f"`{name}`", shown, wants, "yes" if setting.reload else "", said]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "\\<") for cell in cells) + " |"


def all_metrics() -> Iterator[str]:
    """All metrics, as a daemon with a card and a remote store has them."""
    yield from ("", "## All of them", "", "| name | labels | meaning |", "|---|---|---|")
    for family in metrics.families(documents.status()):
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        yield f"| `{name}` | {', '.join(vars(family).get('_labelnames', ()))} | {family.documentation} |"


def commands() -> Iterator[str]:
    """All commands, with their help and options."""
    for name, command in cli.commands.items():
        arguments = "".join(
            f" {each.make_metavar(click.Context(command))}" for each in command.params if is_argument(each)
        )
        yield from ("", f"## tensorctl {name}{arguments}", "")
        for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
            kept = paragraph.removeprefix("\b\n")
            yield from ("", *(["```text", kept, "```"] if kept != paragraph else [kept]))
        options = [each for each in command.params if isinstance(each, click.Option)]
        if options:
            yield from ("", "| option | meaning |", "|---|---|")
        for option in options:
            said = (option.help or "").replace("|", "\\|")
            yield f"| {', '.join(f'`{each}`' for each in option.opts)} | {said} |"


def is_argument(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Argument)
