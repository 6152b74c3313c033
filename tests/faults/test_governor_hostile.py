"""Peers that say what no library says, to the governor of a real daemon: they are refused, and nobody else notices."""

from __future__ import annotations

import socket as sockets
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tensord.daemon.gauges.reading import GaugeFailed, Reading
from tensord.daemon.governor.limits import DEVICES_MAX
from tensord.errors import (
    BadGraph,
    BadStep,
    MessageTooLarge,
    NoGauge,
    OwnedElsewhere,
    TensordError,
    UnknownOrder,
)
from tensord.ipc import messages
from tensord.ipc.frames import pack

from ..daemon_process import PATIENCE_S, Daemon, until
from .raw import RawClient

CARD = "card0"
LARGEST = (1 << 63) - 1
SIZE_BYTES_MAX = 1 << 48
_numbers = count(1000)


@pytest.fixture
def running() -> Iterator[Daemon]:
    """A daemon that knows of devices what their owners say."""
    with Daemon(gauges_device="owners", gauges_host="none", pressure_ack_s="300ms", pressure_retry_s="100ms") as daemon:
        yield daemon.start()


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def governor(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.status()["governor"]
    return found


def owner(daemon: Daemon, device: str = CARD) -> RawClient:
    client = RawClient(daemon.socket, attach=False)
    client.ask(lambda n: messages.OpenDevice(n, device))
    return client


def registered(client: RawClient, number: int, size_bytes: int = 1000, tokens: int = 0) -> Any:
    return client.ask(lambda n: messages.RegisterEntry(n, CARD, key(number), size_bytes, tokens))


def drilled(client: RawClient, share: float, gauge: str = CARD, *, act: bool = True) -> Any:
    return client.ask(lambda n: messages.Drill(n, gauge, int(share * 1_000_000), 1_000_000, act))


def answers_still(client: RawClient) -> bool:
    """Whether the connection is in order, and nothing was said on it that nobody asked for."""
    return client.ask(lambda n: messages.ReleaseEntries(n, CARD, [])) is not None


def adds_up(state: dict[str, Any]) -> bool:
    counted = state["counters"]
    resident = sum(row["entries"] for row in state["devices"])
    gone = sum(counted[name] for name in ("offloaded", "dropped", "released", "gone_with_owner"))
    return bool(counted["registered"] == resident + gone)


def metrics_of(daemon: Daemon) -> str:
    with sockets.socket(sockets.AF_UNIX) as asking:
        asking.settimeout(PATIENCE_S)
        asking.connect(str(daemon.folder / "metrics.sock"))
        asking.sendall(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n")
        told = b""
        while part := asking.recv(1 << 16):
            told += part
    head, _, body = told.decode().partition("\r\n\r\n")
    assert " 200 " in head.splitlines()[0], head
    return body


def test_status_is_answered_whatever_sizes_owners_report(running: Daemon) -> None:
    """Sums of sizes and tokens that each may be, and floors, that are more than 64 bits hold."""
    with owner(running) as client:
        for number in range(4):
            registered(client, number, SIZE_BYTES_MAX, LARGEST)
        (device,) = governor(running)["devices"]
        assert (device["entries"], device["bytes"]) == (4, 4 * SIZE_BYTES_MAX)
        assert device["tokens"] == (1 << 64) - 1
        said = [messages.RequestsArrived(CARD, 1_000_000)] * 1000
        client.channel.send(*said, messages.RequestCompleted(CARD, 315_360_000.0, 1 << 32), timeout_s=PATIENCE_S)
        assert answers_still(client)
        (device,) = governor(running)["devices"]
        assert device["floor_blocks"] == (1 << 64) - 1
        assert "tensord_device_tokens" in metrics_of(running)
        client.ask(lambda n: messages.ReleaseEntries(n, CARD, [key(number) for number in range(4)]))
        assert adds_up(governor(running))


def test_a_drill_is_answered_however_much_would_go() -> None:
    with (
        Daemon(gauges_device="owners", gauges_host="none", pressure_critical_idle_s="50ms") as daemon,
        owner(daemon.start()) as client,
    ):
        for number in range(4):
            registered(client, number, SIZE_BYTES_MAX)
        told = until(
            lambda: drilled(client, 0.99, act=False).offload_entries == 4 and drilled(client, 0.99, act=False),
            "all to be idle",
        )
        assert (told.offload_bytes, told.state.refuses) == (SIZE_BYTES_MAX, True)
        assert governor(daemon)["gauges"] == []


def test_only_owners_tensors_make_a_gauge_of_their_device(running: Daemon) -> None:
    with owner(running) as client, RawClient(running.socket, attach=False) as stranger:
        stranger.channel.send(
            *(messages.ReadDevice(f"made-up-{n}", 9, 10) for n in range(2000)),
            messages.ReadDevice(CARD, 99, 100),
            messages.ReadDevice("host", 99, 100),
            timeout_s=PATIENCE_S,
        )
        assert answers_still(stranger)
        client.channel.send(
            messages.ReadDevice("host", 99, 100), messages.ReadDevice(CARD, 1, 100), timeout_s=PATIENCE_S
        )
        (gauge,) = running.until(lambda status: status["governor"]["gauges"], "the owner's report")
        assert (gauge["gauge"], gauge["used_bytes"]) == (CARD, 1)


def test_an_answer_that_is_too_large_is_an_error_and_not_silence(tmp_path: Path) -> None:
    gauges = tmp_path / "gauges"
    gauges.write_text("".join(f"{'card' * 12}{n} 1KiB 1MiB\n" for n in range(1000)))
    with Daemon(gauges_device="file", gauges_host="none", gauges_file=gauges) as daemon:
        daemon.start().until(lambda status: len(status["governor"]["gauges"]) == 1000, "the gauges")
        with RawClient(daemon.socket, attach=False) as client:
            with pytest.raises(MessageTooLarge):
                client.ask(messages.Subscribe)
            client.ask(lambda n: messages.OpenDevice(n, CARD))
            assert answers_still(client)


def test_a_message_without_an_answer_gets_none_when_it_is_refused(tmp_path: Path) -> None:
    """An error without an id would end its client's connection."""
    with (
        Daemon(gauges_device="owners", gauges_host="none") as daemon,
        RawClient(daemon.start().socket, attach=False) as client,
    ):
        for device in ("host", *(f"card {number}" for number in range(DEVICES_MAX + 2))):
            client.channel.send(
                messages.UseEntries(device, [key(1)] * 1024),
                messages.RequestsArrived(device),
                messages.RequestCompleted(device, 0.0, 0),
                messages.ReadDevice(device, 0, 1),
                timeout_s=PATIENCE_S,
            )
        assert answers_still(client)
        assert governor(daemon)["counters"]["refused"]["LimitReached"] >= 2


def test_a_client_cannot_change_what_belongs_to_another(running: Daemon) -> None:
    """Orders, reservations, workflows, keys: each is refused, and stays what it was."""
    with owner(running) as mine, owner(running) as other, RawClient(running.socket, attach=False) as drilling:
        registered(mine, 1)
        drilled(drilling, 0.5)
        reserved = mine.ask(lambda n: messages.ReserveDevice(n, CARD, 1000, 60.0)).reservation
        mine.ask(lambda n: messages.RegisterWorkflow(n, "w", [messages.Step("a", 1)]))
        refused = [
            (OwnedElsewhere, lambda n: messages.RegisterEntry(n, CARD, key(1), 5)),
            (UnknownOrder, lambda n: messages.ReleaseReservation(n, reserved)),
            (BadStep, lambda n: messages.AdvanceWorkflow(n, "w", 1)),
            (BadStep, lambda n: messages.EndWorkflow(n, "w")),
            (BadGraph, lambda n: messages.RegisterWorkflow(n, "w", [messages.Step("b", 1)])),
            (OwnedElsewhere, lambda n: messages.Drill(n, CARD, 1, 2, True)),
            (UnknownOrder, lambda n: messages.AcknowledgeOrder(n, CARD, LARGEST, dropped=[key(1)])),
            (NoGauge, lambda n: messages.OpenDevice(n, "host")),
            (NoGauge, lambda n: messages.RegisterEntry(n, "host", key(1), 5)),
            (NoGauge, lambda n: messages.ReserveDevice(n, "host", 1, 1.0)),
        ]
        before = governor(running)
        for expected, make in refused:
            with pytest.raises(expected):
                other.ask(make)
        assert other.ask(lambda n: messages.ReleaseEntries(n, CARD, [key(1)])).count == 0
        after = governor(running)
        for row in (*before["devices"], *after["devices"]):
            # Requests that an earlier test reported: their rates change with time.
            del row["queueing"], row["floor_blocks"]
        for name in ("devices", "workflows", "reservations", "owners"):
            assert after[name] == before[name], name


def test_an_order_is_acknowledged_once_and_by_its_owner() -> None:
    with (
        Daemon(
            gauges_device="owners", gauges_host="none", pressure_critical_idle_s="50ms", pressure_ack_s="10m"
        ) as daemon,
        owner(daemon.start()) as mine,
        owner(daemon) as other,
        RawClient(daemon.socket, attach=False) as drilling,
    ):
        for number in range(3):
            registered(mine, number)
        until(lambda: drilled(drilling, 0.95, act=False).offload_entries == 3, "all to be idle")
        drilled(drilling, 0.95)
        order = mine.hear()
        assert (order.kind, sorted(order.keys)) == ("offload", [key(number) for number in range(3)])

        def acknowledged(client: RawClient, *dropped: bytes, device: str = CARD) -> None:
            client.ask(lambda n: messages.AcknowledgeOrder(n, device, order.order, dropped=list(dropped)))

        for client, dropped, device in (
            (other, [key(0)], CARD),
            (mine, [key(0), key(0)], CARD),
            (mine, [key(0), key(7)], CARD),
            (mine, [key(0)], "card1"),
        ):
            with pytest.raises(UnknownOrder):
                acknowledged(client, *dropped, device=device)
        assert ordered(daemon) == 3
        acknowledged(mine, key(0))
        with pytest.raises(UnknownOrder):
            acknowledged(mine, key(0), key(1))
        acknowledged(mine, key(1), key(2))
        with pytest.raises(UnknownOrder):
            acknowledged(mine)
        state = governor(daemon)
        assert (state["counters"]["dropped"], state["counters"]["registered"]) == (3, 3)
        assert adds_up(state)
        assert state["counters"]["refused"]["UnknownOrder"] == 6


def ordered(daemon: Daemon) -> int:
    return sum(row["ordered_entries"] for row in governor(daemon)["devices"])


@pytest.mark.parametrize(
    "said",
    [
        messages.Subscribe(1),
        messages.Drill(1, CARD, 1, 2, True),
        messages.RegisterEntry(1, CARD, key(1), 1),
        messages.ReadDevice(CARD, 1, 2),
        messages.UseEntries(CARD, [key(1)]),
        messages.AcknowledgeOrder(1, CARD, 1),
        messages.Modes(1, []),
        messages.Order(1, CARD, "drop", [], "no"),
    ],
    ids=lambda said: type(said).__name__,
)
def test_messages_before_hello_change_nothing(shared: Daemon, said: messages.Message) -> None:
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as asking:
        asking.settimeout(PATIENCE_S)
        asking.connect(str(shared.socket))
        asking.sendall(pack(said))
        with suppress(ConnectionResetError):
            while asking.recv(4096):
                pass
    state = governor(shared)
    assert (state["gauges"], state["devices"], state["owners"]) == ([], [], [])


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    with Daemon(gauges_device="owners", gauges_host="none", limits_hello_s_max="500ms") as daemon:
        yield daemon.start()


def test_a_drill_ends_with_its_client_however_that_ends(tmp_path: Path) -> None:
    gauges = tmp_path / "gauges"
    gauges.write_text(f"{CARD} 10% 1MiB\n")
    with Daemon(gauges_device="file", gauges_host="none", gauges_file=gauges) as daemon:
        daemon.start().until(lambda status: status["governor"]["gauges"], "the gauge")
        with owner(daemon) as client, RawClient(daemon.socket, attach=False) as drilling:
            drilled(drilling, 0.99)
            drilled(drilling, 0.99, "another")
            with pytest.raises(TensordError, match="emergency"):
                registered(client, 1)
            # Half a message, and gone: as of a process that was killed while it wrote.
            drilling.channel._sock.send(pack(messages.Drill(9, CARD, 1, 2))[:7])
        daemon.until(lambda status: len(status["governor"]["gauges"]) == 1, "the other gauge to go")
        (gauge,) = governor(daemon)["gauges"]
        assert (gauge["source"], gauge["mode"], gauge["refuses"]) == ("file", "relaxed", False)
        with owner(daemon) as client:
            assert not registered(client, 1).renewed


def test_a_client_that_does_not_read_is_disconnected_and_leaves_nothing(running: Daemon) -> None:
    """Orders and modes are pushed meanwhile; entries, reservations, workflows and descriptors go with it."""
    with RawClient(running.socket, attach=False) as drilling:
        before = until(lambda: running.descriptors(), "descriptors")
        with owner(running) as deaf:
            for number in range(50):
                registered(deaf, number)
            for gauge in range(40):
                drilled(drilling, 0.5, f"{'gauge' * 10}{gauge}")
            drilled(drilling, 0.5)
            deaf.ask(lambda n: messages.ReserveDevice(n, CARD, 1000, 60.0))
            deaf.ask(lambda n: messages.RegisterWorkflow(n, "w", [messages.Step("a", 1)]))
            assert len(governor(running)["owners"]) == 1

            def said_on() -> None:
                while True:
                    deaf.channel.send(*(messages.Subscribe(next(_numbers)) for _ in range(20)), timeout_s=PATIENCE_S)
                    drilled(drilling, next(_numbers) % 2 / 2)

            with pytest.raises(TensordError):
                said_on()
            running.until(lambda status: not status["governor"]["owners"], "it to be gone")
        state = governor(running)
        assert state["counters"]["gone_with_owner"] == 50
        assert (state["reservations"], state["workflows"], state["remembered"]) == (0, [], 0)
        assert adds_up(state)
        until(lambda: running.descriptors() <= before, "its descriptors to be closed")


def test_a_flood_is_refused_and_forgotten(running: Daemon) -> None:
    """Names of devices, drills, workflows, agents: as many as may be, and not one more; all go with their client."""
    with RawClient(running.socket, attach=False) as client:
        refused = 0
        for number in range(100):
            for make in (
                lambda n, name: messages.OpenDevice(n, name),
                lambda n, name: messages.Drill(n, name, 1, 2),
                lambda n, name: messages.Drill(n, "d" + name, 1, 2, True),
            ):
                try:
                    client.ask(lambda n, make=make, number=number: make(n, f"n{number}"))
                except TensordError:
                    refused += 1
        assert refused == 3 * 36
        steps = [messages.Step(f"{n:0>100}", n) for n in range(64)]
        for number in range(256):
            client.ask(lambda n, number=number: messages.RegisterWorkflow(n, f"w{number}", steps))
        with pytest.raises(TensordError, match="workflows_max"):
            client.ask(lambda n: messages.RegisterWorkflow(n, "w", steps))
        more = [*steps, messages.Step("one more", 0)]
        with pytest.raises(TensordError, match="workflow_steps_max"):
            client.ask(lambda n: messages.RegisterWorkflow(n, "w0", more))
        state = governor(running)
        assert len(state["gauges"]) == 64 and len(state["workflows"]) == 256
    running.until(lambda status: not status["governor"]["gauges"], "drills to end")
    state = governor(running)
    assert (state["devices"], state["workflows"], state["owners"]) == ([], [], [])


@pytest.mark.parametrize(
    ("used_bytes", "total_bytes"), [((1 << 64) - 1, 1 << 36), (1, (1 << 64) - 1), (1 << 49, 1 << 36)]
)
def test_a_reading_that_does_not_fit_a_message_is_a_failure(used_bytes: int, total_bytes: int) -> None:
    """-1 without its sign: whoever was told of such a gauge would end its connection, and each one after it."""
    with pytest.raises(GaugeFailed, match="impossible reading"):
        Reading(used_bytes, total_bytes)


def test_an_owner_that_was_late_and_deletes_what_it_was_asked_for_has_answered() -> None:
    """It has nothing left to acknowledge, and would be shown as one that does not answer for as long as it lives."""
    with (
        Daemon(
            gauges_device="owners", gauges_host="none", pressure_critical_idle_s="50ms", pressure_ack_s="100ms"
        ) as daemon,
        owner(daemon.start()) as client,
        RawClient(daemon.socket, attach=False) as drilling,
    ):
        registered(client, 1)
        until(lambda: drilled(drilling, 0.95) and governor(daemon)["owners"][0]["unresponsive"], "it to be late")
        order = client.hear()
        assert order.keys == [key(1)]
        assert client.ask(lambda n: messages.ReleaseEntries(n, CARD, order.keys)).count == 1
        assert not governor(daemon)["owners"][0]["unresponsive"]
        assert daemon.ask(messages.HealthQuery)["healthy"]
