"""What a rank gets while its daemon is away, stopped, full or restarted, and while pages are damaged."""

from __future__ import annotations

import logging
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tensord.client.sglang import exchange, storage

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from .rank import HEADS, PAGE, Rank, mha_pool, page_hash


def _stored(rank: Rank) -> tuple[list[str], list[bytes]]:
    """Pages that are stored: their hashes, and their bytes."""
    hashes, indices = rank.stored()
    found = rank.pages(indices)
    rank.pool.free(indices)
    return hashes, found


def _right(rank: Rank, hashes: list[str], expected: list[bytes]) -> list[bool]:
    """Gets the pages, and asserts that those which the storage says it copied are right, and others unchanged."""
    _, room = rank.filled(len(hashes))
    before = rank.pages(room)
    got = rank.storage.batch_get_v1(hashes, room)
    for number, page in enumerate(rank.pages(room)):
        assert page == (expected if got[number] else before)[number]
    rank.pool.free(room)
    return got


def bound_s() -> float:
    """The most seconds that a call may take, whatever the daemon does."""
    return 4 * exchange.STALL_S


def _soon(call: Callable[[], Any]) -> Any:
    began = time.monotonic()
    answer = call()
    assert time.monotonic() - began < bound_s()
    return answer


def _set(rank: Rank, pages: int = 3) -> list[bool]:
    """Tries to store new pages."""
    hashes, indices = rank.filled(pages)
    got: list[bool] = rank.storage.batch_set_v1(hashes, indices)
    rank.pool.free(indices)
    return got


def _served(rank: Rank) -> None:
    """The rank stores and finds pages again."""
    until(lambda: all(_set(rank, 1)), "a page to be stored")
    hashes, expected = _stored(rank)
    assert rank.storage.batch_exists(hashes) == 3
    assert _right(rank, hashes, expected) == [True] * 3


def test_without_a_daemon_nothing_is_found_or_stored_and_with_one_pages_are_shared(tmp_path: Path) -> None:
    with Daemon() as daemon:
        rank = Rank(daemon.socket, named=False)
        until(lambda: rank.storage.shares, "the weights to be named")
        assert _soon(lambda: _set(rank)) == [False] * 3
        assert _soon(lambda: rank.storage.batch_exists([page_hash("x", 0)])) == 0
        assert _soon(lambda: _right(rank, [page_hash("x", 0)], [b""])) == [False]
        daemon.start()
        _served(rank)


@pytest.mark.parametrize("heads", [HEADS, 64], ids=["a place is lent", "no place is lent"])
def test_a_stopped_daemon_delays_one_set_for_a_limited_time_and_no_other_call(
    daemon: Daemon, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(daemon.socket, mha_pool(heads=heads))
    hashes, expected = _stored(rank)
    pages = 3 if heads == HEADS else 13
    assert heads == HEADS or pages * rank.pool.get_data_page(0).nbytes > MIB, "more than a client has places for"
    daemon.pause()
    assert _soon(lambda: _set(rank, pages)) == [False] * pages
    tried: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(rank.storage._exchange.client, "put", lambda *given, **_: tried.append(given))
        assert _set(rank, pages) == [False] * pages
        assert rank.storage.batch_exists(hashes) == 3
        assert _right(rank, hashes, expected) == [True] * 3
    assert not tried, "nothing is put that would be waited for"
    daemon.resume()
    _served(rank)


def test_a_damaged_page_is_not_copied_and_can_be_stored_again(daemon: Daemon, rank: Rank) -> None:
    hashes, indices = rank.stored()
    expected = rank.pages(indices)
    damage(daemon, expected[1])
    assert _right(rank, hashes, expected) == [True, False, False]
    assert rank.storage.batch_exists(hashes) == 1
    assert rank.storage.batch_set_v1(hashes, indices) == [True] * 3
    assert _right(rank, hashes, expected) == [True] * 3


def damage(daemon: Daemon, page: bytes) -> None:
    """Flips a bit of a page in the ring."""
    path = next(each for each in daemon.segments() if each.name.endswith(".ring"))
    # A part of the page: its keys and its values have other data of the tree between them.
    part = page[: len(page) // 4]
    with path.open("r+b") as ring:
        at = ring.read().index(part)
        ring.seek(at + 5)
        ring.write(bytes([part[5] ^ 1]))


@pytest.mark.parametrize("foreign", [[np.zeros(8, np.uint8)], {"a": 1}, b"text", np.zeros(5, np.float32)])
def test_an_entry_of_another_form_under_a_pages_key_is_not_copied(daemon: Daemon, rank: Rank, foreign: Any) -> None:
    hashes, indices = rank.filled(1)
    (key,) = rank.storage._keys("kv", hashes)
    assert daemon.client().put(key, foreign, wait=True).state == "stored"
    assert _right(rank, hashes, [b""]) == [False]
    assert rank.storage.batch_exists(hashes) == 0
    assert rank.storage.batch_set_v1(hashes, indices) == [True]


@pytest.mark.parametrize("indices", [None, torch.arange(3), torch.arange(10_000_000, 10_000_000 + 3 * PAGE), "x"])
def test_indices_that_are_no_pages_of_the_pool_are_answered_and_not_raised(rank: Rank, indices: Any) -> None:
    hashes, _ = _stored(rank)
    assert rank.storage.batch_get_v1(hashes, indices) == [False] * 3
    assert rank.storage.batch_set_v1([page_hash("none", number) for number in range(3)], indices) == [False] * 3


def test_calls_after_close_are_answered(rank: Rank) -> None:
    hashes, expected = _stored(rank)
    rank.storage.close()
    rank.storage.close()
    assert rank.storage.batch_exists(hashes) == 0
    assert _right(rank, hashes, expected) == [False] * 3
    assert _set(rank) == [False] * 3


def test_a_pool_without_addresses_of_pages_is_not_shared(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank(daemon.socket, mha_pool("page_unified"))
    assert rank.storage.batch_exists([page_hash("x", 0)]) == 0
    assert "pages of the pool kv are not shared" in caplog.text


def test_sharing_ends_before_sglang_changes_a_weight(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Updater

    monkeypatch.setattr(Updater, storage._CALLED_BEFORE_EVERY_CHANGE, Updater._select_runners)
    shared: list[bool] = []

    class Runners:
        """The model's runners, for an update that finds none to change."""

        def weight_update_runners(self) -> list[Any]:
            shared.append(rank.storage.shares)
            return []

    updater = object.__new__(Updater)
    updater.tp_worker, updater.draft_worker, updater.metrics_collector = Runners(), None, None
    updater.scheduler = types.SimpleNamespace(record_weight_version_change=lambda new_version: None)
    hashes, expected = _stored(rank)
    assert storage._watch_weights(rank.storage)
    assert storage._watch_weights(rank.storage)
    assert rank.storage.shares
    request = types.SimpleNamespace(model_path="new", load_format=None, recapture_cuda_graph=False, weight_version=None)
    assert updater.update_weights_from_disk(request).success
    assert shared == [False]
    assert rank.storage.batch_exists(hashes) == 0
    assert _right(rank, hashes, expected) == [False] * 3
    assert _set(rank) == [False] * 3


def test_an_sglang_whose_changes_of_weights_are_not_seen_is_refused(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, storage._UPDATER, types.ModuleType(storage._UPDATER))
    with caplog.at_level(logging.WARNING, "tensord"):
        rank = Rank(daemon.socket, named=False)
    assert "changes of weights would not be noticed" in caplog.text
    assert rank.storage._exchange.client.wait_connected(PATIENCE_S)
    assert _set(rank) == [False] * 3
    assert not rank.storage.shares
