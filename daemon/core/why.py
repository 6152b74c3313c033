"""Explains why an entry stays in the ring or left it: all that is known of one key.

Owns the answer's form. Does not own entries, records or the policy's memory. Invariants: nothing is changed. The cost
of an answer does not depend on the number of entries: COMPARED entries are compared with the asked one, and ORDER_MAX
of the coldest are examined.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import asdict

from ...errors import StoreFull
from ..policy.explained import Explained
from ..reports.removal_history import RemovalRecord
from . import report
from .entries import SpanEntry

if TYPE_CHECKING:
    from .store import Store

COMPARED: Final = 128
"""Entries that one entry is compared with. The share of colder ones is then mostly right to 4 points."""
ORDER_MAX: Final = 32
"""Entries at the cold end that are examined."""
BEFORE_MAX: Final = 4
"""Keys listed of the entries that would be evicted before the asked one."""


def why(store: Store, key: bytes, now: float, leased: bool | None = None) -> dict[str, Any]:
    """All that is known of a key. `leased`: whether a lane pins its entry now; None: unknown.

    `state`: "stored"; "leaving" while a scan checks whether a reader pins it; "gone"; or "unknown". `reason`: why a
    leaving entry is evicted, empty in the other states. `entry` and `standing` describe a stored entry. `gone`
    describes the key's latest removal, if it is among the last `records`, of which `records_max` are kept.
    `remembered`: what the policy remembers of the key without storing it. The last four are None if there is nothing to
    report. `refused_puts`: puts refused for lack of room; the policy may remember their keys, though none was stored.
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
        "standing": None if entry is None else _eviction_rank(store, entry, now, leased),
        "gone": None if last is None else _gone(store, last, now),
        "remembered": None if memory is None else _remembered(memory),
        "records": len(history),
        "records_max": history.most,
        "refused_puts": store.counters.refusals[StoreFull.__name__],
    }


def _eviction_rank(store: Store, entry: SpanEntry, now: float, leased: bool | None) -> dict[str, Any]:
    """The rank of a stored entry in the order of eviction.

    `compared`: the number of other entries not in use that it was compared with; `colder`: how many of these would be
    evicted before it. `place`: 1 for the entry that would be evicted next, None if it is held or not among the first
    ORDER_MAX; `before`: some keys that would be evicted before it, the first ones first. `held`: "pin" for a pin by
    message, "lease" for a pin of a lane, or None. The pins of lanes on other entries are those of the last scan.
    """
    policy = store.memory.policy
    rank = policy.rank(entry.number)
    others = [
        other
        for other in store.memory.entries.sample(entry.key, COMPARED + 1)
        if other is not entry and _held(store, other) is None
    ]
    before, place = _goes_before(store, entry)
    held = _held(store, entry, leased)
    return {
        **_explained(policy.explain(entry.number)),
        "age_s": max(0.0, now - entry.created_at),
        "idle_s": max(0.0, now - entry.used_at),
        "compared": len(others),
        "colder": sum(policy.rank(other.number) < rank for other in others),
        "place": None if held else place,
        "before": before,
        "children": entry.child_count,
        "held": held,
    }


def _goes_before(store: Store, entry: SpanEntry) -> tuple[list[str], int | None]:
    """Some keys that would be evicted before the entry, and the entry's place in that order."""
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


def _held(store: Store, entry: SpanEntry, leased: bool | None = None) -> str | None:
    if store.pins.holds(entry.span_id):
        return "pin"
    if leased is None:
        leased = entry.span_id in store.memory.last_pinned
    return "lease" if leased else None


def _explained(values: Explained) -> dict[str, Any]:
    return {**asdict(values), "like": list(values.like)}


def _remembered(values: Explained) -> dict[str, Any]:
    """Without a worth: the cost and the size may differ when the key is put again."""
    return {"uses": values.uses, "like": list(values.like), "comes_back": values.comes_back}


def _gone(store: Store, gone: RemovalRecord, now: float) -> dict[str, Any]:
    values = asdict(gone)
    del values["key"], values["at"]
    return {**values, "gone_unix_s": store.unix_at_zero_s + gone.at, "gone_s": max(0.0, now - gone.at)}
