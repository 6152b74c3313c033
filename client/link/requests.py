"""The requests that the caches, the prefix cache, the device cache and the adapters send to the daemon.

Owns: building their messages, so that no other package of `client/` builds one. Does not own: the connection (link.py),
nor the requests of the client's own calls, which calls/, claim.py, puts.py and workflow.py build.
Invariants: a batch of keys never exceeds the daemon's limit for one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Literal

from ...ipc.messages import control as messages
from ...ipc.messages.governance import EntryKind
from .answers import PendingRequest
from .link import SAY_S, Connected, Link

Then = Callable[[Future[Any]], None]


def batches(link: Link, keys: list[bytes]) -> Iterator[list[bytes]]:
    """`keys` in order, in batches that one message may carry."""
    most = link.limits.keys_per_request_max
    for start in range(0, len(keys), most):
        yield keys[start : start + most]


# ---- entries of the ring


def send_evict(link: Link, keys: list[bytes]) -> None:
    """Asks the daemon to evict entries, without waiting for the answer. Puts of these keys that follow come after it.
    Without a daemon nothing happens."""
    for batch in batches(link, keys):
        link.puts.evicts(batch, link.ask(lambda number, batch=batch: messages.Evict(number, batch), SAY_S))  # type: ignore[misc]


def ask_clear(link: Link, tag: bytes | None) -> PendingRequest:
    """Asks the daemon to evict all entries of a namespace, or with None all entries."""
    return link.ask(lambda number: messages.Clear(number, tag), SAY_S)


def ask_fetch(link: Link, keys: list[bytes], timeout_s: float, then: Then | None = None) -> PendingRequest:
    """Asks the daemon to fetch a run of entries from its remote store: their keys in order, at most as many as one
    message may carry. Answered by Counted. Only if `link.remote`."""
    return link.ask(lambda number: messages.FetchRun(number, keys), timeout_s, then=then)


# ---- sequences


def ask_match(
    link: Link,
    connected: Connected,
    tag: bytes,
    offset: int,
    query_bytes: int,
    agent: str,
    timeout_s: float,
) -> PendingRequest:
    """Asks for the longest cached prefix of a query that lies in an inbox. Answered by Matched."""
    return link.ask(
        lambda number: messages.MatchPrefix(number, tag, offset, query_bytes, agent),
        timeout_s,
        connected=connected,
    )


def ask_evict_prefixes(link: Link, tag: bytes, timeout_s: float) -> PendingRequest:
    """Asks the daemon to evict all sequences of a namespace. Answered by Counted."""
    return link.ask(lambda number: messages.EvictPrefixes(number, tag), timeout_s)


def send_agent_turn(link: Link, agent: str, state: Literal["began", "tool_call", "turn_ended", "finished"]) -> None:
    """Tells the daemon when an agent runs, without waiting for the answer."""
    link.ask(lambda number: messages.AgentTurn(number, agent, state), SAY_S)


# ---- entries of a device


def ask_open_device(link: Link, connected: Connected, device: str, then: Then) -> None:
    """Announces that this process keeps entries on a device. Answered by DeviceOpened."""
    link.ask(lambda number: messages.OpenDevice(number, device), SAY_S, connected=connected, then=then)


def send_reading(
    link: Link, connected: Connected | None, device: str, used_bytes: int, total_bytes: int, read_at_s: float
) -> None:
    """Reports how full a device was at `read_at_s` of CLOCK_MONOTONIC.

    Raises:
        DaemonUnavailable, TimedOut: the message did not go.
    """
    reading = messages.ReadDevice(device, used_bytes, total_bytes, read_at_s)
    link.send(reading, timeout_s=SAY_S, connected=connected)


def ask_register(
    link: Link,
    connected: Connected,
    device: str,
    key: bytes,
    *,
    size_bytes: int,
    tokens: int,
    agent: str,
    uses: int,
    cost_ms: float,
    kind: EntryKind,
    new_bytes: int,
    then: Then,
) -> None:
    """Registers an entry of a device."""
    link.ask(
        lambda number: messages.RegisterEntry(
            number, device, key, size_bytes, tokens, agent, uses, cost_ms, kind, new_bytes
        ),
        SAY_S,
        connected=connected,
        then=then,
    )


def ask_release(link: Link, connected: Connected, device: str, keys: list[bytes], then: Then) -> None:
    """Unregisters entries of a device, at most as many as one message may carry."""
    link.ask(lambda number: messages.ReleaseEntries(number, device, keys), SAY_S, connected=connected, then=then)


def send_uses(link: Link, connected: Connected, device: str, keys: list[bytes]) -> None:
    """Reports uses of a device's entries, one for each time that a key stands in `keys`.

    Raises:
        DaemonUnavailable, TimedOut: a message did not go.
    """
    for batch in batches(link, keys):
        link.send(messages.UseEntries(device, batch), timeout_s=SAY_S, connected=connected)


def ask_acknowledge(
    link: Link,
    connected: Connected,
    device: str,
    order: int,
    *,
    offloaded: list[bytes],
    dropped: list[bytes],
    kept: list[bytes],
    freed_bytes: int,
    copy_s: float,
    then: Then,
) -> None:
    """Reports what became of the entries that an order named."""
    link.ask(
        lambda number: messages.AcknowledgeOrder(number, device, order, offloaded, dropped, kept, freed_bytes, copy_s),
        SAY_S,
        connected=connected,
        then=then,
    )
