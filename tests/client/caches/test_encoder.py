"""The encoder cache manager: its promises by name, at random beside a model, and with the ring of a real daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import tensord
from tensord.client.caches.encoder import EncoderCacheManager, compute_encoder_budget
from tensord.client.caches.encoder_request import EncoderInput, EncoderRequest
from tensord.errors import (
    BadConfiguration,
    BadKey,
    ObjectTooLarge,
    StoreFull,
    TensordError,
    TimedOut,
    TokensDiffer,
    UnsupportedLeaf,
    UsageError,
)

from ...daemon_process import MIB, Daemon, until
from ...memory_bench import key

PLENTY = 1 << 30
_numbers = count(1)


def request(name: str, *inputs: tuple[bytes, int]) -> EncoderRequest:
    return EncoderRequest(name, [EncoderInput(at, tokens) for at, tokens in inputs])


A, B, C = key(1), key(2), key(3)


# ---- mistakes and refusals are named

Manager = EncoderCacheManager
RUNNING = request("running", (A, 6), (B, 2))
REFUSED: list[tuple[Callable[[Manager], object], type[TensordError], str]] = [
    (lambda _: EncoderInput(A, -1), UsageError, "tokens is -1; it must be a whole number from 0"),
    (lambda _: EncoderInput(A, 1.5), UsageError, "tokens is 1.5"),  # type: ignore[arg-type]
    (lambda _: EncoderInput(A, True), UsageError, "tokens is True"),
    (lambda _: EncoderInput(b"short", 1), BadKey, "32 bytes"),
    (lambda _: request("r", (B, 1), (A, 4), (A, 5)), TokensDiffer, "has 4 tokens, but the input has 5"),
    (lambda _: Manager(-1), UsageError, "cache_size is -1"),
    (lambda manager: manager.allocate(RUNNING, -1), UsageError, "request 'running' has no input -1; it has 2"),
    (lambda manager: manager.allocate(RUNNING, 2), UsageError, "request 'running' has no input 2; it has 2"),
    (lambda manager: manager.allocate(request("running", (B, 2)), 0), UsageError, "free the request first"),
    (lambda manager: manager.allocate(request("r", (C, 11)), 0), ObjectTooLarge, "needs 11 .* the cache has 10; raise"),
    (
        lambda manager: manager.allocate(request("r", (C, 5)), 0),
        StoreFull,
        "'r' needs 5 encoder tokens, but only 4 of 10 .* can_allocate",
    ),
    *(
        (call, TokensDiffer, f"{A.hex()[:28]}… has 6 tokens, but the input has 5")
        for call in (
            lambda manager: manager.has_cache(request("r", (A, 5)), 0),
            lambda manager: manager.can_allocate(request("r", (A, 5)), 0, PLENTY),
            lambda manager: manager.allocate(request("r", (A, 5)), 0),
        )
    ),
]


@pytest.mark.parametrize(("call", "kind", "says"), REFUSED)
def test_a_refusal_is_named_and_changes_nothing(
    call: Callable[[Manager], object], kind: type[TensordError], says: str
) -> None:
    manager = Manager(10)
    manager.allocate(RUNNING, 0)
    manager.allocate(RUNNING, 1)
    manager.free_encoder_input(RUNNING, 1)
    with pytest.raises(kind, match=says):
        call(manager)
    assert (manager.free_tokens, manager.freeable_tokens, manager.used_tokens) == (2, 2, 6)
    assert manager.has_cache(RUNNING, 1) and manager.get_freed_ids() == []


# ---- budgets


def budget(compute: int, cache: int, batch_tokens_max: int = 8192, *, chunked: bool = True) -> tuple[int, int]:
    limits = {"batch_tokens_max": batch_tokens_max, "compute_tokens": compute, "cache_tokens": cache}
    return compute_encoder_budget({"image": 576, "video": 2048}, **limits, chunked_input=chunked)


def test_the_budgets_are_as_configured_and_never_less_than_the_largest_item() -> None:
    assert budget(8192, 16384) == (8192, 16384)
    assert budget(512, 16384) == (2048, 16384)
    assert budget(4096, 0) == (4096, 2048)
    assert budget(1, 1, 2047) == budget(1, 1, 2048, chunked=False) == (2048, 2048)
    with pytest.raises(BadConfiguration, match=r"video can have 2048 tokens, but batch_tokens_max is 2047 .* raise"):
        budget(1, 1, 2047, chunked=False)
    with pytest.raises(UsageError, match="compute_tokens is -5"):
        budget(-5, 1)


# ---- at random


TOKENS = {key(number): number % 5 for number in range(8)}
REQUESTS = [
    request(f"r{numbers}", *((key(number), TOKENS[key(number)]) for number in numbers))
    for numbers in ((0, 1, 2), (1, 1, 3), (4, 5, 4), (6, 7), (2, 3, 4, 6))
]
PLACES = st.sampled_from([(one, at) for one in REQUESTS for at in range(len(one.inputs))])


class Machine(RuleBasedStateMachine):
    """The model keeps (request, index) pairs, and an order of keys; everything else is counted anew each time."""

    size = 7

    def __init__(self) -> None:
        super().__init__()
        self.manager = EncoderCacheManager(self.size)
        self.held: dict[tuple[str, int], bytes] = {}
        self.unneeded: list[bytes] = []
        self.evicted: list[bytes] = []

    def needed(self) -> set[bytes]:
        return set(self.held.values())

    def present(self) -> set[bytes]:
        return self.needed() | set(self.unneeded)

    def free(self, one: EncoderRequest, at: int) -> None:
        gone = self.held.pop((one.request_id, at), None)
        if gone is not None and gone not in self.needed():
            self.unneeded.append(gone)

    @rule(place=PLACES)
    def allocate(self, place: tuple[EncoderRequest, int]) -> None:
        one, at = place
        wanted = one.inputs[at]
        taken = sum(TOKENS[each] for each in self.needed() - {wanted.key})
        if taken + wanted.tokens > self.size:
            assert not self.manager.can_allocate(one, at, PLENTY)
            with pytest.raises(StoreFull):
                self.manager.allocate(one, at)
            return
        assert self.manager.can_allocate(one, at, PLENTY)
        went = []
        if wanted.key not in self.present():
            while sum(TOKENS[each] for each in self.present()) + wanted.tokens > self.size:
                went.append(self.unneeded.pop(0))
        elif wanted.key in self.unneeded:
            self.unneeded.remove(wanted.key)
        self.held[one.request_id, at] = wanted.key
        self.evicted = [each for each in self.evicted if each not in went] + went
        assert self.manager.allocate(one, at) == went

    @rule(place=PLACES)
    def free_encoder_input(self, place: tuple[EncoderRequest, int]) -> None:
        self.free(*place)
        self.manager.free_encoder_input(*place)

    @rule(one=st.sampled_from(REQUESTS))
    def end(self, one: EncoderRequest) -> None:
        for of, at in list(self.held):
            if of == one.request_id:
                self.free(one, at)
        self.manager.free(one)

    @rule()
    def drain(self) -> None:
        assert self.manager.get_freed_ids() == [each for each in self.evicted if each not in self.present()]
        self.evicted = []

    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.held, self.unneeded, self.evicted = {}, [], []

    @rule(place=PLACES, budget=st.integers(0, 5), scheduled=st.integers(0, 10))
    def ask(self, place: tuple[EncoderRequest, int], budget: int, scheduled: int) -> None:
        one, at = place
        wanted = one.inputs[at]
        left = self.size - sum(TOKENS[each] for each in self.needed())
        fits = wanted.tokens + scheduled <= left and (wanted.key in self.unneeded or wanted.tokens <= budget)
        assert self.manager.can_allocate(one, at, budget, scheduled) is (wanted.key in self.needed() or fits)

    @invariant()
    def agrees(self) -> None:
        manager = self.manager
        assert manager.free_tokens == self.size - sum(TOKENS[each] for each in self.present()) >= 0
        assert manager.used_tokens == sum(TOKENS[each] for each in self.needed())
        assert manager.freeable_tokens == sum(TOKENS[each] for each in self.unneeded)
        for one in REQUESTS:
            ids = {at for of, at in self.held if of == one.request_id}
            assert manager.get_cached_input_ids(one) == ids
            for at, each in enumerate(one.inputs):
                assert manager.has_cache(one, at) is (each.key in self.present())


TestAtRandom = Machine.TestCase
TestAtRandom.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


# ---- with the host's ring


RING_BYTES = 4 * MIB


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    """A daemon with so small a ring that other engines' puts soon fill it."""
    with Daemon(ring_bytes=RING_BYTES, policy="lru", gauges_host="none") as running:
        yield running.start()


