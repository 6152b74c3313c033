"""What is remembered of a file is believed of this file, as it is now, and of no other."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tensord.client.checkpoints import remembered as module
from tensord.client.checkpoints.remembered import remembered


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "REMEMBERED_BYTES_MIN", 1)
    monkeypatch.setattr(module, "SETTLED_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Digests:
    """Counts what is computed."""

    computed = 0

    def __call__(self, path: Path) -> str:
        self.computed += 1
        return f"digest of {path.read_text()}"


@pytest.fixture
def digests() -> Digests:
    return Digests()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model" / "model.safetensors"
    path.parent.mkdir()
    path.write_text("weights")
    return path


def note(weights: Path) -> Path:
    (found,) = (path for path in weights.parent.iterdir() if path != weights)
    return found


def test_a_file_is_read_once(weights: Path, digests: Digests) -> None:
    assert [remembered(weights, "1", digests) for _ in range(3)] == ["digest of weights"] * 3
    assert digests.computed == 1 and note(weights).name.startswith(".")


def written(path: Path) -> None:
    """As a patch may do it: the size stays, and so does the mtime."""
    about = path.stat()
    path.write_text("others.")
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def replaced(path: Path) -> None:
    path.with_name("other").write_text("others.")
    path.with_name("other").replace(path)


@pytest.mark.parametrize("change", [written, replaced])
def test_a_file_that_was_changed_is_read_again(weights: Path, digests: Digests, change: Callable[[Path], None]) -> None:
    remembered(weights, "1", digests)
    change(weights)
    assert remembered(weights, "1", digests) == "digest of others."


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "no text": lambda path: path.write_bytes(path.read_bytes().replace(b"weights", b"\xff" * 7)),
    "a link": linked,
    "a pipe": pipe,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_note_is_none(weights: Path, digests: Digests, damage: str) -> None:
    remembered(weights, "1", digests)
    DAMAGES[damage](note(weights))
    assert remembered(weights, "1", digests) == "digest of weights"
    assert digests.computed == 2
    remembered(weights, "of another form", digests)
    assert digests.computed == 3


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_a_note_that_another_user_wrote_is_none(weights: Path, digests: Digests) -> None:
    remembered(weights, "1", digests)
    os.chown(note(weights), 12345, 12345)
    remembered(weights, "1", digests)
    assert digests.computed == 2


def test_where_the_folder_cannot_be_written_the_users_cache_folder_has_the_note(
    weights: Path, digests: Digests, tmp_path: Path
) -> None:
    # As a folder that cannot be written, for root too: what has the note's name cannot be replaced.
    (weights.parent / f".{weights.name}.tensord-digest" / "in the way").mkdir(parents=True)
    assert [remembered(weights, "1", digests) for _ in range(3)] == ["digest of weights"] * 3
    assert digests.computed == 1
    assert len(list((tmp_path / "cache" / "tensord").iterdir())) == 1


def test_a_file_that_is_written_while_it_is_read_has_no_digest(weights: Path) -> None:
    def compute(path: Path) -> str:
        path.write_text("others.")
        return "digest of something in between"

    with pytest.raises(OSError, match="was written while it was read"):
        remembered(weights, "1", compute)


def test_a_file_that_was_just_written_is_not_remembered(
    weights: Path, digests: Digests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SETTLED_S", 1e6)
    assert [remembered(weights, "1", digests) for _ in range(2)] == ["digest of weights"] * 2
    assert digests.computed == 2
    assert list(weights.parent.iterdir()) == [weights]
