"""`ls`: the stored entries.

Owns: their rows. Does not own: all that is known of one entry (why.py).
"""

from __future__ import annotations

import time
from typing import Any, Final

import click

from ..daemon import Daemon, pass_daemon
from ..output import age, as_json, short, show, size, table
from ..parameters import TAG_BYTES, namespace_tag

# The namespace's tag, and enough digits of the digest to distinguish the keys of one namespace.
_SHOWN_DIGITS: Final = 2 * TAG_BYTES + 12


def entries_text(entries: list[dict[str, Any]], now_unix_s: float) -> str:
    """A table of entries, 100 columns wide."""
    return table(
        ("KEY", ">SIZE", ">TOKENS", ">USES", ">AGE", ">IDLE", ">ENDS", ">UID", "PIN"),
        [
            (
                entry["key"][:_SHOWN_DIGITS],
                size(entry["payload_bytes"]),
                short(entry["tokens"]),
                short(entry["uses"]),
                age(now_unix_s - entry["created_unix_s"]),
                age(now_unix_s - entry["used_unix_s"]),
                "never" if entry["expires_unix_s"] is None else age(entry["expires_unix_s"] - now_unix_s),
                entry["owner_uid"],
                "yes" if entry["pinned_by_message"] else "",
            )
            for entry in entries
        ],
    )


@click.command()
@namespace_tag
@click.option("-n", "--count", type=click.IntRange(min=1), metavar="N", help="At most N entries; by default all.")
@as_json
@pass_daemon
def ls(daemon: Daemon, namespace_tag: str | None, count: int | None, as_json: bool) -> None:
    """The stored entries, in no particular order.

    KEY: its first digits, of which 16 are the namespace's tag. AGE: time since it was stored. IDLE: time since its last
    use. ENDS: time until it expires. PIN: whether a client has pinned it for a time; leases are not listed, since they
    come and go with every lookup.
    """
    listed = list(daemon.entries(bytes.fromhex(namespace_tag) if namespace_tag else None, count))
    show({"entries": listed}, as_json, lambda body: entries_text(body["entries"], time.time()))
