"""A fair queue: uids take turns, and so do the clients of each uid.

A client with many waiting items delays each other client by one item a turn. Used for requests that wait for room, by
the actors' inboxes and by the copier.

Owns the order. Does not own the items' meaning.

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
        self._length += 1

    def push_first(self, uid: int, client: int, item: Item) -> None:
        """Adds an item before the client's other items."""
        self._items(uid, client).appendleft(item)
        self._length += 1

    def head(self) -> Item | None:
        """The next item to leave."""
        for clients in self._uids.values():
            for items in clients.values():
                return items[0]
        return None

    def take(self) -> Item:
        """Removes the head. Its client and its uid are queued after all others.

        Raises:
            IndexError: the queue is empty.
        """
        if not self._length:
            raise IndexError("nothing waits")
        uid, clients = next(iter(self._uids.items()))
        client, items = next(iter(clients.items()))
        item = items.popleft()
        self._length -= 1
        if items:
            clients.move_to_end(client)
        else:
            del clients[client]
        if clients:
            self._uids.move_to_end(uid)
        else:
            del self._uids[uid]
        return item

    def remove(self, uid: int, client: int, item: Item) -> bool:
        """Removes one item of the client. The order of turns does not change.

        Returns:
            Whether the item was queued.
        """
        clients = self._uids.get(uid)
        items = clients.get(client) if clients is not None else None
        if items is None or item not in items:
            return False
        items.remove(item)
        self._length -= 1
        if not items:
            self._drop(uid, client)
        return True

    def waiting(self, uid: int, client: int) -> int:
        """The number of the client's items."""
        clients = self._uids.get(uid)
        return len(clients.get(client, ())) if clients is not None else 0

    def firsts(self, uid: int) -> list[Item]:
        """The first item of each client of the uid, in the order of their turns."""
        clients = self._uids.get(uid)
        return [items[0] for items in clients.values()] if clients is not None else []

    def __iter__(self) -> Iterator[Item]:
        """Every item, client by client."""
        for clients in self._uids.values():
            for items in clients.values():
                yield from items

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises of its tables."""
        assert self._length == sum(1 for _ in self)
        assert all(clients and all(clients.values()) for clients in self._uids.values())

    def _items(self, uid: int, client: int) -> deque[Item]:
        clients = self._uids.get(uid)
        if clients is None:
            clients = self._uids[uid] = OrderedDict()
        items = clients.get(client)
        if items is None:
            items = clients[client] = deque()
        return items

    def _drop(self, uid: int, client: int) -> None:
        clients = self._uids[uid]
        del clients[client]
        if not clients:
            del self._uids[uid]
