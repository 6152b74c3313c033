"""`ls` and `show`: the stored entries.

Owns: their display. Does not own: the query for a removed entry (why.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any, Final

import click

from ...errors import BadKey
from .daemon import Daemon, pass_daemon, understood
from .parameters import KEY, TAG, TAG_BYTES, keys_meant
from .tables import age, counted, number, pairs, short, size, table
from .why import standing_rows

# The namespace's tag, and enough digits of the digest to distinguish the keys of one namespace.
_SHOWN_DIGITS: Final = 2 * TAG_BYTES + 12
_HEAD: Final = ("KEY", "SIZE", "TOKENS", "USES", "AGE", "IDLE", "ENDS", "UID", "PIN")


def entries_text(entries: Iterable[dict[str, Any]], now_unix_s: float, *, full_keys: bool = False) -> str:
    """A table of entries, 100 columns wide except with whole keys."""
    digits = None if full_keys else _SHOWN_DIGITS
    with understood("list of entries"):
        rows = [
            (
                entry["key"][:digits],
                size(entry["payload_bytes"]),
                short(entry["tokens"]),
                short(entry["uses"]),
                age(now_unix_s - entry["created_unix_s"]),
                age(now_unix_s - entry["used_unix_s"]),
                _ends(entry, now_unix_s).removeprefix("in "),
                str(entry["owner_uid"]),
                "yes" if entry["pinned_by_message"] else "",
            )
            for entry in entries
        ]
    return table(_HEAD, rows, right=range(1, 8))


def entry_text(entry: dict[str, Any], now_unix_s: float, more: Iterable[tuple[str, str]] = ()) -> str:
    """One entry in two columns, followed by the rows of `more`."""
    with understood("entry"):
        return pairs(
            [
                ("key", entry["key"]),
                ("namespace tag", entry["namespace"]),
                ("size", f"{size(entry['payload_bytes'])} ({counted(entry['payload_bytes'], 'byte', 'bytes')})"),
                (
                    "in the ring",
                    f"{number(entry['span_bytes'])} bytes, of which {number(entry['tree_bytes'])} are the tree header",
                ),
                ("span id", f"{entry['span_id']:#x}"),
                ("tokens", number(entry["tokens"])),
                ("uses", number(entry["uses"])),
                ("stored", f"{age(now_unix_s - entry['created_unix_s'])} ago, by uid {entry['owner_uid']}"),
                ("last used", f"{age(now_unix_s - entry['used_unix_s'])} ago"),
                ("ends", _ends(entry, now_unix_s)),
                ("pinned for a time", "yes" if entry["pinned_by_message"] else "no"),
                *_of_sequence(entry),
                *more,
            ]
        )


def _of_sequence(entry: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows for a block of a cached sequence or of a chain; none for other entries, or from older daemons."""
    rows: list[tuple[str, str]] = []
    if entry.get("cost_ms"):
        rows.append(("cost", f"{entry['cost_ms']:g} ms"))
    if entry.get("agent"):
        rows.append(("agent", entry["agent"]))
    block = entry.get("prefix")
    if block:
        start, tokens = block["start"], block["tokens"]
        place = (
            f"snapshot at token {number(start)}"
            if block["snapshot"]
            else f"tokens {number(start)} to {number(start + tokens)}"
        )
        rows.append(("of a sequence", f"{place}, {counted(block['children'], 'child', 'children')}"))
        rows.append(("parent", block["parent"] or "none: the sequence begins here"))
    elif entry.get("parent") or entry.get("children"):
        rows.append(("of a chain", counted(entry["children"], "child", "children")))
        rows.append(("parent", entry["parent"] or "none: the chain begins here"))
    return rows


def _ends(entry: dict[str, Any], now_unix_s: float) -> str:
    at = entry["expires_unix_s"]
    return "never" if at is None else f"in {age(at - now_unix_s)}"


@click.command()
@click.option("--namespace-tag", type=TAG, metavar="HEX", help="Only this namespace: the first 16 digits of its keys.")
@click.option("-n", "--count", type=click.IntRange(min=1), metavar="N", help="At most N entries; by default all.")
@click.option("--full-keys", is_flag=True, help="All 64 digits of each key; the table gets wider.")
@click.option("--json", "as_json", is_flag=True, help="Print the daemon's JSON.")
@pass_daemon
def ls(daemon: Daemon, namespace_tag: str | None, count: int | None, full_keys: bool, as_json: bool) -> None:
    """The stored entries, in no particular order.

    The first 16 digits of a key are its namespace's tag. AGE: time since it was stored. IDLE: time since its last use.
    ENDS: time until it expires. PIN: whether a client has pinned it for a time; leases are not listed, since they come
    and go with every lookup.
    """
    listed = list(daemon.entries(bytes.fromhex(namespace_tag) if namespace_tag else None, count))
    if as_json:
        click.echo(json.dumps({"entries": listed}, indent=2))
    else:
        click.echo(entries_text(listed, time.time(), full_keys=full_keys))


@click.command()
@click.argument("key", type=KEY)
@click.option("--json", "as_json", is_flag=True, help="Print the daemon's JSON.")
@pass_daemon
def show(daemon: Daemon, key: str, as_json: bool) -> None:
    """Shows one stored entry, and its rank for eviction.

    KEY is hexadecimal. A prefix is enough if no other stored key begins with it.
    """
    (meant,) = keys_meant(daemon, [key])
    answer = daemon.why(meant)
    with understood("answer"):
        entry, standing = answer["entry"], answer["standing"]
    if entry is None:
        raise BadKey(
            f"{meant.hex()} is not stored; `tensorctl why {meant.hex()}` says whether it was, "
            "`tensorctl ls` lists what is stored"
        )
    if as_json:
        click.echo(json.dumps({"entry": entry, "standing": standing}, indent=2))
    else:
        with understood("answer"):
            click.echo(entry_text(entry, time.time(), standing_rows(answer)))
