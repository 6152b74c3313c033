"""Processor outputs that frontends store and engines read: processes of their own where it matters, a real daemon."""

from __future__ import annotations

import faulthandler
import math
import os
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tensord
from tensord.client.caches.processor.cache import Feature, ProcessorCache
from tensord.client.caches.processor.counts import Stats
from tensord.client.caches.processor.references import Reference
from tensord.client.writing.outcomes import Put
from tensord.errors import BadKey, ReferenceLost, UsageError
from tensord.shm.lanes.lane import HEAD_AT

from ...daemon_process import MIB, PATIENCE_S, Daemon, until
from ...processes import Child
from .processor_parties import a_frontend, an_engine

NAMESPACE: Final = tensord.Namespace(model="m", revision="r", dtype="float32", processor="p")
_numbers = count(1)


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    """A daemon for all tests that leave it as it was; its ring has 16 MiB."""
    with Daemon(policy="lru") as running:
        yield running.start()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon for one test, where `press` leaves nothing that nobody holds."""
    with Daemon(policy="lru") as running:
        yield running.start()


def fresh(letter: str = "") -> str:
    """A hash that no test has used."""
    return f"{letter}{next(_numbers):08}"


def picture(number: int, size_bytes: int = MIB) -> dict[str, Any]:
    """What a processor makes of a picture: told from another's by its number."""
    return {
        "pixel_values": torch.full((size_bytes // 4,), float(number)),
        "sizes": np.array([number, 2]),
        "meta": [number, "rgb", {"scale": 0.5}],
    }


def is_picture(found: Any, number: int) -> bool:
    """Whether it is the picture of that number, to the last value."""
    return bool(
        isinstance(found, dict)
        and torch.equal(found["pixel_values"], torch.full_like(found["pixel_values"], float(number)))
        and found["sizes"].tolist() == [number, 2]
        and found["meta"] == [number, "rgb", {"scale": 0.5}]
    )


def sender(client: tensord.Client, **options: Any) -> ProcessorCache:
    """A sender that waits for its puts for as long as a loaded machine takes."""
    return ProcessorCache(client, NAMESPACE, **{"put_wait_s": PATIENCE_S, **options})


def receiver(client: tensord.Client, **options: Any) -> ProcessorCache:
    return ProcessorCache(client, NAMESPACE, **options)


def read(cache: ProcessorCache, hash: str, data: Any) -> Any:
    """The tree that a receiver has of one feature."""
    (feature,) = cache.get_and_update_features([Feature(hash, data)])
    return feature.data


def press(client: tensord.Client, daemon: Daemon) -> None:
    """Fills the ring several times over with other entries, so that what is not held goes: with large ones, and then
    with small ones, since a large one takes the place of another rather than that of a small one and its neighbours.
    """
    puts: list[Put] = []
    for size_bytes in (MIB // 2, MIB // 16):
        filling = [(os.urandom(32), np.zeros(size_bytes, np.uint8)) for _ in range(2 * 16 * MIB // size_bytes)]
        puts += client.put_many(filling, wait=True, timeout_s=PATIENCE_S)
    assert {put.state for put in puts} <= {"stored", "refused"}
    assert daemon.running


# ---- what is sent, and what comes of it


def test_an_item_of_one_frontend_serves_another_and_an_engine(shared: Daemon) -> None:
    first, second, engine = sender(shared.client()), sender(shared.client()), receiver(shared.client())
    hash = fresh()
    assert first.is_cached([hash]) == second.is_cached([hash]) == [False]
    (sent,) = first.get_and_update([picture(1)], [hash])
    assert second.is_cached([hash]) == [True]
    (again,) = second.get_and_update([None], [hash])
    assert sent == again == Reference(NAMESPACE.key("processor", "", hash.encode()))
    assert is_picture(read(engine, hash, again), 1)
    assert (first.make_stats().hits, second.make_stats().hits, engine.make_stats().hits) == (0, 1, 1)


def test_a_reference_is_a_few_bytes_of_msgpack(shared: Daemon) -> None:
    (sent,) = sender(shared.client()).get_and_update([picture(1)], [hash := fresh()])
    packed = msgpack.packb(sent)
    assert len(packed) < 64
    assert is_picture(read(receiver(shared.client()), hash, Reference(*msgpack.unpackb(packed))), 1)


def test_numpy_leaves_come_back_as_read_only_views_and_torch_leaves_as_tensors_over_the_ring(shared: Daemon) -> None:
    (sent,) = sender(shared.client()).get_and_update([picture(3)], [hash := fresh()])
    engine = receiver(shared.client())
    one, other = read(engine, hash, sent), read(engine, hash, sent)
    assert isinstance(one["sizes"], np.ndarray) and not one["sizes"].flags.writeable
    assert one["pixel_values"].data_ptr() == other["pixel_values"].data_ptr()
    assert engine.held_bytes == 0


def test_without_a_copy_an_in_place_operation_on_a_tensor_ends_the_process(shared: Daemon) -> None:
    (sent,) = sender(shared.client()).get_and_update([picture(3, 64)], [hash := fresh()])
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        read(receiver(tensord.Client(shared.socket)), hash, sent)["pixel_values"].add_(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV


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


# ---- what stays


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


def test_asking_whether_items_are_there_is_no_use_of_them(shared: Daemon) -> None:
    client = shared.client()
    frontend = sender(client)
    frontend.get_and_update([picture(1)], [hash := fresh()])
    view = client.link.view
    assert view is not None
    before = view.lane.words[HEAD_AT]
    assert frontend.is_cached([hash] * 3) == [True] * 3
    assert view.lane.words[HEAD_AT] == before
    assert frontend.touch([hash, fresh()]) == 1
    assert view.lane.words[HEAD_AT] == before + 1


def test_an_unused_hold_ends_after_its_time(shared: Daemon) -> None:
    frontend = sender(shared.client(), seconds=0.05)
    frontend.get_and_update([picture(1)], [hash := fresh()])
    assert frontend.is_cached([hash]) == [True]
    until(lambda: frontend.held_bytes == 0, "what is held to end by itself")


def test_release_ends_what_this_thread_was_promised_and_nothing_that_was_sent(shared: Daemon) -> None:
    first, second = fresh(), fresh()
    sender(shared.client()).get_and_update([picture(1), picture(2)], [first, second])
    frontend = sender(shared.client())
    frontend.get_and_update([None], [first])
    sent_bytes = frontend.held_bytes
    assert frontend.is_cached([first, second]) == [True, True]
    assert frontend.held_bytes > sent_bytes
    frontend.release()
    assert frontend.held_bytes == sent_bytes
    assert frontend.held(first) is not None and frontend.held(second) is None


def test_the_oldest_that_was_sent_makes_room_and_what_is_promised_does_not(shared: Daemon) -> None:
    hashes = [fresh() for _ in range(4)]
    sender(shared.client()).get_and_update([picture(n) for n in range(4)], hashes)
    frontend = sender(shared.client(), entries_max=2)
    frontend.get_and_update([None], hashes[:1])
    assert frontend.is_cached(hashes[1:3]) == [True, True]
    assert frontend.held(hashes[0]) is None
    assert frontend.is_cached([hashes[3]]) == [False], "two are promised, and two are the most"
    assert all(isinstance(sent, Reference) for sent in frontend.get_and_update([None, None], hashes[1:3]))


def test_bytes_bound_what_is_held_as_well(shared: Daemon) -> None:
    hashes = [fresh(), fresh()]
    frontend = sender(shared.client(), bytes_max=MIB + MIB // 2)
    sent = frontend.get_and_update([picture(0), picture(1)], hashes)
    assert [isinstance(item, Reference) for item in sent] == [True, False]
    assert is_picture(sent[1], 1)
    assert frontend.make_stats().passed_through == {"held": 1}
    assert frontend.held_bytes <= MIB + MIB // 2


def test_a_child_of_a_fork_waits_for_no_thread_of_its_parent(shared: Daemon) -> None:
    frontend = sender(shared.client())
    with frontend._entries._lock, frontend._counts._lock:
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(int(PATIENCE_S))
                frontend.forget()
                os._exit(0 if frontend.make_stats() == Stats() else 1)
            finally:
                os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# ---- what goes, and is said once


def test_a_receiver_names_all_that_it_does_not_find_at_once(shared: Daemon) -> None:
    frontend, engine = sender(shared.client()), receiver(shared.client())
    there, gone, never = fresh(), fresh(), fresh()
    sent = frontend.get_and_update([picture(1), picture(2)], [there, gone])
    shared.client().evict(sent[1].key)
    features = [Feature(there, sent[0]), Feature(gone, sent[1]), Feature(fresh(), picture(3)), Feature(never, None)]
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


def test_a_receiver_of_another_ring_gets_everything_whole(shared: Daemon) -> None:
    frontend = sender(shared.client())
    hashes = [fresh() for _ in range(65)]
    frontend.get_and_update([{"number": n} for n in range(65)], hashes)
    frontend.invalidate(hashes[:64])
    assert frontend.is_cached(hashes[64:]) == [False]


def test_an_evicted_item_is_sent_from_the_hold(shared: Daemon) -> None:
    frontend = sender(shared.client())
    hash = fresh()
    (sent,) = sender(shared.client()).get_and_update([picture(4)], [hash])
    assert frontend.is_cached([hash]) == [True]
    shared.client().evict(sent.key)
    (whole,) = frontend.get_and_update([None], [hash])
    assert is_picture(whole, 4)
    assert frontend.make_stats().passed_through == {"gone": 1}


def test_nothing_given_for_what_is_not_there_names_all_of_it_and_stores_nothing(shared: Daemon) -> None:
    frontend = sender(shared.client())
    new, first, second = fresh(), fresh(), fresh()
    with pytest.raises(ReferenceLost) as raised:
        frontend.get_and_update([None, picture(1), None], [first, new, second])
    assert raised.value.hashes == [first, second]
    assert frontend.is_cached([new]) == [False]


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


# ---- what is passed through


def test_an_item_larger_than_the_ring_allows_is_passed_through(daemon: Daemon) -> None:
    frontend = sender(daemon.client())
    tree = picture(1, 17 * MIB)
    (sent,) = frontend.get_and_update([tree], [hash := fresh()])
    assert sent is tree
    assert frontend.make_stats().passed_through == {"too_large": 1}
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


def test_an_item_that_no_tree_can_hold_is_passed_through(shared: Daemon) -> None:
    frontend = sender(shared.client())
    trees = [{"what": object()}, {"sparse": torch.eye(3).to_sparse()}, {"meta": torch.empty(3, device="meta")}]
    sent = frontend.get_and_update(trees, [fresh() for _ in trees])
    assert [item is tree for item, tree in zip(sent, trees, strict=True)] == [True] * 3
    assert frontend.make_stats().passed_through == {"unsupported": 3}


def test_a_faulty_item_is_passed_through(shared: Daemon) -> None:
    class Lost:
        @property
        def nbytes(self) -> int:
            raise ZeroDivisionError

    endless: list[Any] = []
    endless += [endless, endless]
    frontend = sender(shared.client())
    for item in (Lost(), endless):
        (sent,) = frontend.get_and_update([item], [fresh()])
        assert sent is item
    assert frontend.make_stats().passed_through == {"unsupported": 2}


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


# ---- processes that end


def test_a_killed_frontends_items_are_read_or_named_lost(daemon: Daemon) -> None:
    hashes = [fresh(), fresh()]
    with Child(a_frontend, daemon.socket) as frontend, Child(an_engine, daemon.socket) as engine:
        frontend.tell((hashes, [1, 2]))
        _, sent = frontend.hear()
        frontend.kill()
        engine.tell([(hashes[0], sent[0], 1)])
        assert engine.hear() == [True]
        daemon.until(lambda status: status["clients"] <= 1 or len(daemon.lanes()) <= 1, "the killed one's lane to go")
        press(daemon.client(), daemon)
        engine.tell([(hash, item, number) for hash, item, number in zip(hashes, sent, (1, 2), strict=True)])
        assert engine.hear() == hashes


def test_a_daemon_killed_and_started_again_between_sender_and_receiver_loses_nothing(daemon: Daemon) -> None:
    frontend, engine = sender(client := daemon.client()), receiver(daemon.client())
    hash, other = fresh(), fresh()
    (sent,) = frontend.get_and_update([picture(1)], [hash])
    daemon.kill()
    until(lambda: not client.connected, "the client to notice")
    assert is_picture(read(engine, hash, sent), 1)
    tree = picture(2)
    assert frontend.get_and_update([None, tree], [hash, other]) == [sent, tree]
    assert frontend.make_stats().passed_through == {"no_daemon": 1}
    daemon.start()
    assert client.wait_connected(PATIENCE_S)
    assert is_picture(read(engine, hash, sent), 1)
    assert isinstance(frontend.get_and_update([tree], [other])[0], Reference)


# ---- counts and limits


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


@pytest.mark.parametrize(
    "wrong",
    [
        {"entries_max": 0},
        {"entries_max": "many"},
        {"bytes_max": -1},
        {"seconds": 0.0},
        {"seconds": math.inf},
        {"put_wait_s": -1.0},
        {"put_wait_s": math.inf},
        {"copy": "maybe"},
    ],
)
def test_an_argument_out_of_its_range_is_named(shared: Daemon, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        ProcessorCache(shared.client(), NAMESPACE, **wrong)


# ---- sizes of trees

ARRAYS = st.builds(
    lambda shape, dtype: np.zeros(shape, dtype),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.sampled_from(["u1", "i2", "f4", "f8", "c8"]),
)
TENSORS = ARRAYS.map(torch.from_numpy) | st.integers(0, 5).map(lambda n: torch.zeros(n, dtype=torch.bfloat16))
TEXTS = st.text(max_size=300) | st.binary(max_size=300)
LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | TEXTS | ARRAYS | TENSORS
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


def same(found: Any, given: Any) -> bool:
    if isinstance(given, dict):
        return type(found) is dict and list(found) == list(given) and all(same(found[k], given[k]) for k in given)
    if isinstance(given, list | tuple):
        return type(found) is type(given) and len(found) == len(given) and all(map(same, found, given))
    if isinstance(given, torch.Tensor):
        return isinstance(found, torch.Tensor) and found.dtype == given.dtype and torch.equal(found, given)
    if isinstance(given, np.ndarray):
        return isinstance(found, np.ndarray) and found.dtype == given.dtype and np.array_equal(found, given)
    return type(found) is type(given) and bool(found == given)


@pytest.fixture(scope="module")
def client(shared: Daemon) -> tensord.Client:
    return shared.client()


@settings(max_examples=60)
@given(TREES.filter(lambda tree: tree is not None), st.sampled_from([False, True, "on_write"]))
def test_any_tree_comes_back_as_it_was_given(client: tensord.Client, tree: Any, copy: Any) -> None:
    (sent,) = sender(client).get_and_update([tree], [hash := fresh()])
    if isinstance(sent, Reference):
        assert same(read(receiver(client, copy=copy), hash, sent), tree)
    else:
        assert sent is tree, "an int of more than 64 bits goes as it is"
