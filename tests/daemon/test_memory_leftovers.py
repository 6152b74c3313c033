"""What a daemon does with pieces of memory whose ring is gone."""

from __future__ import annotations

from tensord.shm.ring import segments

from ..daemon_process import Daemon


def test_lanes_of_a_ring_that_is_gone_are_not_taken_for_those_of_a_new_one(daemon: Daemon) -> None:
    daemon.client()
    assert daemon.lanes()
    ring = segments.segment_name(daemon.instance, "ring")
    daemon.kill()
    segments.remove(ring)
    stale = {path.stat().st_ino for path in daemon.lanes()}
    assert stale
    daemon.start()
    assert not stale & {path.stat().st_ino for path in daemon.lanes()}
