"""Queueing floors: what reported requests forbid, for how long, and which devices are remembered."""

from __future__ import annotations

from tensord.ipc.messages import control as messages

from ..stand import GPU, MIB, Make, Stand, refused


def test_a_devices_floor_keeps_its_entries_and_ends_when_its_requests_do(make: Make) -> None:
    stand = make(block_bytes=MIB)
    stand.open(1)
    for number in range(10):
        stand.register(1, number, MIB)
    for _ in range(60):
        stand.now += 1
        stand.say(2, messages.RequestsArrived(GPU, 1))
        stand.say(2, messages.RequestCompleted(GPU, 2.0, 4))
    stand.sample(0.97)
    assert stand.device()["floor_blocks"] == 10
    assert stand.orders() == []
    stand.pass_time(120)
    stand.sample(0.97)
    assert stand.device()["floor_blocks"] == 0
    assert sum(len(order.keys) for order in stand.orders()) == 10


def test_a_floor_holds_and_victims_are_offloaded_though_nobody_knows_the_size_of_the_device(make: Make) -> None:
    stand = make(block_bytes=MIB, max_entries=3)
    stand.open(1)
    for number in range(3):
        stand.register(1, number, MIB, tokens=0)
    stand.register(1, 3, MIB, tokens=0)
    assert [(order.kind, order.reason) for order in stand.orders()] == [("offload", "budget")]
    for _ in range(60):
        stand.now += 1
        stand.say(2, messages.RequestsArrived(GPU, 1))
        stand.say(2, messages.RequestCompleted(GPU, 2.0, 4))
    refused(stand.register(1, 4, MIB), "BelowFloor")
    assert len(stand.orders()) == 1


def test_devices_that_are_no_longer_reported_are_forgotten(make: Make) -> None:
    stand = make()
    stand.sample(0.5)
    for number in range(3):
        stand.say(1, messages.RequestsArrived(f"dev{number}", 1))
    stand.say(1, messages.RequestsArrived(GPU, 1))
    for device in ("held", "dev2"):
        stand.open(1, device=device)
    stand.register(1, 1, MIB, device="held")
    stand.say(1, messages.RequestsArrived("held", 1))
    stand.leave(1)
    stand.join(1)
    stand.pass_time(50)
    stand.say(2, messages.RequestsArrived("dev1", 1))
    stand.pass_time(20)
    stand.sample(0.5)
    assert counted_devices(stand) == {GPU, "dev1"}
    stand.pass_time(60)
    stand.sample(0.5)
    assert counted_devices(stand) == {GPU}


def test_made_up_devices_keep_no_real_one_out(make: Make) -> None:
    stand = make(devices_max=2)
    stand.sample(0.5)
    for device in ("dev0", "dev1", "dev2"):
        stand.now += 1
        stand.say(1, messages.RequestsArrived(device, 1))
    assert stand.status()["counters"]["refused"] == {"LimitReached": 1}
    stand.say(1, messages.RequestsArrived(GPU, 1))
    assert counted_devices(stand) == {"dev1", GPU}
    stand.now += 58
    stand.say(1, messages.RequestsArrived("dev2", 1))
    assert counted_devices(stand) == {"dev1", GPU}
    stand.now += 1
    stand.say(1, messages.RequestsArrived("dev2", 1))
    assert counted_devices(stand) == {"dev2", GPU}


def counted_devices(stand: Stand) -> set[str]:
    return {row["device"] for row in stand.status()["devices"] if row["queueing"]}
