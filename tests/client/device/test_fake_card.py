"""A fake card's capacity holds across processes, and what a killed one held is free."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tensord.errors import DeviceFull, UsageError
from tensord.testing.fake_card import FakeCard

from ...daemon_process import PATIENCE_S, until

CAPACITY = 100_000

HOLDER = """
import sys
from tensord.testing.fake_card import FakeCard
card = FakeCard(sys.argv[1], "card0")
card.take(int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""

# Takes and gives at random, and looks each time at what all hold together.
GRABBER = """
import random, sys
from tensord.testing.fake_card import FakeCard
from tensord.errors import DeviceFull
card, rng, full = FakeCard(sys.argv[1], "card0"), random.Random(int(sys.argv[2])), 0
held = []
for _ in range(300):
    try:
        held.append(rng.randrange(1, 40_000))
        card.take(held[-1])
    except DeviceFull:
        held.pop()
        full += 1
        if held:
            card.give(held.pop(rng.randrange(len(held))))
    used, total = card.reading()
    assert card.held_bytes == sum(held) <= used <= total, (card.held_bytes, sum(held), used, total)
print(full)
"""


def process(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def gauges(card: FakeCard) -> dict[str, tuple[int, int]]:
    rows = [line.split() for line in card.gauge_file.read_text().splitlines()]
    return {name: (int(used), int(total)) for name, used, total in rows}


def test_two_processes_never_hold_more_than_the_card_has_together(tmp_path: Path) -> None:
    card = FakeCard(tmp_path, "card0", CAPACITY)
    grabbers = [process(GRABBER, tmp_path, seed) for seed in range(2)]
    refused = [int(grabber.communicate(timeout=PATIENCE_S)[0]) for grabber in grabbers]
    assert [grabber.returncode for grabber in grabbers] == [0, 0]
    assert all(refused)
    assert card.refresh() == (0, CAPACITY)


def test_memory_of_a_killed_process_is_free(tmp_path: Path) -> None:
    card = FakeCard(tmp_path, "card0", CAPACITY)
    with process(HOLDER, tmp_path, 90_000) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert gauges(card) == {"card0": (90_000, CAPACITY)}
        with pytest.raises(DeviceFull, match="card0 has 10000 of its 100000 bytes free, 20000 are needed"):
            card.take(20_000)
        holder.send_signal(signal.SIGKILL)
        assert holder.wait(PATIENCE_S) == -signal.SIGKILL
    assert gauges(card) == {"card0": (90_000, CAPACITY)}  # nobody has looked yet
    assert until(lambda: card.refresh() == (0, CAPACITY), "its share is free")
    assert gauges(card) == {"card0": (0, CAPACITY)}
    card.take(CAPACITY)


def test_an_engines_own_use_rises_and_falls(tmp_path: Path) -> None:
    with FakeCard(tmp_path, "card0", CAPACITY) as card:
        card.take(1000)
        card.occupy(50_000)
        assert gauges(card)["card0"] == (51_000, CAPACITY)
        card.occupy(20_000)
        assert card.reading() == (21_000, CAPACITY)
        with pytest.raises(DeviceFull, match="79000 of its 100000 bytes free"):
            card.occupy(99_001 + 20_000)
        assert card.reading() == (21_000, CAPACITY)
        card.occupy(99_000)
        assert card.reading() == (CAPACITY, CAPACITY)
        card.occupy(0)
        assert card.held_bytes == 1000


def test_several_cards_share_a_gauge_file_and_other_lines_stay(tmp_path: Path) -> None:
    first, second = FakeCard(tmp_path, "card0", CAPACITY), FakeCard(tmp_path, "0000:65:00.0", 5000)
    with first.gauge_file.open("a") as file:
        file.write("host 1 2\n")
    first.take(10)
    second.take(20)
    assert gauges(first) == {"card0": (10, CAPACITY), "0000:65:00.0": (20, 5000), "host": (1, 2)}


def test_a_reader_never_sees_half_a_gauge_file(tmp_path: Path) -> None:
    card = FakeCard(tmp_path, "card0", CAPACITY)
    done = threading.Event()
    seen: set[Any] = set()

    def read() -> None:
        while not done.is_set():
            seen.add(gauges(card)["card0"])

    reading = threading.Thread(target=read)
    reading.start()
    for _ in range(300):
        card.take(CAPACITY)
        card.give(CAPACITY)
    done.set()
    reading.join(PATIENCE_S)
    assert seen <= {(0, CAPACITY), (CAPACITY, CAPACITY)}


def test_several_openings_in_one_process_count_each(tmp_path: Path) -> None:
    one, two = FakeCard(tmp_path, "card0", CAPACITY), FakeCard(tmp_path, "card0")
    one.take(60_000)
    with pytest.raises(DeviceFull):
        two.take(60_000)
    two.take(40_000)
    one.close()
    assert two.reading() == (40_000, CAPACITY)


def test_a_closed_card_holds_nothing_and_says_that_it_is_closed(tmp_path: Path) -> None:
    card = FakeCard(tmp_path, "card0", CAPACITY)
    card.take(10)
    card.close()
    card.close()
    assert gauges(card) == {"card0": (0, CAPACITY)}
    with pytest.raises(UsageError, match="open it anew"):
        card.take(1)
    assert card.held_bytes == 0


def test_a_forked_child_keeps_nothing_of_its_parents(tmp_path: Path) -> None:
    """The parent is killed while its child lives on: what it held is free all the same."""
    card = FakeCard(tmp_path, "card0", CAPACITY)
    script = HOLDER.replace(
        'print("held", flush=True)',
        "import os, time\nif os.fork() == 0:\n    print(os.getpid(), flush=True)\n    time.sleep(600)",
    )
    with process(script, tmp_path, 90_000) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            assert card.reading() == (90_000, CAPACITY)
            parent.kill()
            parent.wait(PATIENCE_S)
            assert until(lambda: card.refresh() == (0, CAPACITY), "its share is free")
        finally:
            os.kill(child, signal.SIGKILL)


def test_invalid_parameters_of_a_card_are_refused(tmp_path: Path) -> None:
    for name in ("", "a b", "a/b", "..", "x" * 65):
        with pytest.raises(UsageError, match="a card called"):
            FakeCard(tmp_path, name, CAPACITY)
    with pytest.raises(UsageError, match="capacity_bytes says how much"):
        FakeCard(tmp_path, "new")
    card = FakeCard(tmp_path, "card0", CAPACITY)
    with pytest.raises(UsageError, match="has 100000 bytes, not 5"):
        FakeCard(tmp_path, "card0", 5)
    with pytest.raises(UsageError, match="occupied_bytes is -1"):
        card.occupy(-1)
    with pytest.raises(UsageError, match="1 bytes were to go back to card0, and 0 are held"):
        card.give(1)
