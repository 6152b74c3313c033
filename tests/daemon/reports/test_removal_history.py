"""What is remembered of entries that went: the latest of each key, found by its digits, bounded."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tensord.daemon.reports.removal_history import LATEST, REASONS, REMOVED, RemovalHistory


def gone(key: bytes, number: int = 0, reason: str = "capacity") -> dict[str, Any]:
    figures = {"at": float(number), "age_s": 10.0 + number, "idle_s": 1.0 + number, "uses": number}
    return {"key": key, "reason": reason, **figures, "worth": 0.5 * number}


def add(history: RemovalHistory, *gone: dict[str, Any]) -> None:
    batch = np.zeros(len(gone), REMOVED)
    for record, each in zip(batch, gone, strict=True):
        whole = {**each, "key": np.frombuffer(each["key"], np.uint64), "reason": REASONS.index(each["reason"])}
        for name, value in whole.items():
            record[name] = value
    history.add(batch)


def test_the_latest_records_are_found_and_older_ones_are_forgotten() -> None:
    chance, history = random.Random(1), RemovalHistory(100)
    keys = [chance.randbytes(32) for _ in range(60)]
    model: list[dict[str, Any]] = []
    for number in range(1000):
        reasons = ["capacity", "ttl", "explicit"]
        batch = [gone(chance.choice(keys), number, chance.choice(reasons)) for _ in range(chance.choice([1, 1, 2, 7]))]
        add(history, *batch)
        model += batch
        assert len(history) == min(len(model), 100)
        key = chance.choice(keys)
        latest = [each for each in model[-100:] if each["key"] == key]
        assert history.find(key) == ({n: v for n, v in latest[-1].items() if n != "key"} if latest else None)


def test_nothing_is_found_before_any_removal() -> None:
    history = RemovalHistory(10)
    assert history.find(bytes(32)) is None
    assert history.made_room() == {"entries": 0, "age_s": None, "idle_s": None}


def test_medians_cover_the_latest_entries_evicted_by_the_policy_only() -> None:
    history = RemovalHistory(LATEST)  # which overwrites its oldest
    for number in range(3000):
        add(history, gone(bytes(32), number, "capacity"), gone(bytes(32), 10**6, "ttl"))
    told = history.made_room()
    assert told["entries"] == LATEST // 2
    middle = 3000 - LATEST / 4 - 0.5
    assert told["idle_s"]["median"] == 1.0 + middle
    assert told["age_s"]["median"] == 10.0 + middle
    assert told["age_s"]["tenth"] == pytest.approx(10.0 + 3000 - LATEST / 2 + 0.1 * (LATEST / 2 - 1))
