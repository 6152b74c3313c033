"""What either side may say when, what happens to descriptors, and that no peer can break it."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from tensord.errors import DaemonUnavailable, MessageTooLarge, ProcessLimit, ProtocolError, VersionMismatch
from tensord.ipc.messages import control as m
from tensord.ipc.messages.control import PROTOCOL_VERSION, ClientLimits, Message
from tensord.ipc.wire.connection import CONTROL_REQUESTS, FDS_MAX, Connection, ConnectionState
from tensord.ipc.wire.frames import CONTROL_BYTES_MAX, FrameReader, pack, unpack

from .examples import ATTACHED, HELLO, STEPS, Pair, smallest, welcome

KEY = b"k" * 32
LIMITS = ClientLimits(requests_in_flight_max=8, keys_per_request_max=4)
REQUESTS: list[Message] = [
    HELLO if kind is m.Hello else smallest(kind, **({"id": number} if hasattr(kind, "id") else {}))
    for number, kind in enumerate(CONTROL_REQUESTS.values(), 10)
]


def read(data: bytes | bytearray) -> list[Any]:
    return [unpack(each) for each in FrameReader().feed(bytes(data))]


def check(connection: Connection) -> None:
    """It keeps little for the peer, and nothing once it is closed."""
    assert len(connection._fds) <= (0 if connection.closed else FDS_MAX)
    assert len(connection._reader.held) <= CONTROL_BYTES_MAX


@pytest.fixture
def attached() -> Any:
    pair = Pair.at("attached", LIMITS)
    yield pair
    for each in pair:
        check(each)


def allowed(step: str, kind: Any) -> bool:
    if kind is m.Hello:
        return step == "fresh"
    if kind is m.Attach:
        return step == "greeted"
    return step == "attached" or (step in ("greeted", "attaching") and not kind.needs_lane)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_a_request_out_of_turn_is_refused_with_what_to_do(step: str, request_: Message) -> None:
    server = Pair.at(step, LIMITS).server
    fds = tuple(range(100, 100 + getattr(request_, "fds", 0)))
    arrival = server.receive_data(pack(request_), fds)
    if allowed(step, type(request_)):
        assert arrival.messages == [(request_, fds)]
        assert arrival.failure is None
        return
    assert (arrival.messages, arrival.discarded) == ([], list(fds))
    assert type(arrival.failure) is ProtocolError and server.closed
    said = str(arrival.failure)
    assert said.startswith(f"{type(request_).__name__} on a connection that is")
    assert any(word in said for word in ("send Hello", "send Attach", "connect anew"))
    assert read(arrival.replies) == [{"type": "Error", "id": None, "code": "ProtocolError", "text": said}]


@pytest.mark.parametrize("message", [m.Done(5), m.PutRefused(1), m.Order(1, "card", "drop", [KEY], "pressure")])
def test_answers_to_a_server_and_requests_to_a_client_are_passed_over(attached: Pair, message: Message) -> None:
    arrival = attached.server.receive_data(pack(message))
    assert arrival.messages == [] and b"unknown message type" in arrival.replies
    assert not attached.server.closed, "it may be a word of a later release"
    arrival = attached.client.receive_data(pack(m.Evict(5, [KEY])))
    assert arrival.messages == [] and not arrival.replies


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1])
@pytest.mark.parametrize("serving", [True, False])
def test_another_version_is_refused_with_both_named(version: int, serving: bool) -> None:
    # Of another version only the type and the version need to be as we know them.
    pair = Pair.at("fresh" if serving else "greeting")
    if serving:
        found = pair.server.receive_data(msgpack.packb({"type": "Hello", "protocol": version}))
    else:
        found = pair.client.receive_data(msgpack.packb({"type": "Welcome", "protocol": version}))
    assert type(found.failure) is VersionMismatch
    assert f"version {version}, " in str(found.failure)
    assert f" {PROTOCOL_VERSION}: install" in str(found.failure)
    if serving:
        client = pair.client
        client.send(HELLO)
        ((told, _),) = client.receive_data(bytes(found.replies)).messages
        assert type(told.to_error()) is VersionMismatch


def test_a_refused_hello_ends_the_connection_and_a_refused_attach_does_not() -> None:
    pair = Pair.at("greeting", LIMITS)
    pair.answer(m.Error(1, "LimitReached", "clients_max"))
    assert pair.server.closed
    with pytest.raises(DaemonUnavailable, match="connect anew"):
        pair.server.send(welcome())

    pair = Pair.at("attaching", LIMITS)
    pair.answer(m.Error(2, "LimitReached", "lanes_max"))
    assert pair.server.state is ConnectionState.GREETED
    assert pair.ask(m.Attach(3)).failure is None
    check(pair.server)


# ---- requests and their answers


def test_a_wait_keeps_the_request_open_until_it_is_answered_again(attached: Pair) -> None:
    attached.ask(m.RequestClaim(5, KEY))
    attached.answer(m.Claimed(5, "wait"))
    arrival = attached.server.receive_data(pack(m.Evict(5, [KEY])))
    assert "id 5, which is still open: choose another" in str(arrival.failure)
    again = Pair.at("attached", LIMITS)
    again.ask(m.RequestClaim(5, KEY))
    again.answer(m.Claimed(5, "wait"), m.Claimed(5, "hit"))
    assert again.ask(m.Evict(5, [KEY])).failure is None


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (
            [m.RequestClaim(number, KEY) for number in range(9)],
            "requests_in_flight_max, which is 8: wait for an answer",
        ),
        ([m.Evict(number, [KEY] * (number - 3)) for number in range(3, 9)], "5 keys; keys_per_request_max is 4: ask"),
    ],
    ids=["in flight", "keys"],
)
def test_a_request_over_a_limit_is_refused_and_the_connection_goes_on(
    attached: Pair, sent: list[Any], said: str
) -> None:
    arrival = attached.ask(*sent)
    assert [message for message, _ in arrival.messages] == sent[: len(arrival.messages)] and arrival.failure is None
    told = read(arrival.replies)
    assert [each["id"] for each in told] == [message.id for message in sent[len(arrival.messages) :]]
    assert told[0]["code"] == "LimitReached" and said in told[0]["text"]
    attached.answer(m.Counted(sent[0].id, 1))
    again = attached.ask(m.Evict(99, [KEY]))
    assert again.failure is None and not again.replies


def test_a_refused_message_without_an_answer_gets_none(attached: Pair) -> None:
    """An error without an id would be taken for the end of the connection."""
    arrival = attached.server.receive_data(pack(m.UseEntries("card", [KEY] * 5)) + pack(m.UseEntries("card", [KEY])))
    assert arrival.failure is None and arrival.replies == b""
    assert [message for message, _ in arrival.messages] == [m.UseEntries("card", [KEY])]


def test_a_message_over_the_daemons_limit_is_not_sent() -> None:
    pair = Pair.at("greeting", LIMITS)
    limits = ClientLimits(message_bytes_max=1024)
    pair.client.receive_data(pack(welcome(limits)))
    with pytest.raises(MessageTooLarge, match=r"Evict of \d+ bytes; message_bytes_max is 1024"):
        pair.client.send(m.Evict(2, [KEY] * 40))


# ---- unknown messages


def test_an_unknown_request_is_answered_and_the_connection_goes_on(attached: Pair) -> None:
    unknown = msgpack.packb({"type": "Frobnicate", "id": 77, "fds": 2})
    arrival = attached.server.receive_data(unknown + pack(m.RequestClaim(5, KEY)), (101, 102))
    assert [message.id for message, _ in arrival.messages] == [5]
    assert arrival.discarded == [101, 102]
    assert [(told["id"], told["code"]) for told in read(arrival.replies)] == [(77, "BadMessage")]
    assert arrival.failure is None


# ---- descriptors


@pytest.mark.parametrize(
    ("sent", "fds", "taken", "said"),
    [
        ([m.Doorbell(), m.OpenInbox(20, 4096), m.Renew([1]), m.OpenInbox(21, 4096)], (7, 8), [(), (7,), (), (8,)], ""),
        ([m.OpenInbox(20, 4096)], (), [], "OpenInbox declares 1 descriptors, 0 came with it"),
        ([m.RequestClaim(5, KEY)], (7,), [()], "no message declares the last 1 descriptors"),
    ],
    ids=["declared", "missing", "undeclared"],
)
def test_descriptors_go_to_the_messages_that_declare_them_or_are_handed_back(
    attached: Pair, sent: list[Message], fds: tuple[int, ...], taken: list[tuple[int, ...]], said: str
) -> None:
    arrival = attached.server.receive_data(b"".join(map(pack, sent)), fds)
    assert [with_it for _, with_it in arrival.messages] == taken
    assert sum(taken, ()) + tuple(arrival.discarded) == fds
    assert said in str(arrival.failure) if said else arrival.failure is None


@pytest.mark.parametrize("side", ["server", "client"])
def test_descriptors_that_cannot_be_opened_end_the_connection_with_the_limit(side: str) -> None:
    connection = Pair.at("attaching", LIMITS).server if side == "server" else Pair.at("attaching").client
    arrival = connection.receive_data(pack(ATTACHED), (101, 102), ProcessLimit("its limit is 64 (RLIMIT_NOFILE)"))
    assert isinstance(arrival.failure, ProcessLimit) and connection.closed
    assert (arrival.messages, arrival.discarded) == ([], [101, 102])
    assert [told["code"] for told in read(arrival.replies)] == ["ProcessLimit"] * (side == "server")


def test_only_the_first_message_of_a_call_brings_descriptors(attached: Pair) -> None:
    """Else a call that is cut between two messages brings descriptors that nothing declares yet."""
    with pytest.raises(AssertionError):
        attached.client.send(m.Renew([1]), m.OpenInbox(20, 4096), fds=1)
    data = attached.client.send(m.OpenInbox(20, 4096), m.Renew([1]), m.Clear(21), fds=1)
    taken = []
    for at in range(len(data)):
        arrival = attached.server.receive_data(data[at : at + 1], (101,) if at == 0 else ())
        assert arrival.failure is None
        taken += arrival.messages
    assert [fds for _, fds in taken] == [(101,), (), ()]


# ---- the status socket


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_nothing_on_the_status_socket_can_change_anything(request_: Message) -> None:
    server = Connection.status_server(ClientLimits())
    arrival = server.receive_data(pack(request_), ())
    assert arrival.messages == []
