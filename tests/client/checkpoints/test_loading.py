"""A model that was changed while an engine loaded it is known to be."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tensord.client.checkpoints.fingerprint import weights_changed
from tensord.client.checkpoints.loading import _FILES_CLOCK, loading_began_with_process, loading_begins

from ...daemon_process import until


def model(folder: Path) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "model.safetensors").write_text("weights")
    (folder / "inner" / "config.json").write_text("{}")
    return folder


def relink(path: Path, to: Path) -> None:
    path.unlink()
    path.symlink_to(to)


CHANGES: dict[str, Callable[[Path], object]] = {
    "a file is written": lambda at: (at / "models/v1/model.safetensors").write_text("others"),
    "a file of a folder below is written": lambda at: (at / "models/v1/inner/config.json").write_text("[]"),
    "a file is replaced by an older one": lambda at: (at / "models/v2/model.safetensors").rename(
        at / "models/v1/model.safetensors"
    ),
    "the link is moved": lambda at: relink(at / "current", at / "models/v2"),
    "a link on the way is moved": lambda at: relink(at / "store", at / "others"),
    "the folder is renamed": lambda at: (
        (at / "models/v1").rename(at / "models/old"),
        (at / "models/v2").rename(at / "models/v1"),
    ),
}


@pytest.fixture
def host(tmp_path: Path) -> Path:
    for name in ("models/v1", "models/v2", "others/v1"):
        model(tmp_path / name)
    (tmp_path / "store").symlink_to(tmp_path / "models")
    (tmp_path / "current").symlink_to("store/v1")
    # Kernels since 6.13 may stamp a file by a finer clock, which is ahead of the coarse one.
    written_ns = max(path.lstat().st_ctime_ns for path in (tmp_path, *tmp_path.rglob("*")))
    until(lambda: time.clock_gettime_ns(_FILES_CLOCK) > written_ns, "the clock of files to go on")
    loading_begins(str(tmp_path / "current"))
    return tmp_path


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_during_the_loading_of_weights_is_found(host: Path, change: str) -> None:
    CHANGES[change](host)
    assert weights_changed(str(host / "current")) is not None


def test_what_was_there_before_a_note_and_a_model_that_nobody_loads_have_not_changed(host: Path) -> None:
    (host / "models/v1/.model.safetensors.tensord-digest").write_text("note")
    os.utime(host / "models/v2/model.safetensors")
    assert weights_changed(str(host / "current")) is None
    assert weights_changed(str(host / "models/v2")) is None


def test_without_a_record_loading_may_be_taken_to_have_begun_with_the_process(tmp_path: Path) -> None:
    # The interpreter's own library is older than this process, and a file of this test is younger.
    older = str(Path(os.__file__).parent / "json")
    younger = str(model(tmp_path))
    for place in (older, younger):
        loading_began_with_process(place)
    assert weights_changed(older) is None
    assert weights_changed(younger) is not None
