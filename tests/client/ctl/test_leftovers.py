from __future__ import annotations

import os
from pathlib import Path

import pytest

from tensord.client.ctl import leftovers
from tensord.client.ctl.leftovers import Leftover
from tensord.errors import SegmentError
from tensord.shm.ring import segments

from ...daemon_process import Daemon
from .conftest import Ctl

KEY = bytes(range(32))


def test_purge_is_refused_while_a_daemon_serves(daemon: Daemon, ctl: Ctl) -> None:
    before = daemon.segments()
    assert "served by a running tensord" in ctl("purge", "--instance", daemon.instance, code=1).err
    assert daemon.segments() == before
    ctl("health")


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_purge_frees_all_that_a_daemon_left_and_says_what(daemon: Daemon, ctl: Ctl, end: str) -> None:
    daemon.client().put(KEY, b"x", wait=True)
    getattr(daemon, end)()
    names = {path.name for path in daemon.segments()}
    assert len(names) >= 2
    err = ctl("purge", "--instance", daemon.instance, code=2).err
    assert f"of instance {daemon.instance}, with every entry in it: add --yes to confirm" in err
    assert {path.name for path in daemon.segments()} == names
    told = ctl("purge", "--yes", "--instance", daemon.instance).out
    assert daemon.segments() == []
    assert names <= set(told.split())
    assert f"of instance {daemon.instance}" in told


def test_purge_without_a_name_means_the_daemon_that_would_be_started_here(
    daemon: Daemon, ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.kill()
    monkeypatch.setenv("TENSORD_INSTANCE", daemon.instance)
    ctl("purge", "--yes")
    assert daemon.segments() == []
    assert "has no segment in /dev/shm" in ctl("purge").out
    monkeypatch.setenv("TENSORD_INSTANCE", "No Such Name")
    assert "--instance" in ctl("purge", code=1).err


def test_a_daemon_that_starts_during_a_purge_is_refused(daemon: Daemon) -> None:
    daemon.kill()
    fd = segments.claim_instance(daemon.instance)
    assert "InstanceBusy" in daemon.refused()
    os.close(fd)


def test_segments_without_a_ring_are_freed_too_and_an_unknown_instance_lists_the_others(
    daemon: Daemon, ctl: Ctl
) -> None:
    daemon.kill()
    segments.remove(segments.segment_name(daemon.instance, "ring"))
    err = ctl("purge", "--instance", "no-such-instance", code=1).err
    assert "no-such-instance" in err and daemon.instance in err
    assert ".ring" not in ctl("purge", "--yes", "--instance", daemon.instance).out
    assert daemon.segments() == []


def test_another_user_s_memory_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1001)
    with pytest.raises(SegmentError, match="belongs to uid 1000"):
        leftovers.remove(Leftover("theirs", {"tensord.theirs.ring": 1}, 1000, False))


def test_only_tensord_s_own_names_are_instances(tmp_path: Path) -> None:
    for name in (
        "tensord.a.ring", "tensord.b.lane.1f.fenced", "tensord.c.index", "tensord.c.other", "sem.tensord.d.ring",
        "tensord.f.lock",
    ):  # fmt: skip
        (tmp_path / name).touch()
    (tmp_path / "tensord.e.other").touch()
    assert leftovers.instances(tmp_path) == ["a", "b", "c", "f"]
