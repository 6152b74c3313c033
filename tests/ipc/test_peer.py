"""The kernel says who is at the other end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tensord.ipc.wire.descriptors import Peer, peer_of


def test_a_peer_is_known_by_pid_uid_and_gid(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(tmp_path / "s"))
        server.listen()
        ask = "import socket, sys; s = socket.socket(1); s.connect(sys.argv[1]); s.recv(1)"
        child = subprocess.Popen([sys.executable, "-c", ask, os.fspath(tmp_path / "s")])
        accepted, _ = server.accept()
        with accepted:
            assert peer_of(accepted) == Peer(child.pid, os.geteuid(), os.getegid())
        assert child.wait() == 0


def test_a_uid_beyond_the_signed_range_is_not_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stub:
        def getsockopt(self, *_: int) -> bytes:
            return b"\0" * 4 + b"\xff\xff\xff\xff" + b"\xfe\xff\xff\xff"

    assert peer_of(Stub()) == Peer(0, 2**32 - 1, 2**32 - 2)  # type: ignore[arg-type]
