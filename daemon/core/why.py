"""Why an entry stays or went: all that is known of one key. Reads, and changes nothing.

A question costs the same however many entries there are: COMPARED of them are compared with the one that is asked for,
and ORDER_MAX of the coldest are looked at.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import asdict

from ..policy.explained import Explained
from . import report
from .entries import SpanEntry
from .removal_history import RemovalRecord

if TYPE_CHECKING:
    from .store import Store

COMPARED: Final = 128
"""Entries that one is compared with: the share that is colder is then right to 4 points, mostly."""
ORDER_MAX: Final = 32
"""Of the entries that go first, so many are looked at."""
BEFORE_MAX: Final = 4
"""Keys that are values of those that would go before an entry."""


def why(store: Store, key: bytes, now: float) -> dict[str, Any]:
    """What is known of a key. `state`: "stored"; "leaving", as long as it is looked whether a reader holds it; "gone";
    or "unknown".

    `entry` and `standing`: of what is stored. `gone`: of the key's last entry that went, as far as it is among the last
    `records`, of `records_max` at most; `remembered`: what the policy knows of the key though it is not stored. Each
    is None where there is nothing to say.
    """
    entries, history = store.memory.entries, store.removal_history
    entry = entries.find(key)
    leaving = entries.hidden(key)
    last, memory = history.find(key), store.memory.policy.recall(key)
    state = "stored" if entry else "leaving" if leaving else "gone" if last or memory else "unknown"
    return {
        "key": key.hex(),
        "state": state,
        "reason": leaving.reason if leaving is not None else "",
        "policy": store.memory.policy.name,
        "entry": None if entry is None else report.entry(store, entry),
        "standing": None if entry is None else _eviction_rank(store, entry, now),
        "gone": None if last is None else _gone(store, last, now),
        "remembered": None if memory is None else _remembered(memory),
        "records": len(history),
        "records_max": history.most,
    }


def _eviction_rank(store: Store, entry: SpanEntry, now: float) -> dict[str, Any]:
    """How a stored entry stands among the others.

    `compared`: with so many others that nobody holds; `colder`: how many of these would go before it. `place`: 1 for
    the entry that would go next, None where it is not among the first ORDER_MAX; `before`: some keys that would go
    before it, the first ones first. `held`: "pin" by a message, "lease" of a reader by what is known, or None.
    """
    policy = store.memory.policy
    rank = policy.rank(entry.number)
    others = [
        other
        for other in store.memory.entries.sample(entry.key, COMPARED + 1)
        if other is not entry and _held(store, other) is None
    ]
    before, place = _goes_before(store, entry)
    return {
        **_explained(policy.explain(entry.number)),
        "age_s": max(0.0, now - entry.created_at),
        "idle_s": max(0.0, now - entry.used_at),
        "compared": len(others),
        "colder": sum(policy.rank(other.number) < rank for other in others),
        "place": place,
        "before": before,
        "children": entry.child_count,
        "held": _held(store, entry),
    }


def _goes_before(store: Store, entry: SpanEntry) -> tuple[list[str], int | None]:
    """Some keys of those that would go before the entry; and its place in that order."""
    keys: list[str] = []
    place = 1
    for other in islice(store.memory.order.coldest(), ORDER_MAX):
        if other is entry:
            return keys, place
        if _held(store, other) is None:
            place += 1
            if len(keys) < BEFORE_MAX:
                keys.append(other.key.hex())
    return keys, None


def _held(store: Store, entry: SpanEntry) -> str | None:
    if store.pins.holds(entry.span_id):
        return "pin"
    return "lease" if entry.span_id in store.memory.last_pinned else None


def _explained(values: Explained) -> dict[str, Any]:
    return {**asdict(values), "like": list(values.like)}


def _remembered(values: Explained) -> dict[str, Any]:
    """Without a worth: what the entry cost and took may be another when it is put again."""
    return {"uses": values.uses, "like": list(values.like), "comes_back": values.comes_back}


def _gone(store: Store, gone: RemovalRecord, now: float) -> dict[str, Any]:
    values = asdict(gone)
    del values["key"], values["at"]
    return {**values, "gone_unix_s": store.unix_at_zero_s + gone.at, "gone_s": max(0.0, now - gone.at)}
