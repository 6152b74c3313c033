"""The identity of the peer of a Unix socket, from the kernel.

Owns: the reading of SO_PEERCRED. Does not own what a uid may do.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Final

_CREDENTIALS: Final = struct.Struct("@iII")


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that connected, as it was at that time. `pid` is 0 for a process outside our pid namespace."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    """The peer of a connected Unix socket. Raises OSError on any other socket."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(found)
    return Peer(pid, uid, gid)
