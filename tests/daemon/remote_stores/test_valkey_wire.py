"""Replies that no Valkey server sends: each is an error that says so, and none is taken for "nothing is stored"."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tensord.daemon.remote_stores.valkey_wire import ServerError, ValkeyWire
from tensord.errors import TierUnavailable

from .entries import soon


@pytest.fixture
def ends() -> Iterator[tuple[ValkeyWire, socket.socket]]:
    own, theirs = socket.socketpair()
    with own, theirs:
        yield ValkeyWire(SimpleNamespace(_sock=own, disconnect=own.close), "valkey://host:6379"), theirs


@pytest.mark.parametrize("sent", [b"$abc\r\n", b"$3\r\nabcdef\r\n", b"$9\r\nabcdefghijk\r\n", b"hello\r\n"])
def test_a_reply_of_another_server_is_an_error(ends: tuple[ValkeyWire, socket.socket], sent: bytes) -> None:
    wire, theirs = ends
    theirs.sendall(sent)
    with pytest.raises(TierUnavailable, match="which is no reply of a Valkey server"):
        wire.payload(memoryview(bytearray(8)), soon())


def test_replies_of_a_server_are_read_as_they_are(ends: tuple[ValkeyWire, socket.socket]) -> None:
    wire, theirs = ends
    theirs.sendall(
        b"$-1\r\n*-1\r\n:-3\r\n*2\r\n*1\r\n*2\r\n*1\r\n$1\r\na\r\n:7\r\n$0\r\n\r\n+OK\r\n$3\r\nabc\r\n$-1\r\n"
    )
    assert [wire.answer(soon()) for _ in range(5)] == [None, None, -3, [[[[b"a"], 7]], b""], b"OK"]
    into = memoryview(bytearray(8))
    assert wire.payload(into, soon()) == 3 and bytes(into[:3]) == b"abc"
    assert wire.payload(into, soon()) is None


def test_what_cannot_be_printed_of_a_servers_error_is_left_out(ends: tuple[ValkeyWire, socket.socket]) -> None:
    wire, theirs = ends
    theirs.sendall(b"-ERR a\x00b\x1b[31m\xff\r\n")
    error = wire.answer(soon())
    assert isinstance(error, ServerError)
    assert (error.code, error.text) == ("ERR", "ERR a?b?[31m?")
