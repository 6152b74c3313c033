"""What sdist and wheel hold, and where pip takes the wheel: whoever installs from a registry gets these files only."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

from .pages import ROOT

pytest.importorskip("hatchling", reason="the extra `test` installs it")
PATIENCE_S = 600


def run(*words: str, cwd: Path, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dist")


@pytest.fixture(scope="module")
def sdist(folder: Path) -> Path:
    run("-m", "hatchling", "build", "-t", "sdist", "-d", str(folder), cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(folder: Path, sdist: Path) -> Path:
    """Built from the sdist, as pip does it."""
    run("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=sdist)
    (found,) = folder.glob("*.whl")
    return found


def files_below(folder: Path) -> set[str]:
    """All of a folder's files, through links, without what Python and tools make."""
    found = set()
    for path, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        found |= {str(Path(path, name).relative_to(folder)) for name in names if not name.endswith(".pyc")}
    return found


def test_the_wheel_has_every_file_of_the_package_and_the_units(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
    assert names == {f"tensord/{name}" for name in files_below(ROOT / "tensord")}
    assert {"tensord/systemd/tensord.service", "tensord/systemd/user/tensord.socket"} <= names


def test_the_wheel_is_for_linux_with_glibc_on_x86_64_and_any_python_3(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-manylinux_2_17_x86_64.whl")
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/WHEEL"))
        lines = opened.read(name).decode().splitlines()
    assert "Tag: py3-none-manylinux_2_17_x86_64" in lines
    assert "Root-Is-Purelib: false" in lines


def test_the_sdist_has_every_source_once(sdist: Path) -> None:
    places: dict[str, list[str]] = {}
    for name in sorted(name for name in files_below(sdist) if name.endswith(".py")):
        data = (sdist / name).read_bytes()
        if data:
            places.setdefault(sha256(data).hexdigest(), []).append(name)
    assert [names for names in places.values() if len(names) > 1] == []
    # What tests read and import lies in these.
    for folder in ("benchmarks", "docs", "examples", "ops", "tensord", "tests"):
        assert files_below(sdist / folder) == files_below(ROOT / folder)
