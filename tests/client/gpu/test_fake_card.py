"""A fake card's capacity holds across processes, and what a killed one held is free."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tensord.errors import DeviceFull
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
