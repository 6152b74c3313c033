from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tensord.client.ctl.app import cli

TEXT = (Path(__file__).parents[3] / "docs" / "tensorctl.md").read_text()


def _commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path}{name} ")
        else:
            yield path + name, command


COMMANDS = dict(_commands(cli))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_section_that_names_all_its_options(name: str) -> None:
    _, found, rest = TEXT.partition(f"\n## tensorctl {name}")
    assert found, f"docs/tensorctl.md has no section on {name}"
    section = rest.partition("\n## ")[0]
    for parameter in COMMANDS[name].params:
        if isinstance(parameter, click.Option):
            assert f"`{parameter.opts[-1]}" in section


def test_the_page_has_no_section_on_what_is_not_there() -> None:
    heads = [line.removeprefix("## tensorctl ") for line in TEXT.splitlines() if line.startswith("## tensorctl ")]
    assert [" ".join(word for word in head.split() if word.islower()) for head in heads] == list(COMMANDS)


def test_the_options_of_all_commands_are_named() -> None:
    for parameter in cli.params:
        assert f"`{parameter.opts[-1]}" in TEXT
