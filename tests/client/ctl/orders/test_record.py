"""`tensorctl record`, through a real daemon."""

from __future__ import annotations

import asyncio
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.client.ctl.daemon import Daemon as Asked
from tensord.client.ctl.orders.record import Recording
from tensord.daemon.actors.messages import WatchEvent
from tensord.daemon.connections.status import Watchers

from ....daemon_process import PATIENCE_S, Daemon
from ..conftest import Ctl

SPACES = [tensord.Namespace(model=name, revision="r", dtype="f4", processor="p") for name in ("one", "other")]
KEYS = [space.key("encoder", "image", b"%d" % number) for space in SPACES for number in range(2)]


def recorded(daemon: Daemon, ctl: Ctl, file: Path) -> list[Any]:
    """Records puts of four entries of 8,000 bytes, and three uses of the first. Returns the file's lines."""
    recording = ctl.spawn("record", str(file), "--count", "7")
    assert recording.stderr is not None
    assert recording.stderr.readline() == "recording; Ctrl-C ends it\n"
    client = daemon.client()
    for key in KEYS:
        client.put(key, np.zeros(1000), tokens=5, wait=True)
    for _ in range(3):
        assert client.get(KEYS[0]) is not None
    told, _ = recording.communicate(timeout=PATIENCE_S)
    assert recording.returncode == 0
    assert told == f"7 requests in {file}\n"
    text = file.read_bytes()
    return [json.loads(line) for line in (lzma.decompress(text) if file.suffix == ".xz" else text).splitlines()]


@pytest.mark.parametrize("name", ["requests.jsonl", "requests.jsonl.xz"])
def test_a_recording_has_a_line_for_each_put_and_each_use(daemon: Daemon, ctl: Ctl, tmp_path: Path, name: str) -> None:
    header, *lines = recorded(daemon, ctl, tmp_path / name)
    assert header["tensord_requests"] == 1
    assert (header["policy"], header["max_bytes"]) == ("hazard", daemon.status()["store"]["max_bytes"])
    times, keys, namespaces, sizes, tokens, stored = zip(*lines, strict=True)
    assert times[0] == 0
    assert list(times) == sorted(times)
    assert len(set(keys[:4])) == 4
    assert list(keys[4:]) == [keys[0]] * 3
    assert [namespaces.count(each) for each in (namespaces[0], namespaces[2])] == [5, 2]
    assert set(sizes) == {client_bytes(daemon)}
    assert set(tokens) == {5}
    assert stored == (0, 0, 0, 0, 1, 1, 1)


def client_bytes(daemon: Daemon) -> int:
    entry = daemon.client().peek(KEYS[0])
    assert entry is not None
    return entry.payload_bytes


def test_a_recording_tells_no_key(daemon: Daemon, ctl: Ctl, tmp_path: Path) -> None:
    lines = recorded(daemon, ctl, tmp_path / "requests.jsonl")
    text = json.dumps(lines)
    assert not any(key.hex()[:16] in text or key.hex()[16:32] in text for key in KEYS)


def test_two_recordings_cannot_be_compared() -> None:
    row = [KEYS[0].hex(), 10, 1, True]
    (_, *first), (_, *second) = (json.loads(Recording().line(row, 0.0)) for _ in range(2))
    assert first[0] != second[0] and first[1] != second[1] and first[2:] == second[2:]


def test_a_recording_ends_after_its_time(daemon: Daemon, tmp_path: Path, ctl: Ctl) -> None:
    file = tmp_path / "requests.jsonl"
    assert ctl("record", str(file), "--for", "10ms").out == f"0 requests in {file}\n"
    assert len(file.read_text().splitlines()) == 1


def test_a_file_that_exists_is_not_overwritten_and_a_folder_that_is_not_there_is_named(
    daemon: Daemon, tmp_path: Path, ctl: Ctl
) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text("mine")
    assert "exists already: remove it, or name another file" in ctl("record", str(file), code=2).err
    assert file.read_text() == "mine"
    file = tmp_path / "none" / "requests.jsonl"
    told = ctl("record", str(file), code=2).err
    assert f"{file} cannot be made (No such file or directory): name a file in a folder of yours" in told


def test_a_daemon_that_answers_no_more_is_not_taken_for_a_file_that_cannot_be_written(
    daemon: Daemon, tmp_path: Path, ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = Asked.status

    def last_answer(asked: Asked) -> dict[str, Any]:
        found = status(asked)
        daemon.pause()
        return found

    monkeypatch.setattr(Asked, "status", last_answer)
    try:
        told = ctl("--timeout", "500ms", "record", str(tmp_path / "requests.jsonl"), code=1).err
    finally:
        daemon.resume()
    assert "answer" in told
    assert "incomplete" not in told


def test_without_a_daemon_no_file_is_left(daemon: Daemon, tmp_path: Path, ctl: Ctl) -> None:
    daemon.kill()
    file = tmp_path / "requests.jsonl"
    assert "start it with" in ctl("record", str(file), code=1).err
    assert not file.exists()


def test_watchers_get_either_requests_or_all_other_events() -> None:
    watchers = Watchers(4)
    recording, watching = watchers.add(requests=True), watchers.add(requests=False)
    for name in ("requests", "put"):
        watchers.tell(WatchEvent({"event": name}))
    assert [asyncio.run(each.next()).body["event"] for each in (recording, watching)] == ["requests", "put"]
    assert watchers.want_requests
    watchers.remove(recording)
    assert not watchers.want_requests
