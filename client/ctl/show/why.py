"""`why`: what an entry is, and why it is kept, or why it was removed.

Owns: the rows in which the daemon's answer is shown. Does not own: the answer.
"""

from __future__ import annotations

from typing import Any, Final

import click

from ..daemon import Daemon, pass_daemon
from ..output import age, as_json, counted, number, pairs, share, show, words
from ..parameters import KEY, keys_meant

Rows = list[tuple[str, str]]

_WORTHS: Final = {
    "lru": ", the number of its last use among all uses of the store",
}
"""The meaning of the worth that is not clear from the other rows, by policy."""
_ENTRY: Final = "{payload_bytes}, tokens {tokens}, by uid {owner_uid}"
_WHOLE_BELOW: Final = 1e15
_REASONS: Final = {
    "capacity": "evicted to make room for other entries",
    "entries": "evicted for other entries: max_entries was reached",
    "tokens": "evicted for other entries: max_tokens was reached",
    "pressure": "the host was short of memory, and the ring returned some memory",
    "ttl": "its time to live had ended",
    "explicit": "a client evicted it, or its parent in a sequence",
    "cleared": "its namespace, or everything, was cleared",
    "invalidated": "its namespace was invalidated",
    "corrupt": "its bytes did not match their checksum",
}


def why_text(answer: dict[str, Any]) -> str:
    """The daemon's answer as text."""
    rows: Rows = [("key", answer["key"])]
    if answer["standing"]:
        rows += [*_stored(answer["entry"], answer["standing"]), *_standing(answer["standing"], answer["policy"])]
    else:
        rows.append(("state", _absent(answer)))
    if gone := answer["gone"]:
        used = _used(gone["uses"], gone["idle_s"]).replace(" ago", " before")
        rows += [
            (
                "removed before" if answer["standing"] else "removed",
                f"{age(gone['gone_s'])} ago ({gone['reason']}): {_REASONS.get(gone['reason'], gone['reason'])}",
            ),
            ("it was", f"stored {age(gone['age_s'])} before, {used}"),
            ("its worth", _worth(gone["worth"], answer["policy"])),
        ]
    if memory := answer["remembered"]:
        uses = counted(memory["uses"], "use", "uses") if memory["uses"] else "no uses"
        rows += [("remembered", f"{uses}, puts included"), *_like(memory)]
    return pairs(rows)


def _stored(entry: dict[str, Any], standing: dict[str, Any]) -> Rows:
    rows = [
        ("state", f"stored {age(standing['age_s'])} ago, {_used(entry['uses'], standing['idle_s'])}"),
        ("entry", words(entry, _ENTRY) + (f", cost {entry['cost_ms']:g} ms" if entry.get("cost_ms") else "")),
    ]
    if block := entry.get("prefix"):
        part = "snapshot at token {start}" if block["snapshot"] else "tokens {start} to {end}"
        agent = f", agent {entry['agent']}" if entry.get("agent") else ""
        shown = words({**block, "end": block["start"] + block["tokens"]}, part)
        rows.append(("of a sequence", f"{shown}{agent}; parent {block['parent'] or 'none: it begins here'}"))
    elif entry.get("parent"):
        rows.append(("of a chain", f"parent {entry['parent']}"))
    return rows


def _standing(standing: dict[str, Any], policy: str) -> Rows:
    """The rank of a stored entry for eviction."""
    rows = [("worth", f"{_worth(standing['worth'], policy)}; the lowest worth is evicted first"), *_like(standing)]
    if standing["in_window"]:
        rows.append(("window", "put so recently that it is evicted only if no other entry can be"))
    if compared := standing["compared"]:
        others = counted(compared, "other evictable entry is", "other evictable entries are")
        rows.append(("colder", f"{share(standing['colder'], compared)} of {others} evicted before it"))
    else:
        rows.append(("colder", "no other entry is evictable"))
    if standing["held"] == "pin":
        rows.append(("held", "a client has pinned it for a limited time: it stays until that time ends"))
    if standing["lanes"]:
        holders = [_holder(row) for row in standing["held_by"]]
        if more := standing["lanes"] - len(holders):
            holders.append(f"and {number(more)} more")
        pin = counted(standing["lanes"], "lane pins", "lanes pin")
        rows.append(("held", f"{pin} it now ({'; '.join(holders)}): it stays while a reader holds it"))
    elif standing["held"] == "lease":
        rows.append(("held", "a reader held it at the last scan of pins: it stays while a reader holds it"))
    if standing["children"]:
        children = counted(standing["children"], "child", "children")
        rows.append(("children", f"{children}: a block is evicted after all of its children"))
    return rows


def _holder(row: dict[str, Any]) -> str:
    if row["client"] is None:
        return f"lane {row['lane']:x} of a closed connection"
    return f"client {row['client']}, {row['name'] or 'without a name'}, pid {row['pid']}"


def _absent(answer: dict[str, Any]) -> str:
    """What is known of an entry that is not stored."""
    if answer["state"] == "leaving":
        return f"leaving, unless a reader holds it: {_REASONS.get(answer['reason'], answer['reason'])}"
    if answer["state"] == "gone":
        return "not stored any more" if answer["gone"] else "not stored: removed earlier, or its put was refused"
    known = counted(answer["records"], "removed entry", "removed entries")
    return f"not known: not stored, and not among the last {known} since the daemon started {age(answer['up_s'])} ago"


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


def _like(answer: dict[str, Any]) -> Rows:
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
@as_json
@pass_daemon
@click.pass_context
def why(ctx: click.Context, daemon: Daemon, key: str, as_json: bool) -> None:
    """What an entry is, and why it is kept, or why it was removed.

    For a stored entry: its size, its worth to the policy, its class, and the share of colder entries. For a removed
    entry: when and why it was removed, and its state then. KEY is hexadecimal. A prefix of a
    stored key is enough if no other stored key begins with it.

    Exit code 1 if the key is unknown: neither stored nor remembered.
    """
    (meant,) = keys_meant(daemon, [key])
    answer = daemon.why(meant)
    show(answer, as_json, why_text)
    ctx.exit(1 if answer["state"] == "unknown" else 0)
