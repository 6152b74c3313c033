"""A directory as a remote store: the conformance suite, what only a directory has, and directories in which something
is wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import pytest

from tensord.daemon.remote_stores.directory import LEFTOVER_S, DirectoryStore
from tensord.daemon.remote_stores.store import open_store
from tensord.errors import TierFull, TierTooLarge, TierUnavailable
from tests.daemon_process import until
from tests.processes import Child

from .conformance import MIB, AnyStore, Backend, write_on
from .entries import calls, get, key_of, made, put

ROOT = Path(__file__).parents[3]


class Folder(Backend):
    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = f"dir://{root}?bytes=200MiB"

    def path(self, key: bytes) -> Path:
        [found] = self.root.glob(f"tensord-1/??/{key.hex()}")
        return found

    def raw(self, key: bytes) -> bytes:
        return self.path(key).read_bytes()

    def set_raw(self, key: bytes, stored: bytes) -> None:
        next(iter(self.root.glob(f"tensord-1/??/{key.hex()}")), self.root / "none").write_bytes(stored)

    def stored_bytes(self) -> int:
        total = 0
        for path in self.root.glob("tensord-1/??/*"):
            with suppress(FileNotFoundError):  # evicted meanwhile
                total += path.stat().st_size
        return total

    def leftovers(self) -> list[Path]:
        return list(self.root.glob("tensord-1/tmp/*"))


@pytest.fixture
def backend(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


class TestDirectory(AnyStore):
    pass


def test_an_object_larger_than_the_limit_is_refused_and_the_rest_is_served(backend: Folder) -> None:
    store = DirectoryStore(backend.root, MIB)
    put(store, made(1))
    with pytest.raises(TierTooLarge, match=f"an object of {MIB + 192} bytes is larger than the limit of {MIB} bytes"):
        put(store, made(2, MIB))
    assert get(store, key_of(1)) is not None
    assert get(store, key_of(2)) is None


def test_a_directory_stays_within_its_bytes_and_keeps_what_was_used_last(backend: Folder) -> None:
    store = DirectoryStore(backend.root, 10 * MIB)
    for number in range(60):
        put(store, made(number, MIB // 2))
        os.utime(backend.path(key_of(number)), (number, number))  # put long ago, in this order
        if number > 5:
            assert get(store, key_of(5)) is not None, "a read renews the time of an object"
        assert backend.stored_bytes() <= 10 * MIB
    assert get(store, key_of(59)) is not None
    assert get(store, key_of(0)) is None
    assert store.corrupt == 0


def test_files_of_killed_writers_are_removed_and_those_of_live_ones_stay(backend: Folder) -> None:
    store = DirectoryStore(backend.root, 4 * MIB)
    put(store, made(1))
    fresh = backend.root / "tensord-1/tmp/host-1-1"
    while not backend.leftovers():
        with Child(write_on, backend.url, key_of(2)) as writer:
            until(backend.leftovers, "the writer to begin a file")
            writer.kill()
    for left in backend.leftovers():
        past = time.time() - LEFTOVER_S - 60
        os.utime(left, (past, past))
    fresh.write_bytes(b"begun")
    for number in range(10, 20):  # each sixteenth of the limit is followed by a scan
        put(store, made(number, MIB // 2))
    assert backend.leftovers() == [fresh]


def test_files_of_killed_writers_count_towards_the_bytes(backend: Folder) -> None:
    leftover = backend.root / "tensord-1/tmp/host-1-1"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(bytes(6 * MIB))
    store = DirectoryStore(backend.root, 10 * MIB)
    put(store, made(1))
    for number in range(20):
        put(store, made(number, MIB // 2))
        assert backend.stored_bytes() <= 4 * MIB
    assert get(store, key_of(19)) is not None
    with pytest.raises(TierFull, match="eviction has made no room"):
        put(store, made(20, 5 * MIB))
    leftover.unlink()
    put(store, made(20, 5 * MIB))


def test_a_missing_folder_is_named_and_used_once_it_is_there(tmp_path: Path) -> None:
    root = tmp_path / "mount"
    store = open_store(f"dir://{root}")
    for call in calls(store, made(1)):
        with pytest.raises(TierUnavailable, match=f"{root} is not a folder; mount it, or make it"):
            call()
    assert not root.exists(), "nothing is written below a mount that is missing"
    root.mkdir()
    assert get(store, key_of(1)) is None
    put(store, made(1))
    assert get(store, key_of(1)) is not None


def on_a_disk_of_2_mib(program: str) -> str:
    """What Python prints in a mount namespace of its own, with a file system of 2 MiB at /mnt, in which `store` has the
    entry of 1."""
    unshare = shutil.which("unshare")
    if os.geteuid() or unshare is None:
        pytest.skip("needs root and unshare(1)")
    shell = 'mount -t tmpfs -o size=2m,mode=777 none /mnt; exec "$@"'
    command = [unshare, "--mount", "--propagation", "private", "sh", "-ec", shell, "sh", sys.executable, "-c"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = [*command, BEGIN + program]
    done = subprocess.run(ran, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


BEGIN = """
import os, subprocess
from pathlib import Path
from tensord.daemon.remote_stores.store import open_store
from tensord.errors import TensordError
from tests.daemon.remote_stores.entries import get, heads, key_of, made, put
store = open_store("dir:///mnt?bytes=100MiB")
put(store, made(1))
def said(call, *args):
    try:
        call(*args)
    except TensordError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.root
def test_a_full_disk_is_named_and_leaves_no_half_object() -> None:
    said = on_a_disk_of_2_mib("""
said(put, store, made(2, 3 << 20))
assert os.listdir("/mnt/tensord-1/tmp") == [], "the file that could not be written is gone"
assert get(store, key_of(1)) is not None and get(store, key_of(2)) is None
put(store, made(3))
assert get(store, key_of(3)) is not None
""")
    assert said.startswith("TierFull ") and "No space left on device" in said
    assert "free space, or lower `bytes` in the URL" in said


@pytest.mark.root
def test_a_directory_without_write_access_is_read_and_refuses_puts() -> None:
    said = on_a_disk_of_2_mib("""
path = "/mnt/tensord-1"
os.utime(next(os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names), (1, 1))
subprocess.run(["mount", "-o", "remount,ro", "/mnt"], check=True)
said(put, store, made(2))
assert get(store, key_of(1)) is not None
subprocess.run(["mount", "-o", "remount,rw", "/mnt"], check=True)
subprocess.run(["chmod", "-R", "a+rX,a-w", path], check=True)
os.setuid(65534)
said(put, store, made(2))
assert get(store, key_of(1)) is not None
""")
    first, second = said.splitlines()
    assert first.startswith("TierReadOnly ") and second.startswith("TierReadOnly ")
    assert "Read-only file system" in first and "choose another folder" in first
    assert "Permission denied" in second and "give uid 65534 access" in second


def test_a_directory_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "50% of #1 ?"
    folder.mkdir()
    store = open_store(f"dir://{quote(str(folder))}")
    put(store, made(1))
    assert any(folder.iterdir())


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
