"""What an installation writes, keeps and removes: the units are the package's, the configuration is the operator's."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest

from tensord.client.ctl.install import plan


class Disk:
    """A folder with a unit and a configuration, installed from a release whose texts a test chooses."""

    def __init__(self, folder: Path) -> None:
        self.unit = folder / "units" / "a.service"
        self.config = folder / "etc" / "a.toml"

    def install(self, unit: str) -> list[str]:
        return self.do(plan.installation({self.unit: unit, self.config: "# all"}, self.config))

    def remove(self) -> list[str]:
        return self.do(plan.removal({self.unit: "one", self.config: "# all"}, self.config))

    def do(self, steps: list[plan.PlannedStep]) -> list[str]:
        for step in steps:
            step.carry_out()
        return [step.says for step in steps]


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def test_a_second_installation_does_nothing(disk: Disk) -> None:
    assert disk.install("one") == [f"write {disk.unit}", f"write {disk.config}"]
    assert disk.unit.read_text() == "one"
    assert disk.unit.stat().st_mode & 0o777 == 0o644
    assert disk.install("one") == []


def test_a_unit_is_brought_up_to_date_and_a_configuration_is_never_replaced(disk: Disk) -> None:
    disk.config.parent.mkdir()
    disk.config.write_text("mine")
    disk.install("one")
    assert disk.install("two") == [f"write {disk.unit}"]
    assert (disk.unit.read_text(), disk.config.read_text()) == ("two", "mine")


def test_removal_takes_what_was_installed_and_nothing_else(disk: Disk) -> None:
    disk.install("one")
    beside = disk.config.with_name("drop-in.toml")
    beside.write_text("mine")
    assert f"remove {disk.config.parent}, if it is empty" in disk.remove()
    assert beside.exists() and not disk.config.exists()
    assert not disk.unit.exists() and disk.unit.parent.is_dir()
    beside.unlink()
    disk.remove()
    assert not disk.config.parent.exists(), "a folder of its own goes with the last file"


def test_removal_keeps_a_changed_configuration_and_says_so(disk: Disk) -> None:
    disk.install("one")
    disk.config.write_text("ring_bytes = '1GiB'")
    kept = [step for step in disk.remove() if step.startswith("keep ")]
    assert kept == [f"keep {disk.config}: it was changed here; remove it by hand"]
    assert disk.config.exists()


def test_a_program_that_fails_ends_with_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORD_RING_BYTES", "much")
    said = "import os, sys; sys.exit(f\"no {os.environ.get('TENSORD_RING_BYTES')}\")"
    with pytest.raises(click.ClickException, match="ended with 1: no None; mend it"):
        plan.run(sys.executable, "-c", said).carry_out()
    plan.run(sys.executable, "-c", said, may_fail=True).carry_out()
    with pytest.raises(click.ClickException, match="No such file"):
        plan.run("/no/such/program").carry_out()
