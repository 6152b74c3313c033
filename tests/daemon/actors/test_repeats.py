"""A client that is turned away and tries again gets one line in the log, however often it comes."""

from __future__ import annotations

import socket

from tensord.daemon.process.logs import FORGOTTEN_S, REPEATS_MAX, Repeats
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
    repeats = Repeats()
    assert repeats.is_new("a", 0)
    assert not repeats.is_new("a", FORGOTTEN_S)
    assert repeats.is_new("a", 2 * FORGOTTEN_S + 1)
    assert all(repeats.is_new(number, 3 * FORGOTTEN_S) for number in range(REPEATS_MAX))
    assert repeats.is_new("a", 2 * FORGOTTEN_S + 2), "the oldest was forgotten"
