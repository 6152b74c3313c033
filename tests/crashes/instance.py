"""A daemon, clients that load it, and the model that says which entries are possible after each crash.

Owns: the daemon, its clients, puts in flight, the views that are held across crashes, and the model. Does not own: the
time of a crash (daemon_rounds.py).
"""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Self
from unittest import mock

import numpy as np

import tensord
from tensord.client.link import link
from tensord.errors import TensordError, Unavailable
from tensord.ipc.messages import control as messages
from tensord.testing.fake_vram import FakeCard, FakeVram

from ..daemon_process import MIB, PATIENCE_S, Daemon
from ..faults.raw import RawClient
from .model import NUMBERS, Held, Model, Name, array_of, fault_of_index, namespace, reserved_by, tree_of, version_of

PLACE_BYTES: Final = 48 << 10
RING_BYTES: Final = 16 * MIB
SMALLER_RING_BYTES: Final = 12 * MIB
SMALL_RING_BYTES: Final = 3 * MIB // 2
TTL_S: Final = 3600.0
KEPT_MIN: Final = 4
"""The newest entries that the small ring must keep, at any limit."""
_HELD_MAX, _HELD_SMALL_MAX = 6, 2
_ON_THEIR_WAY_MAX: Final = 6
_ON_THEIR_WAY_BYTES_MAX: Final = 98 << 10
_SEQUENCES: Final = 4
_CARD_BYTES: Final = 1 << 20
_DEVICE_ENTRIES: Final = 8
_LOOKS: Final = 200
_BLOCK_TOKENS: Final = 16
_STEP_S: Final = 0.001


class Ended(Exception):
    """The daemon ended during the load."""


