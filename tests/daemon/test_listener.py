"""A listener whose process can open no more files."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path

from tensord.daemon.claims.quotas import Quotas
from tensord.daemon.config.config import Config
from tensord.daemon.config.limits import quota_rules
from tensord.daemon.connections.listener import Listener, Listening

from ..daemon_process import PATIENCE_S


class Full:
    """A listening socket that accepts while the listener has given its spare descriptor up."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(path))
        self.socket.listen()
        self.socket.setblocking(False)
        self.listener: Listener

    def fileno(self) -> int:
        return self.socket.fileno()

    def accept(self) -> tuple[socket.socket, object]:
        if self.listener._spare is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return self.socket.accept()


async def served(number: int, accepted: socket.socket) -> None:
    raise AssertionError("a descriptor was found")


def test_each_peer_for_which_no_descriptor_is_left_is_told_so(tmp_path: Path) -> None:
    full = Full(tmp_path / "socket")
    quotas = Quotas(quota_rules(Config.load([], {})), own_uid=0)

    async def go() -> None:
        full.listener = Listener(Listening(full), "clients", quotas, served)  # type: ignore[arg-type]
        accepting = asyncio.create_task(full.listener.run())
        for _ in range(2):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "socket")
            assert b"accepts no more connections" in await asyncio.wait_for(reader.read(), PATIENCE_S)
            writer.close()
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)

    with full.socket:
        asyncio.run(go())
