"""A sequence's blocks: their chain of keys, and putting those that are missing, in order.

Owns: cutting a sequence into blocks, the order of the puts, and their common outcome. Does not own: records, nor how a
key is computed from one (`shm.payloads.prefix`), nor single puts (client/writing).
Invariants: two sequences share a block exactly if they agree in all that its record says (scope, layout, block size,
position, media, tokens, parent's key). At any time the stored part is a valid sequence: blocks from the start on, each
snapshot after its parent block. A failed put ends the rest, since the daemon refuses a block without its parent. If the
parent was evicted meanwhile, the put is repeated from there, while the sequence's arrays are still available.
"""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from ...errors import ObjectTooLarge, ParentGone, TensordError
from ...ipc.messages.schema import COST_MS_MAX, DURATION_S_MAX
from ...shm.index.keys import generation_of
from ...shm.payloads.packing import Packed, pack
from ...shm.payloads.prefix import SCOPE_BYTES, Media, PrefixRecord, Tokens, block_key
from ...shm.ring.layout import NAMESPACE_TAG_BYTES
from ..arguments.checks import check_timeout
from ..arguments.namespace import Namespace
from ..arguments.put_options import PutOptions
from ..writing.outcomes import Put, PutState, wait_for_all
from .layers import Layers

if TYPE_CHECKING:
    from ..core.client import Client
    from ..reading.lease import Lease

REPEATS_MAX: Final = 3


@dataclass(frozen=True, slots=True)
class Keyed:
    """A block or a snapshot: its record, the packed record, and its key."""

    record: PrefixRecord
    packed: np.ndarray[Any, np.dtype[np.uint8]]
    key: bytes

    @classmethod
    def of(cls, tag: bytes, generation: int, record: PrefixRecord, folded: Tokens) -> Keyed:
        """Packs the record and computes the key."""
        packed = record.pack(folded)
        return cls(record, packed, block_key(tag, packed.data, generation))


def scope_of(namespace: Namespace) -> bytes:
    """16 bytes that identify the namespace at its generation. Blocks of two scopes never match."""
    named = b"tensord prefix" + namespace.tag + namespace.generation.to_bytes(16, "little")
    return hashlib.sha256(named).digest()[:SCOPE_BYTES]


def chain_of(
    namespace: Namespace, layout: bytes, exact: bool, folded: Tokens, media: Sequence[Media], block_tokens: int
) -> list[Keyed]:
    """A sequence's blocks; the last one may be shorter. `folded`: the tokens with media folded in, uint32 of shape
    (n,), n ≥ 1. `media`: in the order of their starts."""
    tag, scope, generation = namespace.tag, scope_of(namespace), namespace.generation
    starts = [item.start for item in media]
    chain: list[Keyed] = []
    parent: bytes | None = None
    for start in range(0, len(folded), block_tokens):
        part = folded[start : start + block_tokens]
        begun = tuple(media[bisect_left(starts, start) : bisect_left(starts, start + len(part))]) if starts else ()
        record = PrefixRecord(scope, layout, exact, False, start, len(part), parent, begun, block_tokens)
        keyed = Keyed.of(tag, generation, record, part)
        chain.append(keyed)
        parent = keyed.key
    return chain


