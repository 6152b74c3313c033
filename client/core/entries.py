"""Calls that keep, renew and remove entries, and that raise the generation of a namespace.

Owns: the requests that these calls send. Does not own: what the daemon does with them.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...ipc.messages import control as messages
from ..arguments.checks import check_key, check_seconds
from ..arguments.namespace import Namespace, check_namespace
from .base import ClientBase


class EntryCalls(ClientBase):
    """The calls of `Client` that change which entries there are."""

    def touch(self, *keys: bytes) -> int:
        """Renews the recency of entries, and the time to live that each was put with.

        Returns:
            How many of the entries are there.

        Raises:
            BadKey: a key is not 32 bytes.
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        return self._counted(lambda number: messages.Touch(number, _checked(keys)))

    def evict(self, *keys: bytes) -> int:
        """Removes entries. Leases on them stay valid.

        Returns:
            How many of the entries were there.

        Raises:
            BadKey: a key is not 32 bytes.
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        return self._counted(lambda number: messages.Evict(number, _checked(keys)))

    def clear(self, namespace: Namespace | None = None) -> int:
        """Removes all entries of a namespace; without a namespace, all entries of the ring.

        Returns:
            How many entries there were.

        Raises:
            BadNamespace: `namespace` is no Namespace.
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        tag = check_namespace(namespace).tag if namespace is not None else None
        return self._counted(lambda number: messages.Clear(number, tag))

    def current(self, namespace: Namespace) -> Namespace:
        """Returns the namespace at its current generation. Sends no message.

        Call it before you load the weights. A process that loads the weights first may read a generation that was
        raised meanwhile, and would store results of the old weights as results of the new ones.

        Returns:
            The namespace at the generation to which `invalidate` last raised it, in any process. The namespace as given
            if its own generation is not lower, if it was never invalidated, or without a daemon so far. Under a past
            generation every lookup misses and every put is refused, so a stale generation shares no wrong results.

        Raises:
            BadNamespace: `namespace` is no Namespace.
        """
        check_namespace(namespace)
        view = self._link.view or self._attach()
        known = view.current(namespace.tag) if view is not None else 0
        return namespace.raised_to(max(namespace.generation, known))

    def invalidate(self, namespace: Namespace) -> Namespace:
        """Drops a namespace's entries because its weights have changed. Call it once the new weights are in place.

        A process that reads the generation afterwards (`current`) is assumed to load the new weights. The daemon
        refuses puts and claims under the old generation from now on, also from processes that have not seen the new
        one, and also after a restart.

        Returns:
            The namespace at its new generation. A second call with the same old generation returns the same new one.

        Raises:
            BadNamespace: `namespace` is no Namespace.
            LimitReached: too many namespaces were invalidated, or the namespace is at its last generation.
            DaemonUnavailable, TimedOut: the daemon did not answer. It may have done it; a second call does no harm.
        """
        check_namespace(namespace)
        answer = self._ask(lambda number: messages.Invalidate(number, namespace.tag, namespace.generation))
        return namespace.raised_to(answer.generation)

    def pin(self, key: bytes, for_s: float) -> float:
        """Keeps an entry from being evicted for at most `for_s` seconds, without a lease.

        Returns:
            The seconds that the daemon granted, at most its own limit; 0 on a miss.

        Raises:
            BadKey: `key` is not 32 bytes.
            UsageError: `for_s` is out of its range.
            LimitReached: the client has too many pins, or too much of the ring is pinned.
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        key = check_key(key)
        for_s = check_seconds("for_s", for_s, above_0=True)
        lasts_s: float = self._ask(lambda number: messages.Pin(number, key, for_s)).lasts_s
        return lasts_s

    def unpin(self, key: bytes) -> None:
        """Ends a pin before its time.

        Raises:
            BadKey: `key` is not 32 bytes.
            DaemonUnavailable, TimedOut: the daemon did not answer.
        """
        key = check_key(key)
        self._ask(lambda number: messages.Unpin(number, key))


def _checked(keys: Iterable[bytes]) -> list[bytes]:
    return [check_key(key) for key in keys]
