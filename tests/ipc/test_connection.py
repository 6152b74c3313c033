"""What either side may say when, what happens to descriptors, and that no peer can break it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.errors import (
    DaemonUnavailable,
    LimitReached,
    MessageTooLarge,
    ProcessLimit,
    ProtocolError,
    TensordError,
    UsageError,
    VersionMismatch,
)
from tensord.ipc.messages import control as m
from tensord.ipc.messages.control import PROTOCOL_VERSION, ClientLimits, Message
from tensord.ipc.messages.declared import declared
from tensord.ipc.messages.modes import Mode, Tier
from tensord.ipc.messages.schema import KEYS_MAX
from tensord.ipc.wire.connection import FDS_MAX, Arrival, Connection
from tensord.ipc.wire.frames import CONTROL_BYTES_MAX, FrameReader, pack, unpack
from tensord.ipc.wire.states import (
    ANSWERED_BY,
    CONTROL_ALLOWED,
    CONTROL_ANSWERS,
    CONTROL_REQUESTS,
    PUSHES,
    STATUS_ANSWERS,
    STATUS_REQUESTS,
    ConnectionState,
)

KEY = b"k" * 32
LIMITS = ClientLimits(requests_in_flight_max=8, keys_per_request_max=4)
HELLO = m.Hello(1, PROTOCOL_VERSION, "test", 42, True)
WELCOME = m.Welcome(1, PROTOCOL_VERSION, "0.1", "i", 1, LIMITS)
ATTACHED = m.Attached(2, 1, 0, 4096, 4096)

REQUESTS: list[Message] = [
    HELLO,
    m.Attach(2),
    m.OpenInbox(3, 4096),
    m.AskForGrants(4, [4096, 64], [1]),
    m.ReturnGrants([2]),
    m.Doorbell(),
    m.OpenRing(42),
    m.RequestClaim(5, KEY),
    m.FetchRun(57, [KEY]),
    m.Renew([1]),
    m.Abandon(1),
    m.Abandon(2, m.ErrorBody("ObjectTooLarge", "17000 nodes")),
    m.Evict(6, [KEY]),
    m.Touch(7, [KEY]),
    m.Clear(8),
    m.Invalidate(9, b"n" * 8, 0),
    m.Pin(10, KEY, 1.0),
    m.Unpin(11, KEY),
    m.Limit(12, 4096),
    m.MatchPrefix(33, KEY[:8], 0, 4096),
    m.EvictPrefixes(34, KEY[:8]),
    m.AgentTurn(35, "coder", "tool_call"),
    m.NameAgent("coder"),
    m.Subscribe(13),
    m.OpenDevice(14, "0000:65:00.0"),
    m.RegisterEntry(15, "0000:65:00.0", KEY, 4096, 10, "planner", 3),
    m.UseEntries("0000:65:00.0", [KEY, KEY]),
    m.ReleaseEntries(16, "0000:65:00.0", [KEY]),
    m.AcknowledgeOrder(17, "0000:65:00.0", 1, [KEY], [], [], 4096),
    m.DeclareBaseline(44, "0000:65:00.0", 72 << 30),
    m.MakeRoom(45, "0000:65:00.0", 8 << 30, 600.0, 60.0),
    m.EndRoom(46, "0000:65:00.0"),
    m.ReserveDevice(18, "0000:65:00.0", 4096, 1.5),
    m.ReleaseReservation(19, 1),
    m.WithdrawReservation(47, 19),
    m.ReadDevice("0000:65:00.0", 1, 2),
    m.RegisterWorkflow(20, "nightly", [m.Step("planner", 0), m.Step("writer", 1, ["planner"], 100, True)]),
    m.AdvanceWorkflow(21, "nightly", 1),
    m.EndWorkflow(22, "nightly"),
    m.RequestsArrived("0000:65:00.0", 2),
    m.RequestCompleted("0000:65:00.0", 0.5, 3),
]
UNANSWERED = {
    m.ReturnGrants,
    m.Doorbell,
    m.NameAgent,
    m.Renew,
    m.Abandon,
    m.UseEntries,
    m.ReadDevice,
    m.RequestsArrived,
    m.RequestCompleted,
}


def read(data: bytes | bytearray) -> list[Any]:
    return [unpack(each) for each in FrameReader().feed(bytes(data))]


class Pair:
    """A client's and a server's connection, each fed with what the other sends."""

    def __init__(self) -> None:
        self.server = Connection.control_server(LIMITS)
        self.client = Connection.control_client()

    def ask(self, *messages: Message, fds: tuple[int, ...] = ()) -> Arrival:
        return self.server.receive_data(self.client.send(*messages, fds=len(fds)), fds)

    def answer(self, *messages: Message, fds: tuple[int, ...] = ()) -> Arrival:
        return self.client.receive_data(self.server.send(*messages, fds=len(fds)), fds)

    def to(self, state: ConnectionState) -> Pair:
        steps: list[tuple[ConnectionState, Callable[[], Arrival]]] = [
            (ConnectionState.GREETING, lambda: self.ask(HELLO)),
            (ConnectionState.GREETED, lambda: self.answer(WELCOME)),
            (ConnectionState.ATTACHING, lambda: self.ask(m.Attach(2))),
            (ConnectionState.ATTACHED, lambda: self.answer(ATTACHED, fds=(7, 8, 9))),
        ]
        for reached, step in steps:
            if self.server.state is state:
                break
            step()
            assert self.server.state is self.client.state is reached
        assert self.server.state is state
        return self

    def check(self) -> None:
        self.server.check_invariants()
        self.client.check_invariants()


@pytest.fixture
def attached() -> Any:
    pair = Pair().to(ConnectionState.ATTACHED)
    yield pair
    pair.check()


def test_the_tables_know_every_message() -> None:
    requests = {*CONTROL_REQUESTS.values(), *STATUS_REQUESTS.values()}
    answers = {*CONTROL_ANSWERS.values(), *STATUS_ANSWERS.values()}
    assert {type(request) for request in REQUESTS} == set(CONTROL_REQUESTS.values())
    assert requests - set(ANSWERED_BY) == UNANSWERED
    assert answers - PUSHES - {m.Error} == set(ANSWERED_BY.values())


@pytest.mark.parametrize("state", list(CONTROL_ALLOWED)[:-1], ids=str)
@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_a_request_out_of_turn_is_refused_with_what_to_do(state: ConnectionState, request_: Message) -> None:
    pair = Pair().to(state)
    fds = tuple(range(100, 100 + getattr(request_, "fds", 0)))
    arrival = pair.server.receive_data(pack(request_), fds)
    if type(request_) in CONTROL_ALLOWED[state]:
        assert arrival.messages == [(request_, fds)]
        assert arrival.failure is None
        pair.client.send(request_, fds=len(fds))
        return
    assert arrival.messages == []
    assert arrival.discarded == list(fds)
    assert type(arrival.failure) is ProtocolError
    assert pair.server.closed
    assert str(arrival.failure).startswith(f"{type(request_).__name__} on a connection that is")
    assert any(word in str(arrival.failure) for word in ("send Hello", "wait for", "send Attach")) or (
        state is ConnectionState.ATTACHED and "connect anew" in str(arrival.failure)
    )
    told = read(arrival.replies)
    assert told == [{"type": "Error", "id": None, "code": "ProtocolError", "text": str(arrival.failure)}]
    with pytest.raises(UsageError, match=type(request_).__name__):
        pair.client.send(request_, fds=len(fds))


def test_a_command_asks_the_governor_without_a_lane() -> None:
    governor = {*declared(m.GovernorRequest), *declared(m.GaugeRequest)}
    assert governor <= CONTROL_ALLOWED[ConnectionState.GREETED]
    assert m.RequestClaim not in CONTROL_ALLOWED[ConnectionState.GREETED]


@pytest.mark.parametrize("message", [m.Done(5), m.PutRefused(1), m.Order(1, "card", "drop", [KEY], "pressure")])
def test_a_client_sends_no_answers_and_no_pushes_and_a_server_no_requests(attached: Pair, message: Message) -> None:
    name = type(message).__name__
    with pytest.raises(UsageError, match=f"{name} on a connection that is"):
        attached.client.send(message)
    arrival = attached.server.receive_data(pack(message))
    assert arrival.messages == [] and b"unknown message type" in arrival.replies
    assert not attached.server.closed, "it may be a word of a later release"
    arrival = attached.client.receive_data(pack(m.Evict(5, [KEY])))
    assert arrival.messages == [] and not arrival.replies


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1])
@pytest.mark.parametrize("serving", [True, False])
def test_another_version_is_refused_with_both_named(version: int, serving: bool) -> None:
    # Of another version only the type and the version need to be as we know them.
    pair = Pair()
    if serving:
        found = pair.server.receive_data(msgpack.packb({"type": "Hello", "protocol": version}))
    else:
        pair.to(ConnectionState.GREETING)
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
    pair = Pair().to(ConnectionState.GREETING)
    pair.answer(m.Error(1, "LimitReached", "clients_max"))
    assert pair.client.closed
    assert pair.server.closed
    with pytest.raises(DaemonUnavailable, match="connect anew"):
        pair.client.send(HELLO)

    pair = Pair().to(ConnectionState.ATTACHING)
    pair.answer(m.Error(2, "LimitReached", "lanes_max"))
    assert pair.client.state is pair.server.state is ConnectionState.GREETED
    pair.ask(m.Attach(3))
    pair.check()


# ---- requests and their answers


def test_a_wait_keeps_the_request_open_until_it_is_answered_again(attached: Pair) -> None:
    attached.ask(m.RequestClaim(5, KEY))
    attached.answer(m.Claimed(5, "wait"))
    assert len(attached.client._open) == 1
    attached.answer(m.Claimed(5, "hit"))
    assert len(attached.client._open) == 0
    with pytest.raises(UsageError, match="not open"):
        attached.server.send(m.Claimed(5, "hit"))


def test_an_open_id_cannot_be_used_again(attached: Pair) -> None:
    attached.ask(m.RequestClaim(5, KEY))
    with pytest.raises(UsageError, match="id 5, which is still open"):
        attached.client.send(m.Evict(5, [KEY]))
    arrival = attached.server.receive_data(pack(m.Evict(5, [KEY])))
    assert "id 5, which is still open: choose another" in str(arrival.failure)


def test_an_answer_of_the_wrong_kind_is_refused(attached: Pair) -> None:
    attached.ask(m.RequestClaim(5, KEY))
    with pytest.raises(UsageError, match="Limited does not answer RequestClaim"):
        attached.server.send(m.Limited(5, 1, 2))
    arrival = attached.client.receive_data(pack(m.Limited(5, 1, 2)))
    assert type(arrival.failure) is ProtocolError
    assert arrival.replies == b""  # only a server tells


def test_refusals_and_the_bell_come_unasked_and_end_no_request(attached: Pair) -> None:
    with pytest.raises(UsageError):
        attached.server.send(m.GrantsLent(4, []))
    attached.ask(m.AskForGrants(4, [100]))
    told = attached.answer(m.PutRefused(4), m.Settled(), m.PutRefused(9, m.ErrorBody("StoreFull", "no room")))
    assert len(told.messages) == 3 and len(attached.client._open) == 1
    attached.answer(m.GrantsLent(4, [(1, 0, 4096, bytes(8), 3, bytes(8))]))
    assert len(attached.client._open) == 0


def test_of_messages_sent_together_all_are_sent_or_none(attached: Pair) -> None:
    most = LIMITS.requests_in_flight_max
    claims = [m.RequestClaim(number, KEY) for number in range(most + 1)]
    with pytest.raises(LimitReached):
        attached.client.send(*claims)
    with pytest.raises(UsageError, match="still open"):
        attached.client.send(claims[0], claims[0])
    attached.check()
    attached.ask(*claims[:most])


def test_requests_in_flight_are_limited_on_both_sides(attached: Pair) -> None:
    limit = LIMITS.requests_in_flight_max
    for number in range(limit):
        assert attached.ask(m.RequestClaim(number, KEY)).failure is None
    with pytest.raises(LimitReached, match=f"requests_in_flight_max, which is {limit}: wait"):
        attached.client.send(m.RequestClaim(limit, KEY))
    attached.check()
    arrival = attached.server.receive_data(pack(m.RequestClaim(limit, KEY)))
    assert type(arrival.failure) is ProtocolError
    assert f"requests_in_flight_max, which is {limit}: wait" in str(arrival.failure)


def test_too_many_keys_are_refused_and_the_connection_goes_on(attached: Pair) -> None:
    many = m.Evict(5, [KEY] * 5)
    with pytest.raises(LimitReached, match="5 keys; keys_per_request_max is 4: ask in several"):
        attached.client.send(many)
    arrival = attached.server.receive_data(pack(many) + pack(m.Evict(6, [KEY] * 4)))
    assert [message.id for message, _ in arrival.messages] == [6]
    assert [(told["id"], told["code"]) for told in read(arrival.replies)] == [(5, "LimitReached")]


def test_a_refused_message_without_an_answer_gets_none(attached: Pair) -> None:
    """An error without an id would be taken for the end of the connection."""
    arrival = attached.server.receive_data(pack(m.UseEntries("card", [KEY] * 5)) + pack(m.UseEntries("card", [KEY])))
    assert arrival.failure is None and arrival.replies == b""
    assert [message for message, _ in arrival.messages] == [m.UseEntries("card", [KEY])]


@pytest.mark.parametrize(
    "largest",
    [
        m.Order((1 << 63) - 1, "d" * 64, "offload", [KEY] * KEYS_MAX, "r" * 128),
        m.AcknowledgeOrder((1 << 63) - 1, "d" * 64, 1, [KEY] * KEYS_MAX, [], [], 1 << 48),
        m.UseEntries("d" * 64, [KEY] * KEYS_MAX),
        m.Modes(1, [m.TierState(f"{n:04}:65:00.0", Tier.DEVICE, Mode.EMERGENCY, 1 << 48, 1 << 48) for n in range(256)]),
    ],
    ids=lambda message: type(message).__name__,
)
def test_the_largest_messages_fit_into_a_frame(largest: Message) -> None:
    assert list(FrameReader(CONTROL_BYTES_MAX).feed(pack(largest))) == [pack(largest)]


def test_a_message_over_the_daemons_limit_is_not_sent() -> None:
    pair = Pair().to(ConnectionState.GREETING)
    limits = ClientLimits(message_bytes_max=1024)
    pair.client.receive_data(pack(m.Welcome(1, PROTOCOL_VERSION, "0.1", "i", 1, limits)))
    with pytest.raises(MessageTooLarge, match=r"Evict of \d+ bytes; message_bytes_max is 1024"):
        pair.client.send(m.Evict(2, [KEY] * 40))
    assert len(pair.client._open) == 0


def test_an_unsent_request_can_be_withdrawn(attached: Pair) -> None:
    asked, bell = m.AskForGrants(4, [100]), m.Doorbell()
    attached.client.send(asked, bell)
    attached.client.revert_send(asked, bell)
    attached.check()
    assert len(attached.client._open) == 0
    attached.client.send(asked)
    attached.client.send(bell)
    attached.client.revert_send(bell)
    attached.check()
    assert len(attached.client._open) == 1


# ---- unknown messages


def test_an_unknown_request_is_answered_and_the_connection_goes_on(attached: Pair) -> None:
    unknown = msgpack.packb({"type": "Frobnicate", "id": 77, "fds": 2})
    arrival = attached.server.receive_data(unknown + pack(m.RequestClaim(5, KEY)), (101, 102))
    assert [message.id for message, _ in arrival.messages] == [5]
    assert arrival.discarded == [101, 102]
    assert [(told["id"], told["code"]) for told in read(arrival.replies)] == [(77, "BadMessage")]
    assert arrival.failure is None


def test_an_unknown_answer_is_passed_over(attached: Pair) -> None:
    arrival = attached.client.receive_data(msgpack.packb({"type": "Mode", "mode": "relaxed"}))
    assert not arrival.messages
    assert not arrival.replies
    assert arrival.failure is None


# ---- descriptors


def test_descriptors_go_to_the_messages_that_declare_them(attached: Pair) -> None:
    one, two = m.OpenInbox(20, 4096), m.OpenInbox(21, 4096)
    stream = b"".join(map(pack, [m.RequestClaim(19, KEY), one, m.Renew([1]), two]))
    arrival = attached.server.receive_data(stream, (101, 102))
    assert [fds for _, fds in arrival.messages] == [(), (101,), (), (102,)]
    assert arrival.discarded == []


def test_descriptors_may_come_before_their_message_is_whole(attached: Pair) -> None:
    data = pack(m.OpenInbox(20, 4096))
    assert attached.server.receive_data(data[:1], (101,)).messages == []
    arrival = attached.server.receive_data(data[1:])
    assert [fds for _, fds in arrival.messages] == [(101,)]


def test_a_missing_descriptor_is_refused(attached: Pair) -> None:
    arrival = attached.server.receive_data(pack(m.OpenInbox(20, 4096)))
    assert "OpenInbox declares 1 descriptors, 0 came with it" in str(arrival.failure)


def test_an_undeclared_descriptor_is_refused_and_handed_back(attached: Pair) -> None:
    arrival = attached.server.receive_data(pack(m.RequestClaim(5, KEY)), (101,))
    assert [message.id for message, _ in arrival.messages] == [5]
    assert "no message declares the last 1 descriptors" in str(arrival.failure)
    assert arrival.discarded == [101]


def test_too_many_descriptors_are_refused_and_handed_back(attached: Pair) -> None:
    fds = tuple(range(101, 102 + FDS_MAX))
    arrival = attached.server.receive_data(pack(m.OpenInbox(20, 4096))[:-1], fds)
    assert f"at most {FDS_MAX}" in str(arrival.failure)
    assert arrival.discarded == list(fds)


@pytest.mark.parametrize("whole", [False, True])
def test_a_request_whose_descriptor_the_daemon_cannot_open_is_refused_alone(attached: Pair, whole: bool) -> None:
    data = attached.client.send(m.OpenInbox(20, 4096), m.Clear(22), fds=1)
    limit = ProcessLimit("its limit is 64 (RLIMIT_NOFILE)")
    arrivals = [attached.server.receive_data(data[: len(data) if whole else 3], (), limit)]
    arrivals.append(attached.server.receive_data(data[len(data) if whole else 3 :]))
    assert [message for arrival in arrivals for message, _ in arrival.messages] == [m.Clear(22)]
    assert all(arrival.failure is None and not arrival.discarded for arrival in arrivals)
    told = attached.client.receive_data(b"".join(bytes(arrival.replies) for arrival in arrivals))
    ((error, _),) = told.messages
    assert (error.id, error.code) == (20, "LimitReached")
    assert "its limit is 64" in error.text
    again = attached.client.send(m.OpenInbox(20, 4096), fds=1)
    assert [fds for _, fds in attached.server.receive_data(again, (101,)).messages] == [(101,)]


def test_an_answer_whose_descriptor_the_client_cannot_open_is_an_error_in_its_place(attached: Pair) -> None:
    attached.server.receive_data(attached.client.send(m.OpenRing(20)))
    attached.server.receive_data(attached.client.send(m.OpenRing(21)))
    data = attached.server.send(m.WritableRing(20), fds=1)
    lost = attached.client.receive_data(data, (), ProcessLimit("its limit is 64 (RLIMIT_NOFILE)"))
    assert lost.failure is None
    ((error, fds),) = lost.messages
    assert (error.id, error.code, fds) == (20, "ProcessLimit", ())
    data = attached.server.send(m.WritableRing(21), fds=1)
    assert [fds for _, fds in attached.client.receive_data(data, (102,)).messages] == [(102,)]


def test_descriptors_that_came_with_lost_ones_are_handed_back() -> None:
    client = Connection.control_client()
    client.send(HELLO)
    client.receive_data(pack(WELCOME))
    client.send(m.Attach(2))
    arrival = client.receive_data(pack(ATTACHED), (101, 102), ProcessLimit("its limit is 64 (RLIMIT_NOFILE)"))
    assert arrival.discarded == [101, 102] and arrival.failure is None
    assert [(message.id, message.code) for message, _ in arrival.messages] == [(2, "ProcessLimit")]


def test_descriptors_that_nobody_took_come_back_on_close(attached: Pair) -> None:
    attached.server.receive_data(pack(m.OpenInbox(20, 4096))[:1], (101,))
    assert attached.server.close() == [101]
    assert attached.server.close() == []
    assert attached.server.receive_data(b"x", (102,)).discarded == [102]


def test_declared_and_given_descriptors_must_agree(attached: Pair) -> None:
    for given_, message in (
        (0, m.OpenInbox(20, 4096)),
        (2, m.OpenInbox(20, 4096)),
        (1, m.Clear(9)),
    ):
        with pytest.raises(UsageError, match=f"{given_} descriptors given"):
            attached.client.send(message, fds=given_)
    assert len(attached.client._open) == 0


def test_only_the_first_message_of_a_call_brings_descriptors(attached: Pair) -> None:
    """Else a call that is cut between two messages brings descriptors that nothing declares yet."""
    with pytest.raises(UsageError, match="OpenInbox brings descriptors: send it first"):
        attached.client.send(m.Renew([1]), m.OpenInbox(20, 4096), fds=1)
    data = attached.client.send(m.OpenInbox(20, 4096), m.Renew([1]), m.Clear(21), fds=1)
    taken = []
    for at in range(len(data)):
        arrival = attached.server.receive_data(data[at : at + 1], (101,) if at == 0 else ())
        assert arrival.failure is None
        taken += arrival.messages
    assert [fds for _, fds in taken] == [(101,), (), ()]


# ---- the status socket


def test_events_go_to_those_who_watch() -> None:
    server, client = Connection.status_server(ClientLimits()), Connection.status_client()
    with pytest.raises(UsageError, match="Watch"):
        server.send(m.Event({"event": "put"}))
    server.receive_data(client.send(m.Watch(1)))
    arrival = client.receive_data(server.send(m.Document(1, {}), m.Event({"event": "put"}, 3)))
    assert [message for message, _ in arrival.messages][1] == m.Event({"event": "put"}, 3)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_nothing_on_the_status_socket_can_change_anything(request_: Message) -> None:
    server = Connection.status_server(ClientLimits())
    arrival = server.receive_data(pack(request_), ())
    assert arrival.messages == []


# ---- hostile peers


def conversation() -> tuple[bytes, int]:
    """A valid stream of requests after Attached, and how many descriptors it declares."""
    messages = [request for request in REQUESTS if type(request) not in (m.Hello, m.Attach)]
    return b"".join(map(pack, messages)), sum(getattr(x, "fds", 0) for x in messages)


mutations = st.lists(
    st.tuples(
        st.sampled_from(["set", "cut", "insert", "repeat"]),
        st.integers(0, 5000),
        st.integers(1, 60),
        st.binary(min_size=1, max_size=8),
    ),
    max_size=6,
)


def mutate(stream: bytes, changes: list[tuple[str, int, int, bytes]]) -> bytes:
    data = bytearray(stream)
    for what, where, length, content in changes:
        at = where % (len(data) + 1)
        if what == "set":
            data[at : at + len(content)] = content
        elif what == "cut":
            del data[at : at + length]
        elif what == "insert":
            data[at:at] = content
        else:
            data[at:at] = data[max(0, at - length) : at] * 3
    return bytes(data)


class Hostile:
    """Feeds a connection as a socket would and accounts for every descriptor."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.given = 0
        self.back: list[int] = []
        self.told = bytearray()
        self.failures: list[TensordError] = []

    def feed(self, data: bytes, fds: int) -> None:
        numbers = range(self.given, self.given + fds)
        self.given += fds
        arrival = self.connection.receive_data(data, tuple(numbers))
        self.back += [fd for _, taken in arrival.messages for fd in taken] + arrival.discarded
        self.told += arrival.replies
        if arrival.failure is not None:
            self.failures.append(arrival.failure)
        self.connection.check_invariants()

    def check(self) -> None:
        self.back += self.connection.close()
        assert sorted(self.back) == list(range(self.given))
        assert len(self.failures) <= 1
        if self.connection.serving:
            last = [told for told in read(self.told) if told["id"] is None][-1:]
            for failure in self.failures:
                assert last[0]["code"] == failure.code
        assert self.connection.held_bytes <= 65_536


@pytest.mark.parametrize("side", ["control", "status", "client"])
@settings(max_examples=150)
@given(
    changes=mutations,
    cuts=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 3))),
    noise=st.binary(max_size=40),
)
def test_mutated_streams_end_in_an_answer_or_an_error(
    side: str,
    changes: list[tuple[str, int, int, bytes]],
    cuts: list[tuple[int, int]],
    noise: bytes,
) -> None:
    stream, fds = conversation()
    if side == "control":
        connection = Pair().to(ConnectionState.ATTACHED).server
    elif side == "client":
        connection = Pair().to(ConnectionState.ATTACHED).client
    else:
        connection = Connection.status_server(LIMITS)
    hostile = Hostile(connection)
    data = mutate(stream, changes) + noise
    at = 0
    hostile.feed(data[:1], fds)
    for size, more in cuts:
        hostile.feed(data[at + 1 : at + 1 + size], more)
        at += size
    hostile.feed(data[at + 1 :], 0)
    hostile.check()
