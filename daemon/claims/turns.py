"""A fair queue: uids take turns, and so do the clients of each uid.

A client with many waiting items delays each other client by one item a turn. Used for requests that wait for room, by
the actors' inboxes and by the copier.

Invariants: the items of one client leave in order of arrival. The head stays the head until it leaves. No empty queue
is kept.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Turns(Generic[Item]):
    """Items by uid and client. Every operation except `remove` and iteration is O(1)."""

    def __init__(self) -> None:
        self._uids: OrderedDict[int, OrderedDict[int, deque[Item]]] = OrderedDict()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, uid: int, client: int, item: Item) -> None:
        """Adds the client's last item. A client or uid without items is queued after all others."""
        self._items(uid, client).append(item)

    def push_first(self, uid: int, client: int, item: Item) -> None:
        self._items(uid, client).appendleft(item)

    def head(self) -> Item | None:
        return next(iter(self), None)

    def take(self) -> Item:
        """Removes the head, which there must be. Its client and its uid are queued after all others."""
        self._length -= 1
        uid, clients = self._uids.popitem(last=False)
        client, items = clients.popitem(last=False)
        item = items.popleft()
        if items:
            clients[client] = items
        if clients:
            self._uids[uid] = clients
        return item

    def remove(self, uid: int, client: int, item: Item) -> bool:
        """Removes one item of the client, if it is queued. Returns whether it was. The order of turns does not
        change."""
        clients = self._uids.get(uid, OrderedDict())
        items = clients.get(client, ())
        if item not in items:
            return False
        clients[client].remove(item)
        self._length -= 1
        if not items:
            del clients[client]
        if not clients:
            del self._uids[uid]
        return True

    def waiting(self, uid: int, client: int) -> int:
        return len(self._uids.get(uid, OrderedDict()).get(client, ()))

    def __iter__(self) -> Iterator[Item]:
        for clients in self._uids.values():
            for items in clients.values():
                yield from items

    def _items(self, uid: int, client: int) -> deque[Item]:
        """The client's items, to which one is added."""
        self._length += 1
        return self._uids.setdefault(uid, OrderedDict()).setdefault(client, deque())
