"""Processor outputs that frontends store and engines read: what is sent, what stays, and what goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tensord
from tensord.client.caches.processor import loans
from tensord.client.caches.processor.cache import Feature, Stats
from tensord.client.caches.processor.loans import Reference
from tensord.errors import BadKey, ReferenceLost, UsageError

from ...daemon_process import MIB, PATIENCE_S, Daemon, until
from ...processes import child_says
from .processor_items import NAMESPACE, fresh, is_picture, picture, press, read, receiver, sender


def test_an_item_of_one_frontend_serves_another_and_an_engine(shared: Daemon) -> None:
    first, second, engine = sender(shared.client()), sender(shared.client()), receiver(shared.client())
    hash = fresh()
    assert first.is_cached([hash]) == second.is_cached([hash]) == [False]
    (sent,) = first.get_and_update([picture(1)], [hash])
    assert second.is_cached([hash]) == [True]
    (again,) = second.get_and_update([None], [hash])
    assert sent[:2] == again[:2] and sent.key == NAMESPACE.key("processor", "", hash.encode())
    assert is_picture(read(engine, hash, again), 1)
    assert (first.make_stats().hits, second.make_stats().hits, engine.make_stats().hits) == (0, 1, 1)


def test_numpy_leaves_come_back_as_read_only_views_and_torch_leaves_as_tensors_over_the_ring(shared: Daemon) -> None:
    (sent,) = sender(shared.client()).get_and_update([picture(3)], [hash := fresh()])
    engine = receiver(shared.client())
    one, other = read(engine, hash, sent), read(engine, hash, sent)
    assert isinstance(one["sizes"], np.ndarray) and not one["sizes"].flags.writeable
    assert one["pixel_values"].data_ptr() == other["pixel_values"].data_ptr()
    assert engine.held_bytes == 0


@pytest.mark.parametrize("copy", ["on_write", True])
def test_a_receiver_s_writes_are_private(shared: Daemon, copy: Any) -> None:
    (sent,) = sender(shared.client()).get_and_update([picture(3)], [hash := fresh()])
    engine = receiver(shared.client(), copy=copy)
    tree = read(engine, hash, sent)
    assert is_picture(tree, 3)
    tree["pixel_values"].add_(1)
    tree["sizes"][:] = 9
    assert float(tree["pixel_values"][-1]) == 4 and tree["sizes"].tolist() == [9, 9]
    assert is_picture(read(engine, hash, sent), 3)
    assert is_picture(read(receiver(shared.client()), hash, sent), 3)


def test_a_tree_that_was_passed_through_stays_as_it_is_and_no_data_means_what_is_stored(shared: Daemon) -> None:
    engine = receiver(shared.client())
    tree = picture(5)
    assert read(engine, fresh(), tree) is tree
    sender(shared.client()).get_and_update([picture(6)], [hash := fresh()])
    assert is_picture(read(engine, hash, None), 6)


def test_an_item_reported_as_cached_is_held_until_it_is_asked_for(daemon: Daemon) -> None:
    client = daemon.client()
    hash = fresh()
    sender(client, seconds=0.01).get_and_update([picture(1)], [hash])
    frontend = sender(daemon.client())
    assert frontend.is_cached([hash]) == [True]
    press(client, daemon)
    (sent,) = frontend.get_and_update([None], [hash])
    press(client, daemon)
    assert is_picture(read(receiver(client), hash, sent), 1)
    assert frontend.is_cached([hash]) == [True]
    assert client.evict(sent.key) == 1
    assert is_picture(frontend.get_and_update([None], [hash])[0], 1), "evicted on request, it is sent from the hold"
    assert frontend.make_stats().passed_through == {"gone": 1}


def test_an_unused_hold_ends_after_its_time(shared: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loans, "_SWEEP_S", 0.01)
    frontend = sender(shared.client(), seconds=0.05)
    frontend.get_and_update([picture(1)], [hash := fresh()])
    assert frontend.is_cached([hash]) == [True]
    until(lambda: frontend.held_bytes == 0, "what is held to end by itself")


def test_release_ends_what_this_thread_was_promised_and_nothing_that_was_sent(shared: Daemon) -> None:
    first, second = fresh(), fresh()
    sender(shared.client()).get_and_update([picture(1), picture(2)], [first, second])
    frontend = sender(shared.client())
    frontend.get_and_update([None], [first])
    sent_bytes = frontend.lent_bytes
    assert frontend.held_bytes == 0 < sent_bytes
    assert frontend.is_cached([first, second]) == [True, True]
    assert frontend.held(first) is not None and frontend.held(second) is not None
    frontend.release()
    assert (frontend.held_bytes, frontend.lent_bytes) == (0, sent_bytes)
    assert frontend.held(first) is None and frontend.held(second) is None


@pytest.mark.parametrize("limit", [{"entries_max": 2}, {"bytes_max": 2 * MIB + MIB // 2}], ids=list)
def test_what_is_promised_makes_no_room(shared: Daemon, limit: dict[str, int]) -> None:
    hashes = [fresh() for _ in range(3)]
    sender(shared.client()).get_and_update([picture(n) for n in range(3)], hashes)
    frontend = sender(shared.client(), **limit)
    assert frontend.is_cached(hashes[:2]) == [True, True]
    assert frontend.is_cached([hashes[2]]) == [False], "two are promised, and two are the most"
    assert all(isinstance(sent, Reference) for sent in frontend.get_and_update([None, None], hashes[:2]))
    assert is_picture(frontend.get_and_update([picture(2)], hashes[2:])[0], 2)
    assert frontend.make_stats().passed_through == {"held": 1}


def test_a_child_of_a_fork_waits_for_no_thread_of_its_parent(shared: Daemon) -> None:
    frontend = sender(shared.client())
    frontend.pass_through("unsupported")

    def counts_anew() -> bool:
        is_fresh = frontend.make_stats() == Stats()
        frontend.forget()
        return is_fresh

    with frontend._loans._lock, frontend._counts._lock:
        assert child_says(counts_anew) == 0


def test_a_receiver_names_all_that_it_does_not_find_at_once(shared: Daemon) -> None:
    frontend, engine = sender(shared.client()), receiver(shared.client())
    there, gone, never = fresh(), fresh(), fresh()
    sent = frontend.get_and_update([picture(1), picture(2)], [there, gone])
    shared.client().evict(sent[1].key)
    lost = Reference(sent[1].key)
    features = [Feature(there, sent[0]), Feature(gone, lost), Feature(fresh(), picture(3)), Feature(never, None)]
    with pytest.raises(ReferenceLost) as raised:
        engine.get_and_update_features(features)
    assert raised.value.hashes == [gone, never]
    assert isinstance(raised.value, tensord.TensordError)
    frontend.invalidate(raised.value.hashes)
    assert frontend.is_cached([there, gone]) == [True, False]
    again = frontend.get_and_update([None, picture(2)], [there, gone])
    filled = engine.get_and_update_features([Feature(there, again[0]), Feature(gone, again[1])])
    assert is_picture(filled[0].data, 1) and is_picture(filled[1].data, 2)


def test_an_item_that_a_receiver_missed_is_sent_complete_for_a_time(shared: Daemon) -> None:
    hash = fresh()
    for seconds in (2 * PATIENCE_S, 0.01):
        frontend = sender(shared.client(), seconds=seconds)
        frontend.get_and_update([picture(1)], [hash])
        frontend.invalidate([hash])
        if seconds > PATIENCE_S:
            (sent,) = frontend.get_and_update([picture(1)], [hash])
            assert is_picture(sent, 1)
            assert frontend.make_stats().passed_through == {"invalidated": 1}
    until(lambda: frontend.is_cached([hash]) == [True], "the item to be trusted again")


def test_nothing_given_for_what_is_not_there_names_all_of_it_and_stores_the_rest(shared: Daemon) -> None:
    frontend = sender(shared.client())
    new, first, second = fresh(), fresh(), fresh()
    with pytest.raises(ReferenceLost) as raised:
        frontend.get_and_update([None, picture(1), None], [first, new, second])
    assert raised.value.hashes == [first, second]
    assert frontend.is_cached([new]) == [True]


def test_a_reference_to_another_hash_or_to_what_no_processor_made_is_refused(shared: Daemon) -> None:
    client = shared.client()
    (sent,) = sender(client).get_and_update([picture(1)], [fresh()])
    engine = receiver(shared.client())
    with pytest.raises(UsageError, match="not stored under that hash"):
        read(engine, fresh(), sent)
    others: list[Any] = [np.zeros(3), {"hash": 1}, [1, 2]]
    others += [{"hash": wrong, "tree": 1} for wrong in (None, 1 << 40, [300], "text", torch.zeros(3))]
    for number, other in enumerate(others):
        key = NAMESPACE.key("encoder", "image", bytes([number]))
        client.put(key, other, wait=True, timeout_s=PATIENCE_S)
        with pytest.raises(UsageError, match="not stored under that hash"):
            read(engine, fresh(), Reference(key))
    with pytest.raises(BadKey):
        read(engine, fresh(), Reference(b"short"))
