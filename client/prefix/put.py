"""A sequence on its way into the host tier: which of its pieces are missing, and their puts, in order.

Owns: the order, and what became of all of it together. Does not own single puts (puts.py).

Whatever of it arrives is a sequence: the blocks from the start as far as they came, each snapshot after the block that
it belongs to. What fails ends it, since the daemon takes no block whose predecessor it does not have. Where that was
evicted while the put was on its way, the put is repeated from there, as long as the sequence's arrays are at hand.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from ...errors import ObjectTooLarge, PredecessorGone, TensordError
from ...ipc.schema import COST_MS_MAX
from ...shm.prefix import Media, Piece, Tokens, fold
from ...shm.tree import Payload, encode
from ..core.fields import check_timeout
from ..core.put_options import PutOptions
from ..core.puts import Put, PutState
from .keys import Keyed, chain_of, snapshot_of
from .layers import Layers

if TYPE_CHECKING:
    from ..core.cache import Client
    from ..core.lease import Lease
    from ..core.namespace import Namespace


REPEATS_MAX: Final = 3


@dataclass(frozen=True, slots=True)
class PrefixSequence:
    """A sequence that was checked, and what its owner says of it.

    Args:
        tokens: (n,) uint32, as they were given.
        media: in the order of (start, modality); the last of a modality may end past the sequence's end.
        layers: with the snapshots.
        cost_ms: what computing took, of those tokens that were not there before.
    """

    tokens: Tokens
    media: tuple[Media, ...]
    layers: Layers
    agent: str = ""
    cost_ms: float = 0.0
    ttl_s: float | None = None

    def chain(self, namespace: Namespace, block_tokens: int) -> list[Keyed]:
        """Its blocks, with their keys."""
        folded = fold(self.tokens, self.media)
        return chain_of(namespace, self.layers.digest, self.layers.exact, folded, self.media, block_tokens)


class PrefixPut:
    """What became of a put of a sequence. `state` is as of a `Put`:

    - "sent": on its way; the arrays may be changed.
    - "stored": all of it can be read, and some of it was not there before.
    - "existed": all of it was there.
    - "refused", "lost": not all of it is there, and `error` says why. What there is, is a valid shorter sequence.

    `blocks`: of the whole sequence; `snapshots`: that came with it.

    Example:
        >>> prefixes = tensord.PrefixCache(cache, ns, block_tokens=256)
        >>> layers = [tensord.NormalLayer(np.zeros((1, 2, 512, 8)))]
        >>> put = prefixes.put(np.arange(512, dtype=np.uint32), layers).wait()
        >>> put.state, put.blocks
        ('stored', 2)
    """

    __slots__ = ("_ended", "_own", "_puts", "_repeated", "_settled", "_there", "blocks", "snapshots")

    def __init__(self, blocks: int = 0, snapshots: int = 0) -> None:
        self.blocks = blocks
        self.snapshots = snapshots
        self._there = 0
        self._repeated = 0
        self._own: set[bytes] = set()
        self._puts: list[tuple[bool, Put]] = []
        self._settled = 0
        self._ended: tuple[PutState, TensordError | None] | None = None

    @property
    def state(self) -> PutState:
        """What became of the put by now; costs no message."""
        return self._outcome()[0]

    @property
    def error(self) -> TensordError | None:
        """Why the state is "refused" or "lost"; None otherwise."""
        return self._outcome()[1]

    @property
    def blocks_existed(self) -> int:
        """Blocks that were there before, as far as is known."""
        return self._there + self._counted("existed")

    @property
    def blocks_stored(self) -> int:
        """Blocks that were stored by this put, as far as is known."""
        return self._repeated + self._counted("stored")

    def wait(self, timeout_s: float | None = None) -> Self:
        """Waits until it is known what became of all of it.

        Raises:
            TimedOut: it is not known after `timeout_s`; the put goes on.
        """
        deadline = None if timeout_s is None else time.monotonic() + check_timeout(timeout_s, 0)
        for _, put in self._puts:
            put.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return self

    def add(self, piece: Piece, put: Put) -> None:
        """One more of its pieces was sent. For the library."""
        self._puts.append((not piece.snapshot, put))

    def settle(self, state: PutState, error: TensordError | None = None) -> Self:
        """Says what became of it, whatever became of what was sent. For the library."""
        self._ended = state, error
        return self

    def leads(self, chain: Sequence[Keyed], there: int, before: PrefixPut | None) -> None:
        """So many blocks of the chain are there; those that `before`, which this one repeats, stored are its own. For
        the library."""
        if before is not None:
            self._own = before._own | {put.key for _, put in before._puts if put.state == "stored"}
        self._repeated = sum(keyed.key in self._own for keyed in chain[:there])
        self._there = there - self._repeated

    def has_failed(self) -> bool:
        """Whether one of those that were sent is known to have failed; looks at each once. For the library."""
        while self._settled < len(self._puts):
            state = self._puts[self._settled][1].state
            if state in ("sent", "refused", "lost"):
                return state != "sent"
            self._settled += 1
        return False

    def _outcome(self) -> tuple[PutState, TensordError | None]:
        if self._ended is not None:
            return self._ended
        state: PutState = "stored" if self._repeated else "existed"
        for _, put in self._puts:
            # Read once: the link's thread settles it, with the error first seen last.
            now = put.state
            if now in ("refused", "lost"):
                return now, put.error
            if now == "sent" or (now == "stored" and state == "existed"):
                state = now
        return state, None

    def _counted(self, state: PutState) -> int:
        return sum(is_block and put.state == state for is_block, put in self._puts)

    def __repr__(self) -> str:
        state, error = self._outcome()
        return f"PrefixPut({self.blocks} blocks, {state}{f', {error!r}' if error else ''})"


def store(
    client: Client, sequence: PrefixSequence, chain: Sequence[Keyed], deadline: float, *, wait: bool = False
) -> PrefixPut:
    """Puts what is missing of a sequence, in order. Returns once it is copied out of its arrays; with `wait` once it is
    known what became of it.

    Where it fails until then because a block that was there has been evicted meanwhile, it is put again from there, up
    to REPEATS_MAX times. No more is on its way at once than commits_in_flight_max allows. Waiting for that, and for
    room in the inbox, ends at `deadline` (monotonic seconds).

    Raises:
        UnsupportedLeaf: an array that no payload can hold; nothing was sent.
        TimedOut: with `wait`, the daemon has not answered at `deadline`.
    """
    result = _store(client, sequence, chain, deadline, None)
    for repeat in range(REPEATS_MAX + 1):
        if wait:
            result.wait(max(0.0, deadline - time.monotonic()))
        if repeat == REPEATS_MAX or not isinstance(result.error, PredecessorGone):
            break
        result = _store(client, sequence, chain, deadline, result)
    return result


def _store(
    client: Client, sequence: PrefixSequence, chain: Sequence[Keyed], deadline: float, before: PrefixPut | None
) -> PrefixPut:
    """Puts once what is missing; `before`: the put that this one repeats."""
    link = client.link
    result = PrefixPut(len(chain), len(sequence.layers.snapshots))
    if not link.connected:
        return result.settle("lost", link.unavailable())
    there, lease = _leading(client, chain)
    result.leads(chain, there, before)
    try:
        _send(client, sequence, chain, there, result, deadline)
    finally:
        # Up to here it kept what the new blocks follow; from here on those that are on their way do.
        if lease is not None:
            lease.release()
    return result


def _leading(client: Client, chain: Sequence[Keyed]) -> tuple[int, Lease | None]:
    """How many of the blocks are there, and a lease on the last of those, which keeps all of them."""
    there = 0
    while there < len(chain) and client.contains(chain[there].key):
        there += 1
    while there:
        lease = client.hold(chain[there - 1].key)
        if lease is not None:
            return there, lease
        there -= 1
    return 0, None


def _send(
    client: Client, sequence: PrefixSequence, chain: Sequence[Keyed], there: int, result: PrefixPut, deadline: float
) -> None:
    layers = sequence.layers
    depth_max = client.link.limits.tree_depth_max
    block_tokens = chain[0].piece.block_tokens
    fresh = sum(keyed.piece.count for keyed in chain[there:])
    cost_ms = sequence.cost_ms / (fresh or layers.tokens)

    def payload_of(keyed: Keyed, parts: list[Any]) -> Payload:
        # The record is the first leaf: the daemon finds it without reading the tree.
        return encode({"prefix": keyed.record, "axes": layers.axes, "layers": parts}, depth_max=depth_max)

    def put(keyed: Keyed, payload: Payload, tokens: int) -> bool:
        """False where nothing more needs to be sent. `tokens`: to be computed again without this piece."""
        cost = min(cost_ms * tokens, COST_MS_MAX)
        options = PutOptions(tokens, sequence.ttl_s, None, cost, sequence.agent, len(keyed.record), keyed.piece.parent)
        result.add(keyed.piece, client.link.puts.put(keyed.key, payload, options, deadline=deadline))
        return not result.has_failed()

    try:
        # First, so that nothing is sent if one of them cannot be.
        snapshots: deque[tuple[Keyed, Payload, int]] = deque()
        before = 0
        for position, states in layers.snapshots.items():
            keyed = snapshot_of(chain, position)
            if not client.contains(keyed.key):
                snapshots.append((keyed, payload_of(keyed, states), position - before))
            before = position
        for number, keyed in enumerate(chain):
            piece = keyed.piece
            stop = piece.start + piece.count
            if number >= there and not put(keyed, payload_of(keyed, layers.block(piece.start, stop)), piece.count):
                return
            while snapshots and snapshots[0][0].piece.start <= (number + 1) * block_tokens:
                if not put(*snapshots.popleft()):
                    return
    except ObjectTooLarge as error:
        result.settle("refused", error)
