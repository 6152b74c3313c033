"""What `make release-check` holds a release back for. The whole of it installs packages, and is run before a tag."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tensord

from ..daemon_process import PATIENCE_S
from ..public.pages import ROOT

PROGRAMS = Path(sys.executable).parent


@pytest.fixture
def check() -> Any:
    """The program as a module."""
    spec = importlib.util.spec_from_file_location("release_check", ROOT / "ops" / "release_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this environment's programs."""
    if not (PROGRAMS / "tensord").exists():
        pytest.skip("tensord is not installed in this environment")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return PROGRAMS


def test_make_runs_it_with_what_the_extra_installs() -> None:
    command = ["make", "--no-print-directory", "--dry-run", "release-check"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert told.stdout.rstrip().endswith(".venv/bin/python ops/release_check.py dist"), told.stderr
    assert "tensord[release]" in told.stdout or (ROOT / ".venv" / ".stamps" / "release").exists()


def test_the_programs_and_the_readme_of_this_checkout_pass(check: Any, installed: Path, tmp_path: Path) -> None:
    check.used(installed, tensord.__version__, tmp_path)


def test_programs_of_another_version_hold_a_release_back(check: Any, installed: Path, tmp_path: Path) -> None:
    with pytest.raises(check.Wrong, match=f"says 'tensord {tensord.__version__}', and not 9"):
        check.used(installed, "9.9.9", tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("print('no entry')", "stored 0 entries, not 1"),
        (
            "import os, tensord\ntensord.Client().put(os.urandom(32), 1, wait=True)",
            "stored 2 entries, not 1",
        ),
    ],
)
def test_a_readme_whose_program_fails_or_shares_nothing_holds_a_release_back(
    text: str, reason: str, check: Any, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "program", lambda: text)
    with pytest.raises(check.Wrong, match=reason):
        check.used(installed, tensord.__version__, tmp_path)


def test_a_daemon_that_does_not_start_is_told_with_its_log(check: Any, tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (
        ("tensord", "echo no memory at all >&2; exec sleep 60"),
        ("python", "until [ -s log ]; do :; done; exit 1"),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    with pytest.raises(check.Wrong, match="no memory at all"), check.daemon(programs, tmp_path):
        pass


@pytest.mark.parametrize(
    ("heading", "tags", "reason"),
    [
        ("Unreleased", [], "begins with 'Unreleased', and tensord/__init__.py has '1.2.3'"),
        ("1.2.3", ["v1.2.3", "another commit"], "v1.2.3 is tagged at .*: raise the version"),
        ("1.2.3", ["another commit", "v1.2.3"], None),
        ("1.2.3", [], None),
    ],
)
def test_the_changelog_and_the_tag_have_to_be_of_the_version(
    heading: str, tags: list[str], reason: str | None, check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tags`: the commits of a history; one that begins with v has this tag."""
    (tmp_path / "tensord").mkdir()
    (tmp_path / "tensord" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {heading}\n\n## 1.2.2\n")
    for number, name in enumerate(tags):
        if not number:
            git(tmp_path, "init", "--quiet")
        git(tmp_path, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "--allow-empty", "--quiet", "-m", name)
        if name.startswith("v"):
            git(tmp_path, "tag", name)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    if reason is None:
        assert check.version() == "1.2.3"
        return
    with pytest.raises(check.Wrong, match=reason):
        check.version()


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=folder, check=True, timeout=PATIENCE_S, capture_output=True)