@pytest.fixture
def cache(shared: Daemon) -> Iterator[tensord.Client]:
    with tensord.Client(shared.socket) as client:
        yield client


@pytest.fixture
def picture() -> bytes:
    """A key that nobody has used."""
    return key(next(_numbers), b"pictures")


def output() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.arange(65536, dtype=np.float32)


def fill(client: tensord.Client) -> None:
    """Another engine's puts, more than twice of what the ring holds."""
    for _ in range(2 * RING_BYTES // MIB + 1):
        client.put(key(next(_numbers), b"fillings"), np.zeros(MIB - 4096, np.uint8), wait=True)


def stored(manager: EncoderCacheManager, one: EncoderRequest, at: int = 0) -> None:
    """Encodes and stores an allocated input, and lets a step go by once the daemon has it."""
    put = manager.store(one, at, output(), timeout_s=30)
    assert put is not None and put.wait(30).state in ("stored", "existed"), put
    manager.get_freed_ids()


def test_an_entry_of_one_engine_is_a_hit_in_another(shared: Daemon, cache: tensord.Client, picture: bytes) -> None:
    first, second = EncoderCacheManager(10, cache), EncoderCacheManager(10, shared.client())
    mine, theirs = request("1", (picture, 4)), request("2", (picture, 4))
    assert not second.has_cache(theirs, 0)
    first.allocate(mine, 0)
    assert first.lease(mine, 0) is None
    stored(first, mine)
    assert second.has_cache(theirs, 0)
    assert second.lease(theirs, 0) is None, "not allocated"
    second.allocate(theirs, 0)
    lease = second.lease(theirs, 0)
    assert lease is not None and np.array_equal(lease.tree, output())


def test_an_entry_only_in_the_ring_counts_against_the_compute_budget(cache: tensord.Client, picture: bytes) -> None:
    manager, wanted = EncoderCacheManager(10, cache), request("1", (picture, 4))
    cache.put(picture, output(), wait=True)
    assert manager.has_cache(wanted, 0)
    assert not manager.can_allocate(wanted, 0, compute_budget=3)
    assert manager.can_allocate(wanted, 0, compute_budget=4)


@pytest.mark.parametrize("by", ["allocate", "store", "store again"])
def test_an_entry_of_a_running_request_is_not_evicted_by_another_engine(
    shared: Daemon, cache: tensord.Client, picture: bytes, by: str
) -> None:
    other = shared.client()
    manager, running = EncoderCacheManager(10, cache), request("1", (picture, 4))
    if by == "allocate":
        other.put(picture, output(), wait=True)
    manager.allocate(running, 0)
    if by != "allocate":
        stored(manager, running)
    if by == "store again":
        assert other.evict(picture) == 1
        stored(manager, running)
    fill(other)
    assert other.contains(picture)
    lease = manager.lease(running, 0)
    assert lease is not None and np.array_equal(lease.tree, output())


def test_a_pin_ends_with_the_last_request_that_needs_it(shared: Daemon, cache: tensord.Client, picture: bytes) -> None:
    manager = EncoderCacheManager(10, cache)
    first, second = request("1", (picture, 4)), request("2", (picture, 4))
    manager.allocate(first, 0)
    stored(manager, first)
    manager.allocate(second, 0)
    shared.until(lambda status: status["pins"] == 1, "one pin for both")
    manager.free(first)
    fill(shared.client())
    assert cache.contains(picture)
    manager.free(second)
    shared.until(lambda status: status["pins"] == 0, "no pin")
    fill(shared.client())
    assert not cache.contains(picture)
    # This engine may still have it, until it wants the room.
    assert manager.has_cache(second, 0)


def test_a_daemon_that_does_not_answer_is_not_waited_for(shared: Daemon, cache: tensord.Client, picture: bytes) -> None:
    other = key(next(_numbers), b"pictures")
    manager, running = EncoderCacheManager(10, cache), request("1", (picture, 4), (other, 4))
    small = np.arange(1024, dtype=np.float32)
    # A place for one more output of this size.
    cache.put(key(next(_numbers), b"before__"), small, wait=True)
    writer = cache.link.puts.writer
    assert writer is not None
    until(lambda: writer.arena.left_bytes > small.nbytes, "the next place")
    shared.pause()
    try:
        manager.allocate(running, 0)
        put, larger = manager.store(running, 0, small), manager.store(running, 1, output())
        assert put is not None and put.state == "sent"
        assert larger is not None and larger.state == "lost", "without a place, after timeout_s"
        assert isinstance(larger.error, TimedOut)
        assert manager.lease(running, 0) is None
        assert manager.get_freed_ids() == []
    finally:
        shared.resume()
    assert put.wait(30).state == "stored"
    manager.get_freed_ids()
    shared.until(lambda status: status["pins"] == 1, "a pin, at the first call after it was stored")


def test_an_invalid_payload_is_an_error_of_the_caller(cache: tensord.Client, picture: bytes) -> None:
    manager, running = EncoderCacheManager(10, cache), request("1", (picture, 4))
    with pytest.raises(UnsupportedLeaf):
        manager.store(running, 0, object())
    assert EncoderCacheManager(10).store(running, 0, output()) is None
