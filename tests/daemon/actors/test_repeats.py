"""A client that is turned away and tries again gets one line in the log, however often it comes."""

from __future__ import annotations

import socket

from tensord.daemon.process.logs import Repeats
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.schema import PROTOCOL_VERSION
from tensord.ipc.wire.frames import pack
from tests.daemon_process import Daemon, until


def said_to(path: str, words: bytes) -> bytes:
    """What the daemon answers, to its last byte."""
    with socket.socket(socket.AF_UNIX) as visitor:
        visitor.connect(path)
        if words:  # a daemon that turns somebody away may have hung up by now
            visitor.sendall(words)
        answered = b""
        while more := visitor.recv(1 << 16):
            answered += more
        return answered


def test_a_client_of_another_version_that_tries_again_and_again_is_logged_once() -> None:
    with Daemon() as daemon:
        daemon.start()
        for _ in range(5):
            hello = pack(messages.Hello(1, PROTOCOL_VERSION + 1, "old", 1, True))
            assert b"VersionMismatch" in said_to(str(daemon.socket), hello)
        # Another reason is another line, and comes after all of those.
        said_to(str(daemon.socket), b"GET / HTTP/1.1")
        until(lambda: daemon.log.count("protocol error;") > 1, "the line of the other reason")
        assert daemon.log.count("protocol error;") == 2
        assert daemon.log.count("protocol version") == 1


def test_an_old_repeat_counts_as_new_and_the_memory_has_a_limit() -> None:
    repeats = Repeats(forgotten_s=10, most=2)
    assert repeats.is_new("a", 0)
    assert not repeats.is_new("a", 9)
    assert not repeats.is_new("a", 19)
    assert repeats.is_new("a", 30)
    assert repeats.is_new("b", 30) and repeats.is_new("c", 30)
    assert repeats.is_new("a", 31), "the oldest of three was forgotten"
