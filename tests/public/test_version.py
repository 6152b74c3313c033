"""The version has one owner, and whoever reads it elsewhere gets the same."""

from __future__ import annotations

import re
import subprocess
import sys

import tensord

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
