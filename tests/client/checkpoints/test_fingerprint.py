"""A model's weights have one name for one content, wherever they lie, and another for anything else.

A model that was changed while an engine loaded it is known to be.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tensord.client.checkpoints import fingerprint
from tensord.client.checkpoints.fingerprint import weights_changed, weights_fingerprint
from tensord.client.checkpoints.loading import _FILES_CLOCK, loading_began_with_process, loading_begins

from ...daemon_process import until
from ...vllm.tiny_llava import write_tiny_llava


def test_a_folders_fingerprint_goes_with_its_content_wherever_it_lies(tmp_path: Path) -> None:
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    for folder, seed in ((one, 0), (same, 0), (other, 1)):
        write_tiny_llava(folder, seed)
    named = weights_fingerprint(str(one))
    assert named is not None
    assert named == weights_fingerprint(str(same))
    assert named != weights_fingerprint(str(other))


@pytest.mark.parametrize(
    "path",
    [
        *("config.json", "preprocessor_config.json", "model.safetensors"),
        *("modeling_tiny.py", "inner/layers.py", "params.json"),
    ],
)
def test_weights_and_the_code_and_settings_beside_them_are_part_of_the_name(tmp_path: Path, path: str) -> None:
    folder = write_tiny_llava(tmp_path)
    before, changed = weights_fingerprint(str(folder)), folder / path
    changed.parent.mkdir(exist_ok=True)
    content = bytearray(changed.read_bytes() if changed.exists() else b"{ }")
    content[-2] ^= 1
    changed.write_bytes(content)
    assert weights_fingerprint(str(folder)) != before


def test_a_single_file_is_named_by_its_content_and_what_has_no_weights_has_no_name(tmp_path: Path) -> None:
    one, other = tmp_path / "one.gguf", tmp_path / "other.gguf"
    assert weights_fingerprint(str(one)) is None and weights_fingerprint(str(tmp_path)) is None
    one.write_bytes(b"weights")
    other.write_bytes(b"other weights")
    assert weights_fingerprint(str(one)) not in (None, weights_fingerprint(str(other)))


def test_every_byte_of_the_weights_is_part_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_PIECE_BYTES", 100)
    path = tmp_path / "model.safetensors"
    content = bytearray(range(250))
    names = set()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        names.add(weights_fingerprint(str(tmp_path)))
    assert len(names) == len(content) and None not in names


# ---- changes during the loading of weights


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