class Instance:
    """A context manager; its client lives in the block, and no daemon runs at first.

    `small`: the ring is too small for the puts, and all entries have one size.
    """

    def __init__(self, *, small: bool = False) -> None:
        self.small = small
        self.daemon = Daemon(
            ring_bytes=SMALL_RING_BYTES if small else RING_BYTES,
            policy="lru",
            limits_claim_s=30,
            gauges_device="file",
            gauges_host="none",
            gauges_sample_s="20ms",
            gauges_sample_pressed_s="20ms",
            pressure_critical_idle_s="10ms",
            pressure_retry_s="50ms",
        )
        self.model = Model(lossy=small)
        self.held = Held()
        self._puts: list[tuple[Name, int, tensord.Put]] = []
        self._others: list[tensord.Client] = []
        self._sequences: set[int] = set()
        self._raising: int | None = None
        self._numbers = 0
        self._largest_bytes = RING_BYTES
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(link, "_RETRY_MOST_S", 0.02))
            stack.enter_context(self.daemon)
            folder = self.daemon.folder / "card"
            folder.mkdir()
            self._card = stack.enter_context(FakeCard(folder, "card0", _CARD_BYTES))
            self.daemon.flags["gauges_file"] = self._card.gauge_file
            self.daemon.start()
            self.client = self.daemon.client(timeout_s=PATIENCE_S)
            self.daemon.kill()
            self._cache = tensord.PrefixCache(self.client, namespace(15, 0), block_tokens=_BLOCK_TOKENS)
            self._vram = FakeVram(self._card)
            self._tensors = stack.enter_context(tensord.DeviceCache(self.client, self._vram))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.held.clear()
        for other in self._others:
            other.close()
        self._stack.close()

    # ---- the load: each call draws from `chance`, and raises Ended if the daemon has ended

    def put(self, chance: random.Random) -> None:
        """A put. Several are in flight, at most one of each name."""
        if self.small:
            self._numbers += 1
            name = Name(0, 0, 10 * self._numbers + 8)
        else:
            name = self._some(chance)
        version = self.model.new_version()
        tree = tree_of(name, version)
        self._make_way(_bytes_of(name, tree))
        ttl_s = chance.choice((None, TTL_S))
        put = self.client.put(name.key, tree, ttl_s=ttl_s, timeout_s=PATIENCE_S)
        self._puts.append((name, version, put))

    def reserve(self, chance: random.Random) -> None:
        """A payload that is produced in a reservation."""
        name = self._some(chance)
        version = self.model.new_version()
        tree = tree_of(name, version)
        size_bytes = _bytes_of(name, tree)
        if size_bytes > _ON_THEIR_WAY_BYTES_MAX:
            return
        self._make_way(size_bytes)
        try:
            reserved = reserved_by(self.client, name, tree)
        except Unavailable:
            self._expect_daemon()
            return
        self._puts.append((name, version, reserved.commit(name.key)))

    def compute(self, chance: random.Random) -> None:
        """A claim, the put under it, and its end."""
        self.settle()
        name, version = self._some(chance), self.model.new_version()
        found = version_of(name, self.client.get_or_compute(name.key, lambda: tree_of(name, version)))
        if found == version:
            # The entry is probably stored; no answer says so.
            self.model.put(name, version, "unknown")
        else:
            assert found in self.model.of(name), f"wrong: {name} is {found}, may be {self.model.of(name)}"
        self._expect_daemon()

    def hold(self, chance: random.Random) -> None:
        """A view that is kept across crashes."""
        names = [*self.model.possible]
        if names:
            self._hold(self.client, chance.choice(names[-2 * NUMBERS :]))
        while len(self.held) > (_HELD_SMALL_MAX if self.small else _HELD_MAX):
            self.held.pop(chance.randrange(len(self.held)))
        self._expect_daemon()

    def evict(self, chance: random.Random) -> None:
        self.settle()
        names = [self._some(chance) for _ in range(chance.choice([1, 6]))]
        with self._answered(names):
            self.client.evict(*(name.key for name in names))

    def touch(self, chance: random.Random) -> None:
        """Renews times to live, and ends no entry."""
        names = chance.sample([*self.model.possible], min(6, len(self.model.possible)))
        with self._answered():
            self.client.touch(*(name.key for name in names))

    def resize(self, chance: random.Random) -> None:
        """Gives the next daemon a larger ring than all before, or a smaller one."""
        self._largest_bytes += MIB
        self.daemon.flags["ring_bytes"] = chance.choice((self._largest_bytes, self._largest_bytes, SMALLER_RING_BYTES))

    def clear(self, chance: random.Random) -> None:
        self.settle()
        family = chance.randrange(len(self.model.generations))
        with self._answered(self.model.family(family)):
            self.client.clear(namespace(family, 0))

    def invalidate(self, chance: random.Random) -> None:
        """Invalidates a namespace. Without an answer, the call is repeated when the daemon is back."""
        self.settle()
        self._raising = chance.randrange(len(self.model.generations))
        with self._answered(self.model.family(self._raising)):
            self._raise_generation()

    def attach(self, chance: random.Random) -> None:
        """Another client attaches, reads, and leaves or stays."""
        other = tensord.Client(self.daemon.socket, timeout_s=1.0)
        self._others.append(other)
        for name in chance.sample([*self.model.possible], min(3, len(self.model.possible))):
            self._hold(other, name)
        while len(self._others) > 2:
            self._others.pop(chance.randrange(3)).close()
        self._expect_daemon()

    def ask_and_leave(self, chance: random.Random) -> None:
        """Another client is lent places, and disconnects."""
        with contextlib.suppress(TensordError), RawClient(self.daemon.socket) as other:
            other.ask(lambda number: messages.AskForGrants(number, [PLACE_BYTES, PLACE_BYTES // 64 * 32]))
        self._expect_daemon()

    def sequence(self, chance: random.Random) -> None:
        number = chance.randrange(_SEQUENCES)
        self._make_way(_ON_THEIR_WAY_BYTES_MAX)
        put = self._cache.put(_tokens(number), [_layer(number)])
        self._await(lambda: put.state != "sent", f"the answer to {put}")
        if put.state in ("stored", "existed"):
            self._sequences.add(number)

    def limit(self, chance: random.Random) -> None:
        """Returns pages of the ring to the system, or takes them again."""
        self.settle()
        limit_bytes = chance.choice([SMALL_RING_BYTES * 5 // 8, SMALL_RING_BYTES])
        with self._answered():
            self.client._ask(lambda number: messages.Limit(number, limit_bytes))

    def device(self, chance: random.Random) -> None:
        """An entry on the stand-in card: cached, offloaded into the ring, or evicted and put again."""
        number = chance.randrange(_DEVICE_ENTRIES)
        key = namespace(14, 0).key("crash", "bytes", number.to_bytes(4, "little"))
        values = np.arange(1024, dtype=np.float32) + np.float32(2048 * number)
        found = self._tensors.get(key)
        if found is None:
            self._tensors.put(key, {"a": self._vram.upload(values)})
        else:
            with found as lease:
                leaf = lease.tree["a"]
                held = leaf if isinstance(leaf, np.ndarray) else leaf.numpy()
                assert np.array_equal(held, values), f"wrong: device entry {number}"
        self._expect_daemon()

    def fill_card(self, chance: random.Random) -> None:
        """Makes the governor offload entries; does not wait if it offloads none."""
        count = len(self._tensors)
        self._card.occupy(int(0.9 * _CARD_BYTES))
        looks = iter(range(_LOOKS))
        self._await(lambda: len(self._tensors) < count or next(looks, None) is None, "an offload")
        self._card.occupy(0)

    def settle(self) -> None:
        """Waits for the answers to all puts in flight."""
        while self._puts:
            name, version, put = self._puts[0]
            self._await(lambda put=put: put.state != "sent", f"the answer to {put}")  # type: ignore[misc]
            self.model.put(name, version, put.state)
            self._puts.pop(0)
        self._await(lambda: not self.client.link.puts.waiting, "answers to the puts of computed values")

    # ---- after a crash

    def check(self) -> None:
        """Checks a daemon that serves again against the model. Raises AssertionError: "lost", "torn", "wrong" or
        "leaked", with the subject; or Ended."""
        self._await(self._is_connected, "the new connection of the client")
        for name, version, _ in self._puts:
            self.model.put(name, version, "unknown")
        self.settle()
        if self._raising is not None:
            with self._answered(self.model.family(self._raising)):
                self._raise_generation()
        self.model.check(self.client, self._is_connected, KEPT_MIN)
        for name in self.model.possible:
            info = self.client.peek(name.key)
            if info is not None and info.expires_unix_s:
                # No nearer than the load may have taken, nor further than its time to live.
                left_s = info.expires_unix_s - time.time()
                assert 0 < left_s <= TTL_S + 1, f"wrong: {name} expires in {left_s} s; its limit is {TTL_S} s"
        self.held.check()
        for number in self._sequences:
            self._await(lambda number=number: self._matched(number), f"lost: sequence {number}")  # type: ignore[misc]
        self._expect_daemon()
        with contextlib.suppress(TensordError):
            store = self.daemon.status()["store"]
            assert not store["found_corrupt"], f"torn: found_corrupt is {store['found_corrupt']}"
        # A traceback of an error of the load may hold a frame, and the frame a view.
        gc.collect()
        self._await(lambda: not self._fault_of_index(), "all scans", lambda: f"leaked: {self._fault_of_index()}")

    def finish(self) -> None:
        self.held.clear()
        self._tensors.close()
        while self._others:
            self._others.pop().close()
        # An error's traceback may hold a frame, and the frame a view.
        gc.collect()
        self.client.clear()
        nothing = {"pins": 0, "used_bytes": 0, "claims_held": 0, "clients": 1, "lanes": 1}
        self._await(lambda: self._taken() == nothing, "the release of all memory", lambda: f"leaked: {self._taken()}")
        assert len(self.daemon.lanes()) == 1

    def forget(self) -> None:
        """The memory was dropped, or may have been: the model accepts whatever is cached."""
        self.model.ended([*self.model.possible], surely=False)
        self.model.kept.clear()
        self._sequences.clear()

    # ---- inside

    def _is_connected(self) -> bool:
        """True if the current daemon has answered: the connection to the last one may still look open."""
        try:
            self.client.touch(bytes(32))
        except TensordError:
            return False
        return True

    def _raise_generation(self) -> None:
        assert self._raising is not None
        was = self.model.generations[self._raising]
        now = self.client.invalidate(namespace(self._raising, was)).generation
        assert now == was + 1, f"wrong: generation {was} was raised to {now}"
        self.model.generations[self._raising] = now
        self._raising = None

    @contextlib.contextmanager
    def _answered(self, ended: list[Name] | None = None) -> Iterator[None]:
        """A call that ends entries. If the daemon ends before its answer, the entries may be ended or not."""
        try:
            yield
        except TensordError:
            self.model.ended(ended or [], surely=False)
            self._await(lambda: False, "the end of the daemon after a failed call")
        self.model.ended(ended or [], surely=True)

    def _make_way(self, size_bytes: int) -> None:
        """Waits until few puts are on their way. Raises Ended if the daemon has ended, which frees none."""
        self._expect_daemon()
        on_their_way = sum(_bytes_of(name, tree_of(name, version)) for name, version, _ in self._puts)
        if len(self._puts) >= _ON_THEIR_WAY_MAX or on_their_way + size_bytes > _ON_THEIR_WAY_BYTES_MAX:
            self.settle()

    def _taken(self) -> dict[str, int]:
        """What is taken besides the grants that clients have not used."""
        status = self.daemon.status()
        store = status["store"]
        counts = {name: status[name] for name in ("pins", "clients", "lanes")}
        used_bytes = store["used_bytes"] - store["lent_bytes"]
        return {**counts, "used_bytes": used_bytes, "claims_held": store["claims_held"]}

    def _await(self, condition: Callable[[], bool], what: str, seen: Callable[[], str] = str) -> None:
        """Waits until `condition` holds. Raises Ended if the daemon has ended, and AssertionError after PATIENCE_S."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come within {PATIENCE_S} s; {seen()}"
            self._expect_daemon()
            time.sleep(_STEP_S)

    def _expect_daemon(self) -> None:
        if not self.daemon.running:
            raise Ended

    def _some(self, chance: random.Random) -> Name:
        busy = {name for name, _, _ in self._puts}
        while True:
            name = self.model.name(chance.randrange(len(self.model.generations)), chance.randrange(NUMBERS))
            if name not in busy:
                return name

    def _hold(self, client: tensord.Client, name: Name) -> None:
        # In the small ring a use would change the order of eviction.
        lease = client.hold(name.key) if self.small else client.get(name.key)
        if lease is not None:
            self.held.keep(name, lease)

    def _matched(self, number: int) -> bool:
        match = self._cache.match(_tokens(number), timeout_s=PATIENCE_S)
        if match is None:
            return False
        with match:
            found = match.joined(0)
            assert np.array_equal(found, _layer(number).tree[:, : match.offset]), f"wrong: sequence {number}"
            return match.offset == len(_tokens(number)) - 1

    def _fault_of_index(self) -> str:
        return fault_of_index(self.daemon.instance, {name.key for name, _, _ in self.held})


def _bytes_of(name: Name, tree: Any) -> int:
    return array_of(name, tree).nbytes + 512


def _tokens(number: int) -> Any:
    return np.arange(3 * _BLOCK_TOKENS + 5, dtype=np.uint32) + np.uint32(1000 * (number // 2 + 1) + number)


def _layer(number: int) -> tensord.NormalLayer:
    return tensord.NormalLayer(np.cumsum(_tokens(number), dtype=np.uint64).reshape(1, -1, 1).repeat(4, axis=2))
