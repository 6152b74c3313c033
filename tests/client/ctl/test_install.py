"""`tensorctl install`: what it lays where, and what it refuses.

The service itself is installed under a real systemd by tests/systemd.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from tensord.client.ctl import install

from .conftest import Ctl

CHECKOUT = Path(__file__).parents[3]
PROGRAM = Path(sys.executable).with_name("tensord")


def laid(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """The steps since the last call."""
    return lambda: capsys.readouterr().out.splitlines()


def test_everything_that_the_service_needs_is_laid_in_place_and_taken_away(
    tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    root = tmp_path / "root"
    places = install.system_places(root)
    texts = install.texts(places, install.start_word(PROGRAM))
    install.write(texts, places.config)
    assert said() == [f"write {path}" for path in texts]
    install.write(texts, places.config)
    assert said() == ["every file is in place already"]
    found = laid(root)
    expected = {
        "etc/tensord/tensord.toml": "tensord.toml",
        "etc/sysusers.d/tensord.conf": "sysusers.d/tensord.conf",
        "etc/tmpfiles.d/tensord.conf": "tmpfiles.d/tensord.conf",
        **{f"etc/systemd/system/{unit.name}": unit.name for unit in install.SHIPPED.glob("tensord*.*[!l]")},
    }
    assert found.keys() == expected.keys()
    for path, name in expected.items():
        text = (install.SHIPPED / name).read_text()
        text = text.replace("/opt/tensord/bin/tensord\n", f"{PROGRAM}\n")
        assert found[path] == text.replace("/opt/tensord/bin/tensorctl", str(PROGRAM.with_name("tensorctl"))), path
        assert (root / path).stat().st_mode & 0o777 == 0o644
    assert f"ExecStart={PROGRAM}\n" in found["etc/systemd/system/tensord.service"]
    assert f"ExecReload={PROGRAM.with_name('tensorctl')} reload\n" in found["etc/systemd/system/tensord.service"]
    beside = places.config.with_name("drop-in.toml")
    beside.write_text("mine")
    install.remove(texts, places.config)
    assert said() == [f"remove {path}" for path in texts]
    assert laid(root) == {"etc/tensord/drop-in.toml": "mine"} and places.units.is_dir()
    beside.unlink()
    install.remove(texts, places.config)
    assert not places.config.parent.exists(), "a folder of its own goes with the last file"


def test_a_unit_is_brought_up_to_date_and_a_changed_configuration_is_neither_replaced_nor_removed(
    tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    unit, config = tmp_path / "units/a.service", tmp_path / "etc/a.toml"
    config.parent.mkdir()
    config.write_text("mine")
    for text in ("one", "two"):
        install.write({unit: text, config: "# all"}, config)
        assert said() == [f"write {unit}"]
    assert (unit.read_text(), config.read_text()) == ("two", "mine")
    install.remove({unit: "two", config: "# all"}, config)
    assert f"keep {config}: it was changed here; remove it by hand" in said()
    assert config.read_text() == "mine" and not unit.exists()


@pytest.mark.parametrize(
    ("program", "word"), [("/a/100%/t", "/a/100%%/t"), ("/a b/t", '"/a b/t"'), ('/a"/t', '"/a\\"/t"')]
)
def test_a_path_with_characters_that_units_expand_is_quoted(program: str, word: str) -> None:
    assert install.start_word(Path(program)) == word


def test_a_service_that_cannot_be_installed_here_is_refused(
    alone: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root: use sudo, or --user" in alone("install", code=1).err
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(install, "_BOOTED", tmp_path / "nothing")
    assert "no systemd runs this machine" in alone("install", code=1).err
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert "no service manager of this user runs here" in alone("install", "--user", code=1).err
    monkeypatch.setattr(install, "no_manager", lambda user: None)
    assert "has installed nothing" in alone("install", "--user", "--uninstall", code=1).err
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_the_service_could_not_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin/tensord"
    program.parent.mkdir()
    program.touch(0o755)
    assert "hidden from it: install it with" in str(install.unusable(program, system=True))
    assert install.unusable(program, system=False) is None
    monkeypatch.setattr(install, "_HIDDEN", ())
    closed = next(each for each in (tmp_path, *tmp_path.parents) if not each.stat().st_mode & stat.S_IXOTH)
    assert f"cannot read {closed}" in str(install.unusable(program, system=True))
    nowhere = install.unusable(tmp_path / "nowhere/tensord", system=True)
    assert "run the tensorctl of the environment" in str(nowhere)


def test_a_program_that_fails_ends_with_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORD_RING_BYTES", "much")
    said = "import os, sys; sys.exit(f\"no {os.environ.get('TENSORD_RING_BYTES')}\")"
    with pytest.raises(click.ClickException, match="ended with 1: no None; mend it"):
        install.run(sys.executable, "-c", said)
    install.run(sys.executable, "-c", said, may_fail=True)
    with pytest.raises(click.ClickException, match="No such file"):
        install.run("/no/such/program")
