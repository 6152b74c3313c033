"""What an installation writes, keeps and removes: no change of the operator is lost, no other file goes."""

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
        self.record = folder / "lib" / "installed.json"

    def install(self, unit: str, config: str = "# all") -> list[str]:
        return self.do(plan.installation({self.unit: unit, self.config: config}, self.record))

    def remove(self) -> list[str]:
        return self.do(plan.removal(self.record, [self.config.parent, self.record.parent]))

    def do(self, steps: list[plan.PlannedStep]) -> list[str]:
        for step in steps:
            step.carry_out()
        return [step.says for step in steps]

    @property
    def new(self) -> Path:
        return self.unit.with_name("a.service.new")


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def test_a_second_installation_does_nothing(disk: Disk) -> None:
    assert disk.install("one") == [
        f"write {disk.unit}", f"write {disk.config}", f"write {disk.record}",
    ]  # fmt: skip
    assert disk.unit.read_text() == "one"
    assert disk.unit.stat().st_mode & 0o777 == 0o644
    assert disk.install("one") == []


def test_a_file_that_nobody_changed_is_brought_up_to_date(disk: Disk) -> None:
    disk.install("one")
    assert disk.install("two")[0] == f"write {disk.unit}"
    assert disk.unit.read_text() == "two"
    assert not disk.new.exists()


def test_a_file_that_the_operator_changed_is_kept_and_the_release_s_stands_beside_it(disk: Disk) -> None:
    disk.install("one")
    disk.unit.write_text("mine")
    assert disk.install("one") == [f"keep {disk.unit}: it was changed here"], "this release brings nothing new"
    assert not disk.new.exists()
    for _ in range(2):
        disk.install("two")
        assert (disk.unit.read_text(), disk.new.read_text()) == ("mine", "two")
    disk.unit.write_text("two")
    disk.install("two")
    assert not disk.new.exists(), "the operator has taken it over"


def test_a_file_that_was_there_before_the_first_installation_is_kept(disk: Disk) -> None:
    disk.unit.parent.mkdir()
    disk.unit.write_text("another's")
    disk.install("one")
    assert (disk.unit.read_text(), disk.new.read_text()) == ("another's", "one")
    disk.remove()
    assert (disk.unit.read_text(), disk.new.exists()) == ("another's", False)


def test_a_file_that_was_deleted_is_written_again(disk: Disk) -> None:
    disk.install("one")
    disk.unit.unlink()
    assert disk.install("one") == [f"write {disk.unit}"]


def test_a_file_that_a_release_no_longer_has_is_removed_unless_it_was_changed(disk: Disk) -> None:
    disk.install("one")
    only_config = {disk.config: "# all"}
    assert disk.do(plan.installation(only_config, disk.record))[0] == f"remove {disk.unit}"
    disk.install("one")
    disk.unit.write_text("mine")
    disk.do(plan.installation(only_config, disk.record))
    assert disk.unit.read_text() == "mine"


def test_removal_takes_what_was_installed_and_nothing_else(disk: Disk) -> None:
    disk.install("one")
    beside = disk.config.with_name("drop-in.toml")
    beside.write_text("mine")
    steps = disk.remove()
    assert f"remove {disk.config.parent}, if it is empty" in steps
    assert beside.exists() and not disk.config.exists()
    assert not disk.unit.exists() and disk.unit.parent.is_dir()
    assert not disk.record.parent.exists(), "a folder of its own goes with the last file"


def test_removal_keeps_what_the_operator_changed_and_says_so(disk: Disk) -> None:
    disk.install("one")
    disk.config.write_text("ring_bytes = '1GiB'")
    kept = [step for step in disk.remove() if step.startswith("keep ")]
    assert kept == [f"keep {disk.config}: it was changed here; remove it by hand"]
    assert disk.config.exists()


def test_an_installation_that_was_interrupted_is_finished_by_the_next(disk: Disk) -> None:
    first, *_ = plan.installation({disk.unit: "one", disk.config: "# all"}, disk.record)
    first.carry_out()
    disk.install("one")
    disk.remove()
    assert not disk.unit.exists()


def test_a_damaged_record_is_refused(disk: Disk) -> None:
    disk.record.parent.mkdir()
    for text in ("{", "[]", "5"):
        disk.record.write_text(text)
        with pytest.raises(click.ClickException, match="remove it, and run"):
            disk.remove()


def test_a_program_that_fails_ends_with_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORD_RING_BYTES", "much")
    said = "import os, sys; sys.exit(f\"no {os.environ.get('TENSORD_RING_BYTES')}\")"
    with pytest.raises(click.ClickException, match="ended with 1: no None; mend it"):
        plan.run(sys.executable, "-c", said).carry_out()
    plan.run(sys.executable, "-c", said, may_fail=True).carry_out()
    with pytest.raises(click.ClickException, match="No such file"):
        plan.run("/no/such/program").carry_out()