def snapshot_of(chain: Sequence[Keyed], position: int) -> Keyed:
    """The snapshot for a position. Its parent is the block in which, or at whose end, the position lies."""
    parent = chain[(position - 1) // chain[0].record.block_tokens]
    before = parent.record
    record = PrefixRecord(
        before.scope, before.layout, before.exact, True, position, 0, parent.key, (), before.block_tokens
    )
    tag, generation = parent.key[:NAMESPACE_TAG_BYTES], generation_of(parent.key)
    return Keyed.of(tag, generation, record, np.empty(0, np.uint32))


class PrefixPut:
    """The put of a sequence. `state` is, as of a `Put`:

    - "sent": in flight. The caller may change the arrays.
    - "stored": every process can read the whole sequence, and this put stored a part of it.
    - "existed": the whole sequence was there already.
    - "refused", "lost": a part is missing; `error` says why. The stored part is a valid shorter sequence.

    `blocks`: blocks of the whole sequence.

    Example:
        >>> prefixes = tensord.PrefixCache(cache, ns, block_tokens=256)
        >>> layers = [tensord.NormalLayer(np.zeros((1, 2, 512, 8)))]
        >>> put = prefixes.put(np.arange(512, dtype=np.uint32), layers).wait()
        >>> put.state, put.blocks
        ('stored', 2)
    """

    __slots__ = ("_ended", "_puts", "_sent", "blocks")

    def __init__(self, blocks: int = 0) -> None:
        self.blocks = blocks
        self._puts: list[Put] = []
        """In order."""
        self._sent: deque[Put] = deque()
        """Puts that may yet fail."""
        self._ended: tuple[PutState, TensordError | None] | None = None

    @property
    def state(self) -> PutState:
        """The state so far. Sends no message."""
        return self._outcome()[0]

    @property
    def error(self) -> TensordError | None:
        """Why the state is "refused" or "lost"; None otherwise."""
        return self._outcome()[1]

    def wait(self, timeout_s: float | None = None) -> Self:
        """Waits until the put leaves the state "sent".

        Raises:
            TimedOut: the daemon did not answer within `timeout_s` seconds; the put goes on.
        """
        limit_s = check_timeout(timeout_s, DURATION_S_MAX)
        return self.wait_until(time.monotonic() + limit_s, limit_s)

    def wait_until(self, deadline: float, limit_s: float) -> Self:
        """As `Put.wait_until`. For the library."""
        wait_for_all(self._puts, deadline, limit_s)
        return self

    def add(self, put: Put) -> None:
        """Adds the put of a block or a snapshot. For the library."""
        self._puts.append(put)
        self._sent.append(put)

    def settle(self, state: PutState, error: TensordError | None = None) -> Self:
        """Sets the outcome, whatever the outcome of the single puts is. For the library."""
        self._ended = state, error
        return self

    def begin(self) -> None:
        """Begins an attempt. Of an earlier one counts what it stored. For the library."""
        self._puts = [put for put in self._puts if put.state == "stored"]
        self._sent.clear()
        self._ended = None

    def has_failed(self) -> bool:
        """Whether a put that was sent is known to have failed. Checks each settled put once. For the library."""
        while self._sent and (state := self._sent[0].state) != "sent":
            if state in ("refused", "lost"):
                return True
            self._sent.popleft()
        return False

    def _outcome(self) -> tuple[PutState, TensordError | None]:
        if self._ended is not None:
            return self._ended
        state: PutState = "existed"
        for put in self._puts:
            # Read once: the link's thread may settle the put meanwhile.
            state_now = put.state
            if state_now in ("refused", "lost"):
                return state_now, put.error
            if state_now == "sent" or (state_now == "stored" and state == "existed"):
                state = state_now
        return state, None

    def __repr__(self) -> str:
        state, error = self._outcome()
        return f"PrefixPut({self.blocks} blocks, {state}{f', {error!r}' if error else ''})"


def store(
    client: Client,
    chain: Sequence[Keyed],
    layers: Layers,
    options: PutOptions,
    deadline: float,
    wait_s: float | None = None,
) -> PrefixPut:
    """Puts the missing part of a sequence, in order. Returns once the arrays are copied; with `wait_s`, which ends at
    `deadline` (monotonic seconds), once the put is settled, or raises TimedOut. Waiting for room ends at `deadline`.

    If a block was evicted meanwhile, so that a child's put failed, the put is repeated from there, up to REPEATS_MAX
    times. If an array has a type that `Client.put` does not take, nothing is sent, and UnsupportedLeaf is raised."""
    result = PrefixPut(len(chain))
    for _ in range(REPEATS_MAX + 1):
        if not client.connected:
            return result.settle("lost", client.link.unavailable())
        existing, lease = _leading(client, chain)
        result.begin()
        try:
            _send(client, chain, existing, layers, options, result, deadline)
        except ObjectTooLarge as error:
            result.settle("refused", error)
        finally:
            # Until here the lease kept the parent blocks. From here on the puts in flight keep them.
            if lease is not None:
                lease.release()
        if wait_s is not None:
            result.wait_until(deadline, wait_s)
        if not isinstance(result.error, ParentGone):
            break
    return result


def _leading(client: Client, chain: Sequence[Keyed]) -> tuple[int, Lease | None]:
    """How many leading blocks exist, and a lease on the last of them, which keeps its parents from being evicted."""
    existing = next((at for at, keyed in enumerate(chain) if not client.contains(keyed.key)), len(chain))
    while existing:
        lease = client.hold(chain[existing - 1].key)
        if lease is not None:
            return existing, lease
        existing -= 1
    return 0, None


def _send(
    client: Client,
    chain: Sequence[Keyed],
    existing: int,
    layers: Layers,
    options: PutOptions,
    result: PrefixPut,
    deadline: float,
) -> None:
    fresh = sum(keyed.record.count for keyed in chain[existing:])
    cost_ms = options.cost_ms / (fresh or layers.tokens)

    def payload_of(keyed: Keyed, parts: list[Any]) -> Packed:
        # The record is the first leaf: the daemon finds it without reading the tree.
        tree = {"prefix": keyed.packed, "axes": layers.axes, "layers": parts}
        return pack(tree, client.link.limits.tree_depth_max)

    def put(keyed: Keyed, payload: Packed, tokens: int) -> bool:
        """Returns False if the rest need not be sent. `tokens`: how many it saves to compute again."""
        cost = min(cost_ms * tokens, COST_MS_MAX)
        own, above = Put(keyed.key), keyed.record.parent
        given = PutOptions(tokens, options.ttl_s, None, cost, options.agent, len(keyed.packed), above)
        client.link.puts.put(own, payload, given, deadline)
        result.add(own)
        return not result.has_failed()

    # Encode the snapshots first, so that nothing is sent if one of them cannot be encoded.
    snapshots: deque[tuple[Keyed, Packed, int]] = deque()
    before = 0
    for position, states in layers.snapshots.items():
        keyed = snapshot_of(chain, position)
        if not client.contains(keyed.key):
            snapshots.append((keyed, payload_of(keyed, states), position - before))
        before = position
    for number, keyed in enumerate(chain):
        start, count = keyed.record.start, keyed.record.count
        if number >= existing and not put(keyed, payload_of(keyed, layers.block(start, start + count)), count):
            return
        while snapshots and snapshots[0][0].record.start <= start + keyed.record.block_tokens:
            if not put(*snapshots.popleft()):
                return
