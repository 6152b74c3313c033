"""Whatever bytes come to a real daemon's two sockets: who sent them is told and dropped, everybody else is served.

The parser and the protocol by themselves are fuzzed under tests/ipc; here it is the sockets, the sessions and the store
behind them that must hold.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tensord
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.schema import PROTOCOL_VERSION
from tensord.ipc.wire.frames import pack

from ..daemon_process import PATIENCE_S, Daemon, until

KEY = bytes(range(32))
PAYLOAD = np.arange(5000, dtype=np.float32)
HELLO = pack(messages.Hello(1, PROTOCOL_VERSION, "hostile", 1, False))
SPOKEN = [
    HELLO,
    pack(messages.Attach(2)),
    pack(messages.OpenInbox(3, 4096)),
    pack(messages.OpenRing(4)),
    pack(messages.AskForGrants(11, [1 << 10] * 20, [1, 2])),
    pack(messages.AskForGrants(12, [1 << 48, 1], ahead=True)),
    pack(messages.ReturnGrants([1, 1 << 62])),
    pack(messages.Doorbell()),
    pack(messages.NameAgent("planner")),
    pack(messages.RequestClaim(5, KEY)),
    pack(messages.Evict(6, [bytes(32)])),
    pack(messages.Clear(7, bytes(8))),
    pack(messages.StatusQuery(8)),
    pack(messages.EntriesQuery(9)),
    pack(messages.Watch(10)),
]
BOUNDLESS = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.binary() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid conversation with some of its bytes changed, cut or doubled."""
    said = bytearray(b"".join(draw(st.lists(st.sampled_from(SPOKEN), min_size=1, max_size=6))))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(said) - 1))
        match draw(st.sampled_from(["change", "cut", "double"])):
            case "change":
                said[at] = draw(st.integers(0, 255))
            case "cut":
                del said[at : at + draw(st.integers(1, 9))]
            case _:
                said[at:at] = said[at : at + 16]
        if not said:
            break
    return bytes(said)


HOSTILE = st.binary(max_size=4096) | BOUNDLESS.map(msgpack.packb) | mutated() | mutated().map(lambda m: HELLO + m)


@pytest.fixture(scope="module")
def besieged() -> Iterator[Daemon]:
    """A daemon that holds one entry and must never be ended by what a test sends."""
    with Daemon({"tensord.daemon.connections.session.HELLO_S_MAX": PATIENCE_S}) as running:
        running.start()
        running.client().put(KEY, PAYLOAD, wait=True)
        yield running


def send(path: Path, data: bytes) -> bytes:
    """What the daemon answers to `data`, until it hangs up or has been told that nothing more comes."""
    answered = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(str(path))
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while chunk := sock.recv(65536):
                answered += chunk
        except (BrokenPipeError, ConnectionResetError):
            pass
    return answered


def assert_served(daemon: Daemon, client: tensord.Client) -> None:
    lease = client.get(KEY)
    assert lease is not None
    assert np.array_equal(lease.tree, PAYLOAD)
    assert client.touch(KEY) == 1
    assert client.status()["store"]["found_corrupt"] == 0


@pytest.mark.parametrize("which", ["socket", "status_socket"])
def test_hostile_bytes_end_their_own_connection_and_disturb_nobody(besieged: Daemon, which: str) -> None:
    client = besieged.client()

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(HOSTILE)
    def attack(data: bytes) -> None:
        send(getattr(besieged, which), data)

    attack()
    assert_served(besieged, client)
    until(lambda: client.status()["clients"] <= 3, "the hostile connections are gone")


@pytest.mark.parametrize("which", ["socket", "status_socket"])
def test_a_client_that_breaks_the_protocol_gets_the_reason(besieged: Daemon, which: str) -> None:
    answered = send(getattr(besieged, which), b"\xc1" * 16)
    assert b"BadMessage" in answered


@pytest.mark.parametrize("which", ["socket", "status_socket"])
def test_a_message_that_never_ends_costs_bounded_memory(besieged: Daemon, which: str) -> None:
    client = besieged.client()
    before = resident_bytes(besieged)
    # A binary of 4 GiB is announced, and 64 MiB of it sent.
    endless = b"\x81\xa4type\xc6\xff\xff\xff\xff"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(str(getattr(besieged, which)))
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            sock.sendall(endless + bytes(64 << 20))
    assert resident_bytes(besieged) - before < 32 << 20
    assert_served(besieged, client)


def resident_bytes(daemon: Daemon) -> int:
    """Private memory of the daemon, the ring not counted."""
    lines = Path(f"/proc/{daemon.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
