"""The version has one owner; the site's tables name every setting, metric, command and public name."""

from __future__ import annotations

import re
import subprocess
import sys

import tensord
from docs import reference
from tensord.client.ctl.app import cli
from tensord.daemon.config.config import SETTINGS

from .pages import ROOT


def test_the_changelog_begins_with_the_version_of_the_package() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] in (tensord.__version__, "Unreleased")


def test_the_readme_names_the_version_of_the_package() -> None:
    series = ".".join(tensord.__version__.split(".")[:2])
    assert f"version {series}:" in (ROOT / "README.md").read_text()


def test_both_programs_print_the_version_of_the_package() -> None:
    for module, program in (("tensord.daemon", "tensord"), ("tensord.client.ctl", "tensorctl")):
        told = subprocess.run(
            [sys.executable, "-m", module, "--version"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert told.stdout == f"{program} {tensord.__version__}\n"


def test_a_free_threaded_python_is_refused_with_one_sentence() -> None:
    # Its abiflags alone tell such a build.
    told = subprocess.run(
        [sys.executable, "-c", "import sys; sys.abiflags = 't'; import tensord"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 1
    assert "ImportError: tensord does not run on a free-threaded build of Python: use" in told.stderr


def test_the_site_has_a_page_for_every_public_name() -> None:
    rows = [line for line in (ROOT / "docs" / "api.md").read_text().splitlines() if line.startswith("|")]
    named = re.findall(r"`(\w+)`", "".join(rows))
    assert sorted(named) == sorted({*tensord.__all__, "errors"} - {"__version__", "TensordError"})


def test_the_tables_of_the_site_name_every_setting_metric_and_command() -> None:
    assert sum(line.startswith("| `") for line in reference.settings()) == len(SETTINGS)
    assert sum(line.startswith("| `tensord_") for line in reference.all_metrics()) > 50
    assert sum(line.startswith("## tensorctl ") for line in reference.commands()) == len(cli.commands)
