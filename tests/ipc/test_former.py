"""Connections with a peer of the former protocol version: what is translated, and what is refused by name."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from tensord.errors import LimitReached, VersionMismatch
from tensord.ipc import messages as m
from tensord.ipc.connection import Connection
from tensord.ipc.former import offered
from tensord.ipc.frames import CONTROL_FRAMES, FrameReader, pack
from tensord.ipc.schema import PROTOCOL_FORMER, PROTOCOL_VERSION, ClientLimits

KEY = b"k" * 32
COMMIT = m.Commit(4, KEY, 100, 10, at=640)


def sent(data: bytes) -> list[Any]:
    return list(FrameReader(CONTROL_FRAMES).feed(data))


def attached(version: int) -> tuple[Connection, Connection]:
    """A client and a daemon after their greeting in `version`."""
    client, server = Connection.control_client(), Connection.control_server(ClientLimits())
    requests = (m.Hello(1, version, "test", 42, True), m.Attach(2))
    answers = (m.Welcome(1, version, "0.1", "i", 1, ClientLimits()), m.Attached(2, 7, 1 << 20, 4096))
    for request, answer in zip(requests, answers, strict=True):
        assert server.receive_data(client.send(request)).failure is None
        fds = tuple(range(getattr(answer, "fds", 0)))
        assert client.receive_data(server.send(answer, fds=len(fds)), fds).failure is None
    return client, server


@pytest.mark.parametrize("version", [PROTOCOL_FORMER, PROTOCOL_VERSION])
def test_a_daemon_answers_in_the_version_of_its_client(version: int) -> None:
    client, server = attached(version)
    assert client.protocol == server.protocol == version


def test_a_payload_in_the_inbox_is_announced_as_the_former_version_does() -> None:
    client, _ = attached(PROTOCOL_FORMER)
    commit, part = sent(client.send(COMMIT))
    assert "at" not in commit or commit["at"] is None
    assert (part["type"], part["id"], part["inbox_offset"], part["part_bytes"], part["last"]) == (
        "Part",
        4,
        640,
        100,
        True,
    )
    client.check_invariants()


def test_a_payload_that_was_never_written_is_no_open_request_in_either_version() -> None:
    for version in (PROTOCOL_FORMER, PROTOCOL_VERSION):
        client, _ = attached(version)
        client.send(COMMIT)
        client.revert_send(COMMIT)
        client.check_invariants()
        client.send(COMMIT)


@pytest.mark.parametrize("request_", [m.OpenRing(5), m.AgentTurn(5, "me", "began")])
def test_what_the_former_version_lacks_is_refused_on_both_sides_with_both_versions(request_: Any) -> None:
    client, server = attached(PROTOCOL_FORMER)
    both = f"version {PROTOCOL_FORMER}, .*version {PROTOCOL_VERSION}: install the same release"
    with pytest.raises(LimitReached, match=both):
        client.send(request_)
    (told,) = sent(bytes(server.receive_data(pack(request_)).replies))
    assert (told["code"], told["id"]) == ("LimitReached", 5)
    client, server = attached(PROTOCOL_VERSION)
    assert server.receive_data(client.send(request_)).messages == [(request_, ())]


def test_a_put_in_place_of_the_former_version_is_refused_and_its_connection_goes_on() -> None:
    _, server = attached(PROTOCOL_FORMER)
    put = {"type": "Commit", "id": 9, "key": KEY, "payload_bytes": 100, "tree_bytes": 10, "in_place": True}
    arrival = server.receive_data(framed(put))
    (told,) = sent(bytes(arrival.replies))
    assert (told["code"], told["id"], arrival.messages) == ("LimitReached", 9, [])
    arrival = server.receive_data(framed(put | {"in_place": False}))
    assert [type(message) for message, _ in arrival.messages] == [m.Commit]
    server.check_invariants()


def framed(document: dict[str, Any]) -> bytes:
    return bytes(msgpack.packb(document))


def test_a_version_is_offered_after_the_newest_was_refused_and_the_first_refusal_counts() -> None:
    tried: list[int] = []
    spoken = {PROTOCOL_VERSION}

    def begin(version: int) -> str:
        tried.append(version)
        if version not in spoken:
            raise VersionMismatch(f"refused {version}")
        return "begun"

    assert offered(begin) == "begun"
    assert tried == [PROTOCOL_VERSION]
    spoken = {PROTOCOL_FORMER}
    assert offered(begin) == "begun"
    assert tried[1:] == [PROTOCOL_VERSION, PROTOCOL_FORMER]
    spoken = set()
    with pytest.raises(VersionMismatch, match=f"refused {PROTOCOL_VERSION}"):
        offered(begin)
