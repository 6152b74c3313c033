"""`why`: why an entry is kept, or why it was removed.

Owns: the conversion of the daemon's answer to text. Does not own: the answer. Pure, except for the command.
"""

from __future__ import annotations

import json
from typing import Any, Final

import click

from .daemon import Daemon, pass_daemon, understood
from .parameters import KEY, stored_or_gone
from .tables import age, counted, number, pairs, share

_WORTHS: Final = {
    "lru": ", the number of its last use among all uses of the store",
    "lfu": ", its uses plus the age of the ring",
    "sieve": ", the lap in which the hand evicts it",
}
"""The meaning of the worth that is not clear from the other rows, by policy."""
_WHOLE_BELOW: Final = 1e15
_REASONS: Final = {
    "capacity": "evicted to make room for other entries",
    "entries": "evicted for other entries: max_entries was reached",
    "tokens": "evicted for other entries: max_tokens was reached",
    "pressure": "the host was short of memory, and the ring returned some memory",
    "emergency": "the host was nearly out of memory, and the entry was unused for pressure.critical_idle_s",
    "ttl": "its time to live had ended",
    "explicit": "a client evicted it, or its parent in a sequence",
    "cleared": "its namespace, or everything, was cleared",
    "invalidated": "its namespace was invalidated",
    "corrupt": "its bytes did not match their checksum",
}


def why_text(answer: dict[str, Any]) -> str:
    """The daemon's answer as text, within 100 columns."""
    with understood("answer"):
        rows: list[tuple[str, str]] = [("key", answer["key"])]
        if answer["standing"]:
            used = _used(answer["entry"]["uses"], answer["standing"]["idle_s"])
            rows += [("state", f"stored {age(answer['standing']['age_s'])} ago, {used}"), *standing_rows(answer)]
        else:
            rows += _absent_rows(answer)
        if answer["gone"]:
            rows += _removed_rows(answer["gone"], answer["policy"], again=answer["standing"] is not None)
        if answer["remembered"]:
            memory = answer["remembered"]
            uses = counted(memory["uses"], "use", "uses") if memory["uses"] else "no uses"
            rows += [("remembered", f"{uses}, puts included"), *_like(memory)]
        return pairs(rows)


