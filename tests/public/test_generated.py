"""The tables of the site name every setting, metric and command, and docs/api.md every public name."""

from __future__ import annotations

import re

import tensord
from docs import reference
from tensord.client.ctl.app import cli
from tensord.daemon.config.config import SETTINGS

from .pages import ROOT


def test_the_site_has_a_page_for_every_public_name() -> None:
    rows = [line for line in (ROOT / "docs" / "api.md").read_text().splitlines() if line.startswith("|")]
    named = re.findall(r"`(\w+)`", "".join(rows))
    assert sorted(named) == sorted({*tensord.__all__, "errors"} - {"__version__", "TensordError"})


def test_the_tables_of_the_site_name_every_setting_metric_and_command() -> None:
    assert sum(line.startswith("| `") for line in reference.settings()) == len(SETTINGS)
    assert sum(line.startswith("| `tensord_") for line in reference.all_metrics()) > 50
    assert sum(line.startswith("## tensorctl ") for line in reference.commands()) == len(cli.commands)
