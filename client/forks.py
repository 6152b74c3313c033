"""What a fork does to clients: both sides keep the views they have, and attach anew where they must."""

from __future__ import annotations

import os
from weakref import WeakSet

from .link import Link

_links: WeakSet[Link] = WeakSet()


def watch(link: Link) -> None:
    """Tells `link` of every fork from now on."""
    _links.add(link)


def _before() -> None:
    for link in list(_links):
        link.before_fork()


def _in_parent() -> None:
    for link in list(_links):
        link.after_fork_in_parent()


def _in_child() -> None:
    for link in list(_links):
        link.after_fork_in_child()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
