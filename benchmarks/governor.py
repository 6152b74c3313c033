"""What the governor costs: a policy pass over many device entries, the time from a reading to the first order, and
the slowdown of hits in the ring.

    python benchmarks/governor.py [--json PATH] [--entries N]

Owns: these figures, each with its bar. The figures of a pass come from the core alone, timed call by call as the
daemon's loop makes the calls. The other figures come from a real daemon with 16 owners, each on its own connection,
that answer every order with "kept".
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import bars
import numpy as np
from bars import Figure
from peers.tensord_peer import WAIT_S, Daemon, serving
from worker import key_of

import tensord
from tensord.daemon.core.effects import Send
from tensord.daemon.governor import events
from tensord.daemon.governor.governor import Governor
from tensord.daemon.governor.limits import GovernorLimits
from tensord.errors import TensordError, TimedOut
from tensord.ipc import messages
from tensord.ipc.blocking import BlockingChannel
from tensord.ipc.modes import Tier

OWNERS: Final = 16
DEVICE: Final = "0000:65:00.0"
TOTAL_BYTES: Final = 80 << 30
# Entries fill a fifth of the card, so that pressure asks for more than the quarter that one pass may order.
ENTRIES_SHARE: Final = 0.2
ROUNDS: Final = 7
HITS: Final = 20_000
TURNS: Final = 5
RETRY_S: Final = 0.05
RING_BYTES: Final = 64 << 20
_BURST: Final = 512


def core_figures(entries: int, told: Callable[[str], None]) -> list[Figure]:
    """One pass of each kind over `entries` entries of 16 owners, in milliseconds of the event loop."""
    found = []
    for name, share, workflow in (
        ("pressure, a quarter of them", 0.91, False),
        ("workflow-aware, as many as needed", 0.91, True),
        ("critical, all idle", 0.94, False),
    ):
        told(f"core: {name}")
        passes_ms, slices_ms = [], []
        for seed in range(ROUNDS):
            calls_ms = _pass_ms(entries, share, workflow, seed)
            passes_ms.append(sum(calls_ms))
            slices_ms.append(max(calls_ms))
        found.append(Figure(f"one pass, {name}, {entries:,} entries", median(passes_ms), 20, "ms"))
        found.append(Figure(f"its longest slice, {name}", median(slices_ms), 5, "ms"))
    return found


def _pass_ms(entries: int, share: float, workflow: bool, seed: int) -> list[float]:
    """The durations of the calls into the core during one pass."""
    chance = random.Random(seed)
    governor = Governor(GovernorLimits(sample_s=1.0))
    size_bytes = int(TOTAL_BYTES * ENTRIES_SHARE / entries)
    for owner in range(OWNERS):
        governor.handle(events.GovernorClientJoined(owner, f"owner {owner}", owner), 0.0)
        governor.handle(events.GovernorReceived(owner, messages.OpenDevice(1, DEVICE)), 0.0)
    if workflow:
        steps = [messages.Step(f"agent {n}", n) for n in range(64)]
        governor.handle(events.GovernorReceived(0, messages.RegisterWorkflow(2, "bench", steps)), 0.0)
    for number in range(entries):
        registered = messages.RegisterEntry(
            number + 10, DEVICE, _key(number), size_bytes, chance.randrange(1, 4096), f"agent {number % 64}"
        )
        governor.handle(events.GovernorReceived(number % OWNERS, registered), 0.001 * (number % 100))
    for owner in range(OWNERS):
        used = [_key(n) for n in range(owner, entries, OWNERS)]
        for start in range(0, len(used), 1024):
            some = [key for key in used[start : start + 1024] if chance.random() < 0.5]
            governor.handle(events.GovernorReceived(owner, messages.UseEntries(DEVICE, some)), 1.0)
    governor.handle(_sampled(0.5, 2.0), 2.0)
    # The daemon's thresholds. A collection during a pass counts as part of the pass; the garbage before it does not.
    gc.collect()
    gc.set_threshold(10_000, 20, 1000)
    now = 100.0
    calls_ms, orders = [], 0
    event: events.Event = _sampled(share, now)
    while True:
        before = time.perf_counter()
        told = governor.handle(event, now)
        calls_ms.append((time.perf_counter() - before) * 1e3)
        orders += sum(isinstance(e, Send) and isinstance(e.message, messages.Order) for e in told)
        timer = governor.next_timer()
        if timer is None or timer > now:
            break
        event = events.GovernorTick()
    if not orders:
        raise RuntimeError(f"a pass at {share} ordered nothing")
    return calls_ms


def _sampled(share: float, now: float) -> events.Sampled:
    sample = events.Sample(DEVICE, Tier.DEVICE, int(share * TOTAL_BYTES), TOTAL_BYTES, "bench", now)
    return events.Sampled((sample,))


def _key(number: int) -> bytes:
    return number.to_bytes(8, "little") * 4


class Owner:
    """One connection that owns entries. It keeps every entry that it is ordered to give away."""

    def __init__(self, socket: Path, number: int, entries: int) -> None:
        self.first_order_at: float | None = None
        self._channel = BlockingChannel.connect(socket, WAIT_S)
        self._ids = iter(range(1, 1 << 62))
        self._say(messages.Hello(next(self._ids), messages.PROTOCOL_VERSION, f"owner {number}", 0, False))
        self._answer()
        self._say(messages.OpenDevice(next(self._ids), DEVICE))
        self._answer()
        numbers = range(number, entries, OWNERS)
        size_bytes = int(TOTAL_BYTES * ENTRIES_SHARE / entries)
        for start in range(0, len(numbers), _BURST):
            burst = numbers[start : start + _BURST]
            self._say(*(messages.RegisterEntry(next(self._ids), DEVICE, _key(n), size_bytes, 64) for n in burst))
            for _ in burst:
                self._answer()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _say(self, *said: messages.Message) -> None:
        self._channel.send(*said, timeout_s=WAIT_S)

    def _answer(self) -> Any:
        answer, _ = self._channel.receive(WAIT_S)
        if isinstance(answer, messages.Error):
            raise answer.to_error()
        return answer

    def _serve(self) -> None:
        while not self._ended.is_set():
            try:
                message, _ = self._channel.receive(0.2)
            except TimedOut:
                continue
            except TensordError:
                return
            if isinstance(message, messages.Order) and message.kind != "promote":
                if self.first_order_at is None:
                    self.first_order_at = time.perf_counter()
                self._say(messages.AcknowledgeOrder(next(self._ids), DEVICE, message.order, kept=message.keys))

    def close(self) -> None:
        self._ended.set()
        self._thread.join(WAIT_S)
        self._channel.close()


class Gauge:
    """Sets how full the card is, by a drill with actions."""

    def __init__(self, socket: Path) -> None:
        self._channel = BlockingChannel.connect(socket, WAIT_S)
        self._ids = iter(range(1, 1 << 62))
        hello = messages.Hello(next(self._ids), messages.PROTOCOL_VERSION, "gauge", 0, False)
        self._channel.send(hello, timeout_s=WAIT_S)
        self._channel.receive(WAIT_S)

    def show(self, share: float) -> None:
        drill = messages.Drill(next(self._ids), DEVICE, int(share * TOTAL_BYTES), TOTAL_BYTES, act=True)
        self._channel.send(drill, timeout_s=WAIT_S)
        answer, _ = self._channel.receive(WAIT_S)
        if isinstance(answer, messages.Error):
            raise answer.to_error()

    def fall(self) -> None:
        """Shows a low reading twice: the mode relaxed takes two samples."""
        self.show(0.3)
        self.show(0.3)


@contextmanager
def _card(entries: int) -> Iterator[tuple[Daemon, list[Owner], Gauge]]:
    """A real daemon with 16 owners and a gauge."""
    flags = ["--gauges-device", "none", "--gauges-host", "none"]
    flags += ["--pressure-critical-idle-s", "0.01", "--pressure-retry-s", str(RETRY_S)]
    with serving(RING_BYTES, *flags) as daemon:
        owners: list[Owner] = []
        try:
            gauge = Gauge(daemon.socket)
            gauge.show(0.3)
            owners += [Owner(daemon.socket, number, entries) for number in range(OWNERS)]
            yield daemon, owners, gauge
        finally:
            for owner in owners:
                owner.close()


def _quiet(socket: Path) -> None:
    """Waits until every order is acknowledged."""
    with tensord.Client(socket, timeout_s=WAIT_S, required=True) as client:
        deadline = time.monotonic() + WAIT_S
        while any(device["ordered_entries"] for device in client.status()["governor"]["devices"]):
            if time.monotonic() > deadline:
                raise RuntimeError("orders stay unacknowledged")
            time.sleep(0.01)


def _read(socket: Path, seed: int, hits: int, orders: Any) -> None:
    """A reader of 64 entries. For each order it answers with the median of many hits in microseconds."""
    chance = random.Random(seed)
    value = np.arange(512, dtype=np.uint64)
    keys = [key_of("pressure", value.nbytes, n) for n in range(64)]
    with tensord.Client(socket, timeout_s=WAIT_S, required=True) as client:
        for key in keys:
            client.put(key, value, wait=True)
        while orders.recv():
            samples = []
            for _ in range(hits):
                key = keys[chance.randrange(len(keys))]
                before = time.perf_counter_ns()
                _ = client.get(key).tree  # type: ignore[union-attr]
                samples.append(time.perf_counter_ns() - before)
            orders.send(median(samples) / 1e3)


def _slower(socket: Path, gauge: Gauge, seed: int, *, quick: bool) -> float:
    """The ratio of a reader's hit times with passes to those without.

    One process measures both by turns, because two processes differ by more than the effect.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_read, args=(socket, seed, HITS // 10 if quick else HITS, theirs))
    process.start()

    def hits_us() -> float:
        ours.send(True)
        if not ours.poll(WAIT_S):
            raise RuntimeError("the reader does not answer")
        found: float = ours.recv()
        return found

    quiet_us, stormy_us = [], []
    for _ in range(1 if quick else TURNS):
        gauge.fall()
        _quiet(socket)
        quiet_us.append(hits_us())
        ended = threading.Event()
        storm = threading.Thread(target=_storm, args=(gauge, ended))
        storm.start()
        stormy_us.append(hits_us())
        ended.set()
        storm.join()
    ours.send(False)
    process.join()
    return median(stormy_us) / median(quiet_us)


def daemon_figures(entries: int, told: Callable[[str], None], *, quick: bool) -> list[Figure]:
    """The time from a reading to the first order, and the ratio of hit times with passes to those without."""
    with _card(entries) as (daemon, owners, gauge):
        rounds = 1 if quick else ROUNDS
        first_ms = []
        for _ in range(rounds):
            gauge.fall()
            _quiet(daemon.socket)
            # The governor asks again for entries that their owners kept only after this time.
            time.sleep(RETRY_S)
            for owner in owners:
                owner.first_order_at = None
            began = time.perf_counter()
            gauge.show(0.94)
            first_ms.append((_first_order_at(owners) - began) * 1e3)
            _quiet(daemon.socket)
        told(f"first orders after {', '.join(f'{ms:.1f}' for ms in first_ms)} ms")

        slower = []
        for seed in range(rounds):
            slower.append(_slower(daemon.socket, gauge, seed, quick=quick))
            told(f"hits of reader {seed + 1} of {rounds}: {slower[-1]:.2f} times as long while passes go on")
    return [
        Figure("from a reading to the first order, median", median(first_ms), 50, "ms"),
        Figure("hit in the ring while passes go on, against none", median(slower), 1.2, "×"),
    ]


def _first_order_at(owners: Sequence[Owner]) -> float:
    """The time (perf_counter seconds) at which the first order reached an owner. Raises RuntimeError after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while not any(owner.first_order_at for owner in owners):
        if time.monotonic() > deadline:
            raise RuntimeError(f"no owner got an order within {WAIT_S:g} s of the reading")
        time.sleep(0.001)
    return min(owner.first_order_at for owner in owners if owner.first_order_at is not None)


def _storm(gauge: Gauge, ended: threading.Event) -> None:
    """Raises and lowers the gauge four times a second, with a pass each time: as often as a tier is sampled."""
    while not ended.is_set():
        gauge.fall()
        gauge.show(0.94)
        ended.wait(0.25)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What the governor costs.")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--quick", action="store_true", help="one short round, to check that it runs")
    given = parser.parse_args(argv)

    def told(text: str) -> None:
        print(text, flush=True)

    found = [*core_figures(given.entries, told), *daemon_figures(given.entries, told, quick=given.quick)]
    print(bars.figures_table(found))
    if given.json:
        bars.save_figures(given.json, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
