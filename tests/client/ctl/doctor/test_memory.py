from __future__ import annotations

from dataclasses import replace

import pytest

from tensord.client.ctl.doctor import memory
from tensord.client.ctl.doctor.finding import Level
from tensord.client.ctl.doctor.memory import RingRoom
from tensord.shm.cgroups import Cgroup
from tensord.shm.layout import LANE_BYTES

MIB, GIB = 1 << 20, 1 << 30
ROOM = RingRoom(
    ring_bytes=4 * GIB,
    ready_bytes=0,
    shm_total_bytes=16 * GIB,
    shm_free_bytes=10 * GIB,
    available_bytes=20 * GIB,
    memory_bytes=32 * GIB,
)


def test_a_ring_that_fits_everywhere_is_ok() -> None:
    assert {check(ROOM).level for check in (memory.shm, memory.available, memory.cgroup)} == {Level.OK}


def test_a_dev_shm_that_is_too_small_fails_and_says_how_large_it_must_be() -> None:
    found = memory.shm(replace(ROOM, shm_total_bytes=64 * MIB, shm_free_bytes=64 * MIB))
    assert found.level is Level.FAIL
    assert "64.0 MiB free" in found.text
    assert "size=4G" in found.remedy


def test_memory_that_the_ring_already_has_is_not_required_again() -> None:
    full = replace(ROOM, ready_bytes=4 * GIB, shm_total_bytes=4 * GIB, shm_free_bytes=16 * MIB)
    assert memory.shm(full).level is Level.OK
    growing = replace(full, ready_bytes=3 * GIB)
    assert memory.shm(growing).level is Level.FAIL
    assert memory.available(replace(ROOM, ready_bytes=4 * GIB, available_bytes=3 * GIB)).level is Level.OK


@pytest.mark.parametrize(
    ("free_bytes", "level"),
    [(0, Level.FAIL), (LANE_BYTES - 1, Level.FAIL), (LANE_BYTES, Level.WARN), (16 * MIB, Level.OK)],
)
def test_the_next_clients_lanes_need_room_in_dev_shm(free_bytes: int, level: Level) -> None:
    ready = replace(ROOM, ready_bytes=4 * GIB, shm_total_bytes=5 * GIB, shm_free_bytes=free_bytes)
    found = memory.shm(ready)
    assert found.level is level
    assert ("tensorctl limit" in found.remedy) == (level is not Level.OK)
    assert level is Level.OK or f"room for {free_bytes // LANE_BYTES} more" in found.text


@pytest.mark.parametrize(("available", "level"), [(3, Level.FAIL), (5, Level.WARN), (6, Level.OK)])
def test_memory_must_hold_the_ring_and_something_beside_it(available: int, level: Level) -> None:
    found = memory.available(replace(ROOM, available_bytes=available * GIB))
    assert found.level is level
    assert bool(found.remedy) == (level is not Level.OK)


def test_the_tightest_cgroup_decides() -> None:
    wide, tight = Cgroup("/wide", 30 * GIB, GIB), Cgroup("/wide/tight", 5 * GIB, 2 * GIB)
    assert memory.cgroup(replace(ROOM, cgroups=(wide,))).level is Level.OK
    found = memory.cgroup(replace(ROOM, cgroups=(tight, wide)))
    assert found.level is Level.FAIL
    assert "/wide/tight" in found.text
    assert "MemoryMax" in found.remedy
    assert memory.cgroup(replace(ROOM, cgroups=(wide, replace(tight, used_bytes=GIB)))).level is Level.WARN


@pytest.mark.parametrize(
    ("limit", "privileged", "level"),
    [
        (None, False, Level.OK),
        (8 * MIB, False, Level.WARN),
        (4 * GIB, False, Level.OK),
        (4 * GIB - 1, False, Level.WARN),
        (0, True, Level.OK),
    ],
)
def test_memlock_must_cover_the_ring(limit: int | None, privileged: bool, level: Level) -> None:
    found = memory.memlock("this user", limit, 4 * GIB, privileged=privileged)
    assert found.level is level
    assert found.text.startswith("this user")


@pytest.mark.parametrize(
    ("plain", "expedited", "in_use", "level"),
    [
        (True, True, None, Level.OK),
        (True, True, "expedited", Level.OK),
        (True, True, "global", Level.WARN),
        (True, False, None, Level.WARN),
        (False, True, None, Level.OK),
        (False, False, None, Level.FAIL),
    ],
)
def test_membarrier(plain: bool, expedited: bool, in_use: str | None, level: Level) -> None:
    assert memory.membarrier(plain=plain, expedited=expedited, in_use=in_use).level is level


@pytest.mark.parametrize(
    ("configured", "level", "said"),
    [
        (None, Level.OK, "no daemon"),
        ({"ring_bytes": None, "max_entries": None}, Level.OK, "ring_bytes 1.00 GiB"),
        ({"ring_bytes": GIB, "max_entries": 1000}, Level.OK, "max_entries 1,000"),
        ({"ring_bytes": 2 * GIB, "max_entries": 1000}, Level.WARN, "of 2.00 GiB asked"),
        ({"ring_bytes": GIB, "max_entries": 1001}, Level.WARN, "configured as 1,001"),
    ],
)
def test_sizes_that_differ_from_the_configuration_are_reported(
    configured: dict[str, int | None] | None, level: Level, said: str
) -> None:
    found = memory.sizes(configured, GIB, 1000)
    assert (found.level, said in found.text) == (level, True)
    assert bool(found.remedy) == (level is not Level.OK)
