"""Other releases of tensord, built from the repository's history and installed beside this one.

Owns: the choice of the releases, and a cache of them under build/, which git ignores. Does not own what runs of them.
Nothing is downloaded: a release is built by this environment's hatchling, and runs with this environment's packages.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from shutil import rmtree
from typing import Final, NamedTuple

import pytest

import tensord

from ..public.pages import ROOT

BUILD_S: Final = 300.0
_CACHE: Final = ROOT / "build" / "releases"


class Release(NamedTuple):
    """A release by its tag or commit, with the versions of the wire and of the shared memory that it has."""

    name: str
    commit: str
    protocol: int | None = None
    layout: int | None = None

    @property
    def folder(self) -> Path:
        """Where it is installed: a folder for PYTHONPATH. Skips the test where it cannot be built."""
        pytest.importorskip("hatchling", reason="the extra `test` installs it")
        commit = _git("rev-parse", "--verify", "--quiet", f"{self.commit}^{{commit}}")
        if not commit:
            pytest.skip(f"{self.name} ({self.commit}) is not in this checkout, which has no git or a short history")
        folder = _CACHE / commit
        if not folder.is_dir():
            _install(commit, folder)
        return folder


FORMER_PROTOCOL: Final = Release("protocol version 3", "93d00a2e553f4d889dad863355eb1a4f3c993cbd", 3, 5)
"""The first commit whose protocol version is the one before, and whose memory this release reads."""
FORMER_LAYOUT: Final = Release("layout version 4", "cdecce7886b5e293b5cdb93c1d72102c8a674a51", 4, 4)
"""The first commit of this protocol version, whose memory has the layout version before."""


def last_release() -> Release:
    """The last release that was tagged, other than this one. Before there is one: the former protocol version."""
    tags = _git("tag", "--list", "v*", "--merged", "HEAD", "--sort=-v:refname").split()
    tags = [tag for tag in tags if tag != f"v{tensord.__version__}"]
    return Release(tags[0], tags[0]) if tags else FORMER_PROTOCOL


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=BUILD_S)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _install(commit: str, folder: Path) -> None:
    """Other processes may do the same: the first of them that is done gives the folder its name."""
    _CACHE.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(dir=_CACHE, prefix=f"{commit[:8]}-"))
    try:
        source = making / "source"
        source.mkdir()
        archive = making / "source.tar"
        _run("git", "archive", "--output", str(archive), commit, cwd=ROOT)
        _run("tar", "-xf", str(archive), "-C", str(source), cwd=making)
        _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(making), cwd=source)
        (wheel,) = making.glob("*.whl")
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps")
        _run(*pip, "--no-index", "--target", str(making / "installed"), str(wheel), cwd=making)
        if not folder.exists():
            (making / "installed").rename(folder)
    finally:
        rmtree(making)


def _run(*words: str, cwd: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, timeout=BUILD_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