def standing_rows(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """The rank of a stored entry for eviction; no rows if it is not stored."""
    standing = answer["standing"]
    if standing is None:
        return []
    worth = f"{_worth(standing['worth'], answer['policy'])}; the lowest worth is evicted first"
    rows: list[tuple[str, str]] = [("worth", worth), *_like(standing)]
    if standing["in_window"]:
        rows.append(("window", "put so recently that it is evicted only if no other entry can be"))
    compared = standing["compared"]
    colder = (
        f"{share(standing['colder'], compared)} of {number(compared)} other evictable "
        f"{'entry is' if compared == 1 else 'entries are'} evicted before it"
        if compared
        else "no other entry is evictable"
    )
    rows.append(("colder", colder))
    rows += _held(standing)
    if standing["children"]:
        children = counted(standing["children"], "child", "children")
        rows.append(("children", f"{children}: a block is evicted after all of its children"))
    before = standing["before"]
    if standing["held"]:
        return rows
    if standing["place"] == 1:
        rows.append(("place", "it is evicted next"))
    elif before:
        rows.append(("place", _place(standing["place"])))
        rows += [("" if at else "first", key) for at, key in enumerate(before)]
    return rows


def _place(place: int | None) -> str:
    if place is None:
        return "not among the next to be evicted"
    return f"{counted(place - 1, 'entry is', 'entries are')} evicted before it"


def _held(standing: dict[str, Any]) -> list[tuple[str, str]]:
    """The reasons why the entry cannot be evicted now; no rows without any."""
    rows = []
    if standing["held"] == "pin":
        rows.append(("held", "a client has pinned it for a limited time: it stays until that time ends"))
    if standing["lanes"]:
        first = [_holder(row) for row in standing["held_by"]]
        more = standing["lanes"] - len(first)
        named = "; ".join([*first, f"and {number(more)} more"] if more else first)
        pin = counted(standing["lanes"], "lane pins", "lanes pin")
        rows.append(("held", f"{pin} it now ({named}): it stays while a reader holds it"))
    elif standing["held"] == "lease":
        rows.append(("held", "a reader held it at the last scan of pins: it stays while a reader holds it"))
    return rows


def _holder(row: dict[str, Any]) -> str:
    if row["client"] is None:
        return f"lane {row['lane']:x} of a closed connection"
    return f"client {row['client']}, {row['name'] or 'without a name'}, pid {row['pid']}"


def _absent_rows(answer: dict[str, Any]) -> list[tuple[str, str]]:
    match answer["state"]:
        case "leaving":
            return [("state", f"leaving, unless a reader holds it: {_REASONS.get(answer['reason'], answer['reason'])}")]
        case "gone" if answer["gone"]:
            return [("state", "not stored any more")]
        case "gone":
            return [("state", f"not stored: {_remembered_only(answer)}")]
    if answer["records"] >= answer["records_max"]:
        known = counted(answer["records"], "removed entry", "removed entries")
        return [("state", f"not known: not stored, and not among the last {known}")]
    before = "there is no record of this key from before" if answer["recovered"] else "its ring was empty then"
    return [("state", f"not known: not stored since the daemon started {age(answer['up_s'])} ago; {before}")]


def _remembered_only(answer: dict[str, Any]) -> str:
    """The reason why the policy remembers a key, although the daemon has no record of its removal."""
    if answer["records"] >= answer["records_max"]:
        return "evicted or refused, and the record of this is no longer kept"
    if not answer["recovered"]:
        return "its put was refused for lack of room"
    before = f"evicted before the daemon started {age(answer['up_s'])} ago"
    return f"{before}, or refused after that" if answer["refused_puts"] else before


def _removed_rows(gone: dict[str, Any], policy: str, *, again: bool) -> list[tuple[str, str]]:
    reason = gone["reason"]
    used = _used(gone["uses"], gone["idle_s"]).replace(" ago", " before")
    return [
        (
            "removed before" if again else "removed",
            f"{age(gone['gone_s'])} ago ({reason}): {_REASONS.get(reason, reason)}",
        ),
        ("it was", f"stored {age(gone['age_s'])} before, {used}"),
        ("its worth", _worth(gone["worth"], policy)),
    ]


def _worth(worth: float, policy: str) -> str:
    """The worth with enough digits to distinguish two entries, and its meaning."""
    shown = f"{worth:,.0f}" if float(worth).is_integer() and abs(worth) < _WHOLE_BELOW else f"{worth:.6g}"
    return f"{shown} by policy {policy}{_WORTHS.get(policy, '')}"


def _used(uses: int, idle_s: float) -> str:
    """The number of uses since the put, and the time of the last one."""
    if not uses:
        return "not used since"
    times = {1: "once", 2: "twice"}.get(uses, f"{number(uses)} times")
    return f"used {times}, last {age(idle_s)} ago"


def _like(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """The entry's class in words; no rows for a policy without classes."""
    if not answer["like"]:
        return []
    back = answer["comes_back"]
    words = (
        "too few similar entries are known to estimate how many come back"
        if back is None
        else f"entries like it come back in {100 * back:.0f} % of cases"
    )
    return [("class", f"{', '.join(answer['like'])}; {words}")]


@click.command()
@click.argument("key", type=KEY)
@click.option("--json", "as_json", is_flag=True, help="Print the daemon's JSON.")
@pass_daemon
@click.pass_context
def why(ctx: click.Context, daemon: Daemon, key: str, as_json: bool) -> None:
    """Why an entry is kept, or why it was removed.

    For a stored entry: its worth to the policy, its class, the share of colder entries, and the entries that are
    evicted before it. For a removed entry: when and why it was removed, and its state then. KEY is hexadecimal. A
    prefix is enough if no other stored key begins with it, or else no other key of a removed entry.

    Exit code 1 if the key is unknown: neither stored nor remembered.
    """
    answer = daemon.why(stored_or_gone(daemon, key))
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    else:
        click.echo(why_text(answer))
    ctx.exit(1 if answer["state"] == "unknown" else 0)
