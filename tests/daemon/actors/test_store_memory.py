"""The store's actor in a real daemon: during a large eviction all others are answered, and nothing is out of turn."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.daemon.actors import store_report
from tensord.ipc.messages import control as messages
from tensord.shm.ring.layout import span_bytes

from ...daemon_process import MIB, PATIENCE_S, Daemon, until
from ...faults.raw import Place, RawClient
from ...memory_bench import key

ENTRIES = 1_500
RECORDS = 1_000
SMALL_SLICES = {
    "tensord.daemon.room.ways.ROUND_ROWS_MAX": 1,
    "tensord.daemon.store.spans.SCAN_ROWS_MAX": 1,
    "tensord.daemon.core.dispatch.SLICE": 16,
}


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(SMALL_SLICES, ring_bytes=4 * MIB, max_entries=8192, policy="lru") as running:
        config = running.folder / "tensord.toml"
        config.touch()
        running.flags["config"] = config
        yield running.start()


def fill(client: tensord.Client, entries: int) -> None:
    puts = [client.put(key(number), 1, tokens=1) for number in range(entries)]
    assert {put.wait(PATIENCE_S).state for put in puts} == {"stored"}


def evict_all_but_ten(daemon: Daemon) -> None:
    (daemon.folder / "tensord.toml").write_text("max_tokens = 10\n")
    os.kill(daemon.pid, signal.SIGHUP)


def test_status_and_requests_are_answered_while_a_large_eviction_is_under_way(daemon: Daemon) -> None:
    client, seen = daemon.client(), set()
    fill(client, ENTRIES)
    evict_all_but_ten(daemon)

    def is_over() -> bool:
        assert client.touch(key(ENTRIES - 1)) == 1
        seen.add(daemon.store("entries"))
        return bool(min(seen) <= 10)

    until(is_over, "the eviction to end")
    assert len(seen) > 5, "what was asked waited for the eviction"


def submit(client: RawClient, place: Place, first: int) -> None:
    """Writes RECORDS small payloads into a place, and their records: keys `first` and after."""
    for number in range(RECORDS):
        at = place._replace(offset=place.offset + number * span_bytes(64))
        client.submit(key(first + number), at, client.write(at, bytes(32)), rings=number == RECORDS - 1)


def test_a_stop_carries_out_what_had_arrived(daemon: Daemon) -> None:
    with RawClient(daemon.socket, writes="in place") as client:
        (place,) = client.borrow(RECORDS * span_bytes(64))
        daemon.pause()
        submit(client, place, 0)
        assert daemon.terminate() == 0
    daemon.start()
    assert daemon.store("entries") == RECORDS


@pytest.mark.parametrize("writes", ["in place", "inbox"])
def test_what_a_client_has_put_before_a_request_is_stored_before_its_answer(daemon: Daemon, writes: str) -> None:
    with RawClient(daemon.socket, writes=writes) as client:
        (place,) = client.borrow(RECORDS * span_bytes(64))
        for number in range(10):
            # Too large to be copied at once.
            client.put(key(number), np.zeros(200_000, np.uint8))
            assert client.ask(partial(messages.Touch, keys=[key(number)])).count == 1
        daemon.pause()
        submit(client, place, 100)
        client.channel.send(messages.Touch(1000, [key(99 + RECORDS)]), timeout_s=PATIENCE_S)
        daemon.resume()
        assert client.hear() == messages.Counted(1000, 1)


def test_a_refusal_comes_before_its_record_counts_as_settled(daemon: Daemon) -> None:
    with RawClient(daemon.socket, writes="in place") as client:
        assert client.until_settled(client.put(key(0), 1)) is None
        for _ in range(50):
            record = client.put(key(0), 1)
            assert client.until_settled(record) == messages.PutRefused(record)


def test_a_stop_leaves_a_large_eviction_to_the_next_daemon(daemon: Daemon) -> None:
    fill(daemon.client(), ENTRIES)
    # Both signals are there when it goes on: however busy the machine is, it has little time between them.
    daemon.pause()
    evict_all_but_ten(daemon)
    assert daemon.terminate() == 0
    (daemon.folder / "tensord.toml").write_text("")
    daemon.start()
    assert daemon.store("entries") > ENTRIES // 2


def test_a_request_of_many_keys_leaves_others_their_turns_and_keeps_its_senders_order(daemon: Daemon) -> None:
    fill(daemon.client(), 100)
    # So few that the message comes in one piece.
    keys = [key(number) for number in range(100)]
    with ExitStack() as stack:
        client, *others = [stack.enter_context(RawClient(daemon.socket)) for _ in range(8)]
        daemon.pause()
        client.channel.send(messages.Evict(1000, keys), messages.Touch(1001, [keys[0], keys[-1]]), timeout_s=PATIENCE_S)
        for other in others:
            other.channel.send(messages.Touch(1000, keys[-1:]), timeout_s=PATIENCE_S)
        daemon.resume()
        counted = [other.hear().count for other in others]
        assert counted == [1] * len(others), "they waited for the eviction's end"
        assert client.hear() == messages.Counted(1000, 100)
        assert client.hear() == messages.Counted(1001, 0), "answered before what was asked first"


def test_a_time_to_live_ends_although_messages_never_stop_coming() -> None:
    many = 900
    with Daemon(default_ttl_s="200ms") as daemon, ExitStack() as stack:
        daemon.start().client().put(key(0), 1, wait=True)
        stored_at = time.monotonic()
        clients = [stack.enter_context(RawClient(daemon.socket)) for _ in range(8)]
        with daemon.stopped():
            for client in clients:
                flood = (messages.Evict(1000 + number, [key(1)]) for number in range(many))
                client.channel.send(*flood, messages.RequestClaim(5000, key(0)), timeout_s=PATIENCE_S)
            until(lambda: time.monotonic() > stored_at + 0.3, "the time to be over")
        answers = [[client.hear() for _ in range(many + 1)][-1].answer for client in clients]
    assert sorted(answers) == ["compute", *["wait"] * 7]


def has_a_clock(step: str) -> None:
    """Runs in the daemon: the wall clock is later by the seconds that stand in the file `step`."""
    reports: Any = store_report
    real = reports.unix_at_boot_s
    reports.unix_at_boot_s = lambda: real() + float(Path(step).read_text())


def test_times_are_shown_by_the_wall_clock_as_it_is_now() -> None:
    with Daemon() as daemon:
        step, shown = daemon.folder / "step", []
        step.write_text("0")
        daemon.before = f"{__name__}:has_a_clock", {"step": str(step)}
        daemon.start().client().put(key(1), 1, wait=True)
        for seconds in ("0", "1e6"):
            step.write_text(seconds)
            (entry,) = daemon.ask(messages.EntriesQuery)["entries"]
            why = daemon.ask(partial(messages.WhyQuery, key=key(1)))["entry"]
            assert why["created_unix_s"] == pytest.approx(entry["created_unix_s"])
            shown.append(entry["created_unix_s"])
        assert shown[1] - shown[0] == pytest.approx(1e6, abs=60)
        until(lambda: sum(daemon.ask(messages.LatencyQuery)["event_loop_lag"]["counts"]), "the loop's lag")
