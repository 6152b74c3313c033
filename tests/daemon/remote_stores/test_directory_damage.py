"""Directories in which something is wrong: one object, one namespace's generations, all that was there, or the file
system."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from tensord.daemon.remote_stores.directory import DirectoryStore
from tensord.errors import TierReadOnly, TierRefused, TierTimedOut, TierUnavailable
from tests.daemon_process import PATIENCE_S

from .conformance import MIB
from .entries import get, key_of, made, put, soon
from .test_directory import on_a_disk_of_2_mib

TAG = key_of(1)[:8]


@pytest.mark.root
@pytest.mark.parametrize("what", ["the file", "its folder"])
def test_an_object_that_may_not_be_read_is_a_counted_miss_and_the_others_are_served(what: str) -> None:
    said = on_a_disk_of_2_mib(
        f"""
import os
from pathlib import Path
from tensord.daemon.remote_stores.urls import open_store
from tests.daemon.remote_stores.entries import get, key_of, made, put, soon
store = open_store("dir:///mnt")
put(store, made(1), made(2))
[path] = Path("/mnt").glob(f"tensord-1/??/{{key_of(1).hex()}}")
for each in Path("/mnt/tensord-1").rglob("*"):
    each.chmod(0o777)
Path("/mnt/tensord-1").chmod(0o777)
(path if {what!r} == "the file" else path.parent).chmod(0)
os.setuid(65534)
assert store.heads([key_of(1), key_of(2)], soon())[0] is None
assert get(store, key_of(1)) is None and get(store, key_of(2)) is not None
assert store.corrupt == 2
print(store.last_corrupt)
if {what!r} == "the file":
    put(store, made(1))
    assert get(store, key_of(1)) is not None, "it was replaced"
store.close()
"""
    )
    assert "Permission denied" in said and key_of(1).hex() in said


@pytest.mark.root
def test_a_directory_that_may_not_be_entered_is_refused_as_a_whole() -> None:
    said = on_a_disk_of_2_mib(
        """
import os
from tensord.daemon.remote_stores.urls import open_store
from tensord.errors import TierRefused
from tests.daemon.remote_stores.entries import get, key_of, made, put
store = open_store("dir:///mnt")
put(store, made(1))
os.chmod("/mnt/tensord-1", 0)
os.setuid(65534)
try:
    get(store, key_of(1))
except TierRefused as error:
    print(type(error).__name__, error)
store.close()
"""
    )
    assert said.startswith("TierRefused ") and "give uid 65534 access" in said


def test_a_generation_with_nonsense_is_refused_and_said(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    assert store.raise_generation(TAG, 3, soon()) == 3
    nonsense = tmp_path / "tensord-1" / "gen" / TAG.hex() / "99999999999"
    nonsense.touch()
    for call in (lambda: store.generations([TAG], soon()), lambda: store.raise_generation(TAG, 1, soon())):
        with pytest.raises(TierRefused, match=f"{nonsense} is beyond the last generation, .*: remove it"):
            call()
    nonsense.unlink()
    assert store.generations([TAG], soon()) == [3]
    store.close()


def test_a_directory_whose_mount_is_gone_is_away_and_not_empty(tmp_path: Path) -> None:
    root, mounted = tmp_path / "mount", tmp_path / "elsewhere"
    root.mkdir()
    store = DirectoryStore(root)
    put(store, made(1))
    assert get(store, key_of(2)) is None
    root.rename(mounted)
    root.mkdir()
    for call in (
        lambda: get(store, key_of(1)),
        lambda: store.heads([key_of(1)], soon()),
        lambda: put(store, made(2)),
        lambda: store.remove([key_of(1)], soon()),
        lambda: store.generations([TAG], soon()),
        lambda: store.raise_generation(TAG, 1, soon()),
    ):
        with pytest.raises(TierUnavailable, match=f"{root} has no folder tensord-1 any more: mount it again"):
            call()
        assert not any(root.iterdir()), "nothing is written below a mount that is missing"
    root.rmdir()
    mounted.rename(root)
    assert get(store, key_of(1)) is not None
    assert get(store, key_of(2)) is None
    put(store, made(2))
    assert get(store, key_of(2)) is not None
    store.close()


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
        store.remove([key_of(1), key_of(2), key_of(3)], soon())
    assert [get(store, key_of(number)) is None for number in (1, 2, 3)] == [True, False, True]
    store.close()


def test_another_directory_in_its_place_is_used(tmp_path: Path) -> None:
    root, other = tmp_path / "mount", tmp_path / "other"
    for folder, number in ((root, 1), (other, 2)):
        folder.mkdir()
        store = DirectoryStore(folder)
        put(store, made(number))
        store.close()
    store = DirectoryStore(root)
    assert get(store, key_of(2)) is None
    root.rename(tmp_path / "before")
    other.rename(root)
    assert get(store, key_of(1)) is None
    assert get(store, key_of(2)) is not None
    store.close()


def test_a_file_system_that_hangs_in_an_eviction_holds_no_other_put_up_beyond_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path, 10 * MIB)
    hangs, goes_on, unlink = threading.Event(), threading.Event(), os.unlink

    def hang(path: str) -> None:
        hangs.set()
        assert goes_on.wait(PATIENCE_S)
        unlink(path)

    put(store, *(made(number, MIB) for number in range(9)))
    monkeypatch.setattr(os, "unlink", hang)
    evicting = threading.Thread(target=put, args=(store, made(9, MIB)))
    evicting.start()
    assert hangs.wait(PATIENCE_S)
    with pytest.raises(TierTimedOut, match="not looked through"):
        store.put_from(key_of(10), made(10).payload, made(10).meta, time.monotonic() + 0.01)
    assert get(store, key_of(8), MIB) is not None, "reads go on"
    store.close()
    goes_on.set()
    evicting.join()
