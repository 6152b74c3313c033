"""A client's baselines: how much of each device it holds by plan.

Owns: the declarations. Does not own: what follows from them (the daemon's).
Invariants: the daemon has the last declaration of each device, or gets it as soon as it is there.
"""

from __future__ import annotations

from ...errors import Unavailable
from ...ipc.messages import control as messages
from ...ipc.messages.schema import SIZE_BYTES_MAX
from ..arguments.checks import check_count, check_name
from ..link.link import Link
from .modes import GovernorListener


def declare(link: Link, governor: GovernorListener, device: str, size_bytes: int, timeout_s: float) -> None:
    """See `Client.declare_baseline`."""
    check_name("device", device)
    size_bytes = check_count("size_bytes", size_bytes, SIZE_BYTES_MAX)

    def declaration(number: int) -> messages.DeclareBaseline:
        return messages.DeclareBaseline(number, device, size_bytes)

    name = "baseline", device
    before = governor.keep(name, lambda connected: link.ask(declaration, connected=connected))
    connected = link.attached
    if connected is None:
        return
    try:
        link.answers.wait(link.ask(declaration, timeout_s, connected=connected), timeout_s)
    except Unavailable:
        return
    except BaseException:
        governor.keep(name, before)
        raise
