"""Directories in which something is wrong: one object, one namespace's generations, all that was there, or the file
system."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tensord.daemon.remote_stores.directory import DirectoryStore
from tensord.errors import TierReadOnly, TierRefused, TierUnavailable

from .entries import calls, get, key_of, made, put
from .test_directory import on_a_disk_of_2_mib

TAG = key_of(1)[:8]


@pytest.mark.root
@pytest.mark.parametrize("what", ["the file", "its folder"])
def test_an_object_that_may_not_be_read_is_a_counted_miss_and_the_others_are_served(what: str) -> None:
    said = on_a_disk_of_2_mib(f"""
put(store, made(2))
[path] = Path("/mnt").glob(f"tensord-1/??/{{key_of(1).hex()}}")
for each in [Path("/mnt/tensord-1"), *Path("/mnt/tensord-1").rglob("*")]:
    each.chmod(0o777)
(path if {what!r} == "the file" else path.parent).chmod(0)
os.setuid(65534)
assert heads(store, [key_of(1), key_of(2)])[0] is None
assert get(store, key_of(1)) is None and get(store, key_of(2)) is not None
assert store.corrupt == 2
print(store.last_corrupt)
if {what!r} == "the file":
    put(store, made(1))
    assert get(store, key_of(1)) is not None, "it was replaced"
""")
    assert "Permission denied" in said and key_of(1).hex() in said


@pytest.mark.root
def test_a_directory_that_may_not_be_entered_is_refused_as_a_whole() -> None:
    said = on_a_disk_of_2_mib("""
os.chmod("/mnt/tensord-1", 0)
os.setuid(65534)
said(get, store, key_of(1))
""")
    assert said.startswith("TierRefused ") and "give uid 65534 access" in said


def test_a_generation_with_nonsense_is_refused_and_said(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    assert store.raise_generation(TAG, 3) == 3
    nonsense = tmp_path / "tensord-1" / "gen" / TAG.hex() / "99999999999"
    nonsense.touch()
    for call in (lambda: store.generations([TAG]), lambda: store.raise_generation(TAG, 1)):
        with pytest.raises(TierRefused, match=f"{nonsense} is beyond the last generation, .*: remove it"):
            call()
    nonsense.unlink()
    assert store.generations([TAG]) == [3]


def test_a_directory_whose_mount_is_gone_is_away_and_not_empty(tmp_path: Path) -> None:
    root, mounted = tmp_path / "mount", tmp_path / "elsewhere"
    root.mkdir()
    store = DirectoryStore(root)
    put(store, made(1))
    assert get(store, key_of(2)) is None
    root.rename(mounted)
    root.mkdir()
    for call in calls(store, made(1)):
        with pytest.raises(TierUnavailable, match=f"{root} has no folder tensord-1 any more: mount it again"):
            call()
        assert not any(root.iterdir()), "nothing is written below a mount that is missing"
    root.rmdir()
    mounted.rename(root)
    assert get(store, key_of(1)) is not None
    assert get(store, key_of(2)) is None
    put(store, made(2))
    assert get(store, key_of(2)) is not None


def test_an_object_that_may_not_be_removed_keeps_no_other_from_going(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path)
    for number in (1, 2, 3):
        put(store, made(number))
    real, kept = os.unlink, key_of(2).hex()

    def unlink(path: Path) -> None:
        if path.name == kept:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        real(path)

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(TierReadOnly, match=kept):
        store.remove([key_of(1), key_of(2), key_of(3)])
    assert [get(store, key_of(number)) is None for number in (1, 2, 3)] == [True, False, True]
