"""Processor outputs that cannot be shared: passed through, told by reason; and processes that end."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensord
from tensord.client.caches.processor.cache import Feature, ProcessorCache
from tensord.client.writing.outcomes import Put
from tensord.errors import ReferenceLost, UsageError

from ...daemon_process import MIB, PATIENCE_S, Daemon, until
from ...processes import Child, Stage
from .processor_items import NAMESPACE, fresh, is_picture, picture, press, read, receiver, sender


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        (picture(1, 17 * MIB), "too_large"),
        ({"what": object()}, "unsupported"),
        ({"sparse": torch.eye(3).to_sparse()}, "unsupported"),
        ({"meta": torch.empty(3, device="meta")}, "unsupported"),
    ],
    ids=["larger than the ring", "an object", "a sparse tensor", "a tensor without values"],
)
def test_an_item_that_no_ring_or_tree_can_hold_is_passed_through(shared: Daemon, tree: Any, why: str) -> None:
    frontend = sender(shared.client())
    (sent,) = frontend.get_and_update([tree], [hash := fresh()])
    assert sent is tree
    assert frontend.make_stats().passed_through == {why: 1}
    assert frontend.is_cached([hash]) == [False]


def test_a_ring_full_of_what_others_read_passes_items_through(daemon: Daemon) -> None:
    client = daemon.client()
    leases = []
    for _ in range(40):
        key = os.urandom(32)
        if client.put(key, np.zeros(MIB // 2, np.uint8), wait=True, timeout_s=PATIENCE_S).state == "stored":
            leases.append(client.get(key))
    frontend = sender(daemon.client())
    tree = picture(1)
    assert frontend.get_and_update([tree], [fresh()])[0] is tree
    assert frontend.make_stats().passed_through == {"full": 1}


def test_without_a_daemon_everything_is_passed_through(tmp_path: Path) -> None:
    with tensord.Client(tmp_path / "nobody.sock") as client:
        frontend = sender(client)
        trees = [picture(1), picture(2)]
        hashes = [fresh(), fresh()]
        assert frontend.is_cached(hashes) == [False, False]
        assert [a is b for a, b in zip(frontend.get_and_update(trees, hashes), trees, strict=True)] == [True, True]
        stats = frontend.make_stats()
        assert (stats.hits, stats.total, stats.passed_through) == (0, 2, {"no_daemon": 2})
        with pytest.raises(ReferenceLost):
            receiver(client).get_and_update_features([Feature(hashes[0], None)])


@pytest.mark.parametrize(("size_bytes", "state"), [(4096, "sent"), (MIB, "lost")], ids=["a place", "no place"])
def test_a_daemon_that_does_not_answer_is_waited_for_once(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, size_bytes: int, state: str
) -> None:
    client = daemon.client()
    client.put(os.urandom(32), np.zeros(9000, np.uint8), wait=True)
    frontend, writer = sender(client, put_wait_s=0.01), client.link.puts.writer
    assert writer is not None
    until(lambda: state == "lost" or writer.arena.left_bytes > size_bytes + 1024, "a place for one more")
    put, ended = client.put, list[Put]()

    def noted(*given: Any, **how: Any) -> Put:
        ended.append(put(*given, **how))
        return ended[-1]

    monkeypatch.setattr(client, "put", noted)
    hashes = [fresh() for _ in range(3)]
    trees = [picture(n, size_bytes) for n in range(3)]
    daemon.pause()
    try:
        for tree, hash in zip(trees, hashes, strict=True):
            assert frontend.get_and_update([tree], [hash])[0] is tree
        assert [each.state for each in ended] == [state], "until the first is answered, nothing else is put"
        assert frontend.make_stats(delta=True).passed_through["late"] >= 3
    finally:
        daemon.resume()
    until(lambda: not frontend.owed_s, "the daemon's answer")
    assert frontend.is_cached(hashes) == [state == "sent", False, False]
    frontend.get_and_update(trees[2:], hashes[2:])
    assert len(ended) == 2, "the daemon has answered"


def a_frontend(stage: Stage, socket: Path, hashes: list[str]) -> None:
    """Tells what it sends for its pictures, and holds it until it is killed."""
    frontend = sender(tensord.Client(socket))
    stage.tell(frontend.get_and_update([picture(number, 1 << 16) for number in range(len(hashes))], hashes))
    stage.hear()


def test_a_killed_frontends_items_are_read_or_named_lost(daemon: Daemon) -> None:
    hashes, engine = [fresh(), fresh()], receiver(daemon.client())
    with Child(a_frontend, daemon.socket, hashes) as frontend:
        sent = frontend.hear(4 * PATIENCE_S)  # it imports torch first
        frontend.kill()
    assert is_picture(read(engine, hashes[1], sent[1]), 1)
    daemon.until(lambda status: len(daemon.lanes()) <= 1, "the killed one's lane to go")
    press(daemon.client(), daemon)
    with pytest.raises(ReferenceLost) as lost:
        engine.get_and_update_features(map(Feature, hashes, sent))
    assert lost.value.hashes == hashes


def test_stats_since_the_last_time_and_since_the_beginning(shared: Daemon) -> None:
    frontend = sender(shared.client())
    hash = fresh()
    frontend.get_and_update([picture(1)], [hash])
    frontend.get_and_update([None, {"x": object()}], [hash, fresh()])
    stats = frontend.make_stats(delta=True)
    assert (stats.hits, stats.total, dict(stats.passed_through)) == (1, 3, {"unsupported": 1})
    assert stats.hit_ratio == pytest.approx(1 / 3)
    empty = frontend.make_stats(delta=True)
    assert (empty.hits, empty.total, empty.passed_through, empty.hit_ratio) == (0, 0, {}, 0.0)
    frontend.get_and_update([None], [hash])
    assert (frontend.make_stats(delta=True).hits, frontend.make_stats().hits) == (1, 2)


def test_forget_ends_holds_and_counts_and_clear_the_entries_too(daemon: Daemon) -> None:
    frontend = sender(daemon.client())
    frontend.get_and_update([picture(1)], [hash := fresh()])
    frontend.forget()
    assert (frontend.held_bytes, frontend.make_stats().total) == (0, 0)
    assert frontend.is_cached([hash]) == [True]
    assert frontend.clear() == 1
    assert frontend.is_cached([hash]) == [False]
    assert frontend.held_bytes == 0


def test_an_argument_out_of_its_range_is_named(shared: Daemon) -> None:
    client = shared.client()
    durations: list[tuple[str, Any]] = [("seconds", 0.0), ("seconds", math.inf), ("put_wait_s", -1.0)]
    others = [
        ("put_wait_s", math.inf),
        ("entries_max", 0),
        ("entries_max", "many"),
        ("bytes_max", -1),
        ("copy", "maybe"),
    ]
    for name, wrong in durations + others:
        with pytest.raises(UsageError, match=name):
            ProcessorCache(client, NAMESPACE, **{name: wrong})
