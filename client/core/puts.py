"""Calls that store payloads: put, reserve, and compute once.

Owns: the checks of a put. Does not own: what a put does (writing), nor how a value is computed once (computing).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any, TypeVar

from ...errors import ObjectTooLarge, UsageError
from ...ipc.messages.schema import NUMBER_MAX
from ...shm.payloads.packing import Packed, pack
from ..arguments.checks import check_count, check_iterable, check_key, check_pairs, check_seconds, check_timeout
from ..arguments.put_options import PutOptions
from ..computing.claim import Claim
from ..computing.once import Computation, at_once
from ..writing.outcomes import Put, wait_for_all
from ..writing.put import PutPayload, Reservation
from .entries import EntryCalls

Value = TypeVar("Value")


class PutCalls(EntryCalls):
    """The calls of `Client` that store."""

    def put(
        self,
        key: bytes,
        tree: Any,
        *,
        tokens: int = 0,
        ttl_s: float | None = None,
        cost_ms: float = 0.0,
        agent: str = "",
        parent: bytes | None = None,
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> Put:
        """Stores a payload under `key`. Returns once the payload is copied; `tree` may change from then on.

        Args:
            tree: dict, list, tuple, str, bytes, int, float, bool, None, numpy arrays and torch tensors, nested; up to
                16,384 of them. A list of 64 ints or floats or more counts once, and costs what an array of them costs.
            tokens: encoder tokens that the payload stands for; they count against max_tokens.
            ttl_s: seconds until the entry expires, more than 0. Default: the daemon's setting. Only `touch` renews
                them; lookups and further puts of the key do not. An entry that others were put with as `parent` stays
                as long as it has one of them. Nothing expires while no daemon runs; the next daemon removes what has
                expired by then.
            cost_ms: milliseconds that computing the payload took. Policies that weigh cost keep expensive entries
                longer.
            agent: the agent that the entry belongs to; the policy may weigh it.
            parent: key of the entry that this one continues, for example of the KV block before it. The entry is
                evicted before its parent. If the parent is removed by `evict`, `clear` or `invalidate`, all entries
                after it are removed too, some milliseconds later in a long chain. The parent is any entry of the same
                namespace, stored or put before this one; the put is refused with ParentGone if there is none, and with
                BadPrefix if the parent is of another namespace. A put of a stored key changes neither the entry nor its
                parent.
            wait: return only when every process can read the entry, or the put is refused or lost.
            timeout_s: seconds to wait for room and, with `wait`, for the daemon.

        Returns:
            The put and its state. A refusal or an absent daemon is a state, and raises nothing.

        Raises:
            BadKey: `key` or `parent` is not 32 bytes.
            UnsupportedLeaf: a leaf of `tree` is of another type, or a tensor whose memory was freed (as by FSDP).
            UsageError: `tokens`, `ttl_s`, `cost_ms` or `agent` is out of its range.
            TimedOut: with `wait`, the daemon did not answer in time; the put goes on.
        """
        put = Put(check_key(key))
        limit_s = self.timeout_s if timeout_s is None else check_timeout(timeout_s, 0.0)
        deadline = time.monotonic() + limit_s
        options = PutOptions(tokens, ttl_s, None, cost_ms, agent, 0, parent).checked()
        link = self.link
        if link.view is None:
            self._attach()
        try:
            packed = pack(tree, link.limits.tree_depth_max)
        except ObjectTooLarge as error:
            put.settle("refused", error)
        else:
            link.puts.put(put, packed, options, deadline)
        return put.wait_until(deadline, limit_s) if wait else put

    def put_many(
        self,
        items: Iterable[tuple[bytes, Any]],
        *,
        tokens: int = 0,
        ttl_s: float | None = None,
        cost_ms: float = 0.0,
        agent: str = "",
        parents: Iterable[bytes | None] | None = None,
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> list[Put]:
        """Stores many payloads in one call.

        Args:
            items: pairs of a key and a tree as `put` takes it. All are checked before the first is stored.
            tokens, ttl_s, cost_ms, agent: as for `put`; they apply to each payload.
            parents: for each item its `parent` as for `put`, or None. An item before it in the same call may be one.
            wait: return only when each put is stored, refused or lost.
            timeout_s: seconds to wait for room and, with `wait`, for the daemon; for all puts together.

        Returns:
            The puts, in the order of `items`. Each has its own state: one may be refused while others are stored. Once
            `timeout_s` is over, each put for which there is no room ends as "lost" with TimedOut.

        Raises:
            BadKey, UnsupportedLeaf, UsageError: as for `put`. No payload is stored then, nor if `items` and `parents`
                differ in length.
            TimedOut: with `wait`, the daemon did not answer in time; the puts go on.
        """
        options = PutOptions(tokens, ttl_s, None, cost_ms, agent).checked()
        limit_s = check_timeout(timeout_s, self.timeout_s)
        deadline = time.monotonic() + limit_s
        self._attach()
        depth_max = self.link.limits.tree_depth_max
        puts: list[Put] = []
        packed: list[tuple[Put, Packed, PutOptions]] = []
        pairs = list(check_pairs(items))
        given = repeat(None, len(pairs)) if parents is None else parents
        above = list(check_iterable("parents", given, "keys, or Nones"))
        if len(above) != len(pairs):
            raise UsageError(f"parents has {len(above)} items for {len(pairs)}: give a key or None for each")
        for (key, tree), parent in zip(pairs, above, strict=True):
            puts.append(Put(check_key(key)))
            own = options if parent is None else options._replace(parent=check_key(parent))
            try:
                packed.append((puts[-1], pack(tree, depth_max), own))
            except ObjectTooLarge as error:
                puts[-1].settle("refused", error)
        put = self.link.puts.put
        for each, payload, own in packed:
            put(each, payload, own, deadline)
        if wait:
            wait_for_all(puts, deadline, limit_s)
        return puts

    def reserve(self, spec: Any) -> Reservation:
        """Returns arrays to write a payload into, and to commit as an entry later.

        Args:
            spec: a tree as for `put`, with `tensord.Spec(shape, dtype)` in place of each array to be written.

        Raises:
            UnsupportedLeaf: a leaf of `spec` is of a type that `put` does not take.
            ObjectTooLarge, NotEnoughMemory: there is no room; the message says why.
        """
        self._attach()
        limits = self.link.limits
        return Reservation(spec, limits.tree_depth_max, limits.object_bytes_max, self._commit)

    def _commit(self, key: bytes, payload: PutPayload, options: PutOptions, wait: bool, timeout_s: float | None) -> Put:
        put, options = Put(check_key(key)), options.checked()
        limit_s = check_timeout(timeout_s, self.timeout_s)
        deadline = time.monotonic() + limit_s
        self.link.puts.put(put, payload, options, deadline)
        return put.wait_until(deadline, limit_s) if wait else put

    def get_or_compute(
        self,
        key: bytes,
        compute: Callable[[], Value],
        *,
        tokens: int = 0,
        ttl_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Value:
        """Returns the payload of `key`; if it is missing, one process on the host computes and stores it.

        Other callers of the same key wait for that process, up to `timeout_s`, and then compute the value themselves. A
        daemon that does not answer is waited for 0.25 s at most, and not at all once it is known for that; one that
        stops while `compute` runs, for a second or two, for a place for the value.
        An exception of `compute` is raised in this caller only; the daemon then grants the claim to one of the waiting
        clients, and if that one fails too, all others compute at once. A value that cannot be stored (a tree with too
        many nodes, larger than the ring) is returned all the same: all waiting clients compute at once, and for a
        minute nobody waits for that key. `tally.not_stored` counts such values, and the log has a warning for each
        namespace and reason.

        Args:
            compute: called without arguments, at most once; returns a tree as `put` takes it.
            tokens, ttl_s: as for `put`.
            timeout_s: seconds to wait for another process's result.

        Returns:
            The value of `compute`, or the same tree from shared memory: numpy leaves as read-only views, torch leaves
            as copied tensors.

        Raises:
            BadKey: `key` is not 32 bytes.
            UnsupportedLeaf, UsageError: as for `put`.
        """
        computation = Computation(self, key, compute, tokens, ttl_s, self._deadline(timeout_s))
        value: Value = at_once(computation.run())
        return value

    def claim(self, key: bytes, *, within_s: float = 0.0) -> Claim:
        """Asks for the right to compute `key`, and returns before the daemon answers. `Claim.state` gives the answer.

        Use it to compute in a place that must not wait, or to store through another client. `get_or_compute` waits
        instead. If the daemon is stopped and its socket is full, sending the request may take the client's `timeout_s`.

        Args:
            within_s: estimated seconds until the payload is stored, if this client computes it; 0 if unknown. Clients
                that wait for the key read it as `Claim.expected_at`.
        """
        key = check_key(key)
        within_s = check_seconds("within_s", within_s)
        self._attach()
        return Claim(self.link, key, self.timeout_s, within_s)

    def store(
        self, key: bytes, value: Any, *, tokens: int, ttl_s: float | None, claim: int | None, cost_ms: float = 0.0
    ) -> Put:
        """Puts a computed value under the claim that was granted for its key. For the library.

        A refusal is counted and logged (`tally`).
        """
        key, claim = check_key(key), claim if claim is None else check_count("claim", claim, NUMBER_MAX, 1)
        put = Put(key, self.tally.refused)
        # Room is not waited for beside a daemon that does not answer.
        deadline = self._deadline(None if self.link.silence.patience_s else 0.0)
        options = PutOptions(tokens, ttl_s, claim, cost_ms).checked()
        try:
            packed = pack(value, self.link.limits.tree_depth_max)
        except ObjectTooLarge as error:
            put.settle("refused", error)
        else:
            self.link.puts.put(put, packed, options, deadline)
        return put
