"""What the governor's messages may hold, when they may be said, and which way each goes."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import pytest

from tensord.errors import BadMessage, LimitReached, ProtocolError, UsageError
from tensord.ipc import declared
from tensord.ipc import messages as m
from tensord.ipc.connection import Connection
from tensord.ipc.frames import CONTROL_FRAMES, FrameReader, pack
from tensord.ipc.messages import ClientLimits, Message, decode
from tensord.ipc.modes import LEVELS, Mode, Tier
from tensord.ipc.schema import KEYS_MAX
from tensord.ipc.states import ANSWERED_BY, CONTROL_ALLOWED, CONTROL_ANSWERS, CONTROL_REQUESTS, PUSHES, ConnectionState
from tensord.ipc.steps import DEPENDENCIES_MAX, STEPS_MAX

GOVERNOR = declared.declared(m.GovernorRequest) + declared.declared(m.GaugeRequest)
KEY = b"k" * 32
CARD = "0000:65:00.0"
STATE = m.TierState(CARD, Tier.DEVICE, Mode.WORKFLOW_AWARE, 87, 100)
FULL = m.TierState("host", Tier.HOST, Mode.EMERGENCY, 110, 100, True)

EXCHANGES: list[tuple[Message, Message | None]] = [
    (m.Subscribe(13), m.Modes(13, [STATE, FULL])),
    (m.OpenDevice(14, CARD), m.DeviceOpened(14, STATE, 2.0)),
    (m.OpenDevice(14, CARD), m.DeviceOpened(14)),
    (m.RegisterEntry(15, CARD, KEY, 4096, 10, "planner", 3, 12.5, "kv"), m.Registered(15, True)),
    (m.UseEntries(CARD, [KEY, KEY]), None),
    (m.ReleaseEntries(16, CARD, [KEY]), m.Counted(16, 1)),
    (m.AcknowledgeOrder(17, CARD, 1, [KEY], [KEY], [KEY], 4096, 0.5), m.Done(17)),
    (m.DeclareBaseline(60, CARD, 72 << 30, True), m.Done(60)),
    (m.ReserveDevice(18, CARD, 4096, 1.5, -3, 2.5, True), m.Reserved(18, 7, 1.5)),
    (m.ReleaseReservation(19, 1), m.Done(19)),
    (m.WithdrawReservation(42, 19), m.Done(42)),
    (m.MakeRoom(61, CARD, 4096, 600.0, 60.0), m.RoomMade(61, False, 0.0, 5, [m.RoomStep("x", "failed", 1, "y")], "z")),
    (m.EndRoom(62, CARD), m.Counted(62, 1)),
    (m.ReadDevice(CARD, 1, 2), None),
    (m.RegisterWorkflow(20, "w", [m.Step("a", 0), m.Step("b", 1, ["a"], 100, True)]), m.Done(20)),
    (m.AdvanceWorkflow(21, "w", 1), m.Done(21)),
    (m.EndWorkflow(22, "w"), m.Done(22)),
    (m.RequestsArrived(CARD, 2), None),
    (m.RequestCompleted(CARD, 0.5, 3), None),
    (m.Drill(23, "host", 110, 100, True), m.Drilled(23, Mode.RELAXED, FULL, 1, 2, 3, 4, 5)),
]
REQUESTS = [request for request, _ in EXCHANGES]
PUSHED: list[Message] = [
    m.ModeChanged(Mode.CRITICAL, STATE),
    *(m.Order(1, CARD, kind, [KEY], "pressure") for kind in ("offload", "drop", "promote")),
]


class Pair:
    """A client and a server that have shaken hands, attached or not."""

    def __init__(self, *, attached: bool = False, limits: ClientLimits | None = None) -> None:
        limits = limits or ClientLimits()
        self.server = Connection.control_server(limits)
        self.client = Connection.control_client()
        self.ask(m.Hello(1, m.PROTOCOL_VERSION, "test", 42, True))
        self.tell(m.Welcome(1, m.PROTOCOL_VERSION, "0.1", "i", 1, limits))
        if attached:
            self.ask(m.Attach(2))
            self.client.receive_data(self.server.send(m.Attached(2, 1, 0, 4096, 4096), fds=3), (7, 8, 9))

    def ask(self, message: Message) -> list[Any]:
        arrival = self.server.receive_data(self.client.send(message))
        assert arrival.failure is None
        return [found for found, _ in arrival.messages]

    def tell(self, message: Message) -> list[Any]:
        arrival = self.client.receive_data(self.server.send(message))
        assert arrival.failure is None
        return [found for found, _ in arrival.messages]


@pytest.fixture(params=[False, True], ids=["greeted", "attached"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(attached=request.param)


def name_of(message: Message | None) -> str:
    return type(message).__name__


# ---- the way of each


def test_every_message_of_the_governor_is_tried_here() -> None:
    assert {type(request) for request in REQUESTS} == set(GOVERNOR)
    answers = {type(answer) for _, answer in EXCHANGES if answer is not None}
    assert answers | PUSHES >= set(declared.answers(GOVERNOR)) - {m.Error}
    assert {type(push) for push in PUSHED} == set(declared.answers(GOVERNOR)) & PUSHES


@pytest.mark.parametrize(("request_", "answer"), EXCHANGES, ids=name_of)
def test_a_request_and_its_answer_arrive_unchanged_with_a_lane_and_without(
    pair: Pair, request_: Message, answer: Message | None
) -> None:
    assert pair.ask(request_) == [request_]
    assert len(pair.server._open) == len(pair.client._open) == (answer is not None)
    if answer is not None:
        assert pair.tell(answer) == [answer]
    assert len(pair.server._open) == len(pair.client._open) == 0
    assert (type(request_) in ANSWERED_BY) == (answer is not None)


@pytest.mark.parametrize("request_", [request for request, answer in EXCHANGES if answer is not None], ids=name_of)
def test_any_request_may_be_refused_and_an_answer_of_another_kind_is_not_accepted(
    pair: Pair, request_: Message
) -> None:
    pair.ask(request_)
    number = getattr(request_, "id")  # noqa: B009
    with pytest.raises(UsageError, match="does not answer"):
        pair.server.send(m.Limited(number, 1, 2))
    refusal = m.Error(number, "UnderPressure", "card at 97 %, and emergency begins at 96 %")
    assert pair.tell(refusal) == [refusal]
    assert len(pair.client._open) == 0


@pytest.mark.parametrize("push", PUSHED, ids=name_of)
def test_pushes_go_to_the_client_unasked(pair: Pair, push: Message) -> None:
    assert pair.tell(push) == [push]
    assert len(pair.client._open) == len(pair.server._open) == 0


@pytest.mark.parametrize("message", [*PUSHED, *(answer for _, answer in EXCHANGES if answer)], ids=name_of)
def test_a_client_sends_no_pushes_and_no_answers(pair: Pair, message: Message) -> None:
    with pytest.raises(UsageError, match=f"{name_of(message)} on a connection that is"):
        pair.client.send(message)
    arrival = pair.server.receive_data(pack(message))
    assert arrival.messages == []
    assert b"unknown message type" in arrival.replies
    assert not pair.server.closed, "it may be a word of a later release"


@pytest.mark.parametrize("request_", REQUESTS, ids=name_of)
def test_a_server_sends_no_requests(pair: Pair, request_: Message) -> None:
    arrival = pair.client.receive_data(pack(request_))
    assert arrival.messages == []
    assert not arrival.replies


@pytest.mark.parametrize("request_", REQUESTS, ids=name_of)
def test_the_governor_is_asked_nothing_before_the_greeting(request_: Message) -> None:
    server = Connection.control_server(ClientLimits())
    arrival = server.receive_data(pack(request_))
    assert type(arrival.failure) is ProtocolError
    assert "send Hello first" in str(arrival.failure)
    for state in ConnectionState:
        allowed = state in (ConnectionState.GREETED, ConnectionState.ATTACHING, ConnectionState.ATTACHED)
        assert (type(request_) in CONTROL_ALLOWED.get(state, ())) == allowed


@pytest.mark.parametrize("request_", REQUESTS, ids=name_of)
def test_the_status_socket_takes_none_of_it(request_: Message) -> None:
    assert Connection.status_server(ClientLimits()).receive_data(pack(request_)).messages == []


# ---- ranges

VALID = {name_of(request): msgpack.unpackb(pack(request)) for request in REQUESTS}
NO_SIZES = [-1, 0, 2**48 + 1, 1.0, math.nan, math.inf, True, "4096", None]
NO_COUNTS = [-1, 2**63, 1.0, math.nan, True, None]
NO_STEPS: list[object] = [[], {}, None, [{"agent": "a", "step": 0}] * (STEPS_MAX + 1)]
NO_DEVICES = ["", "x" * 65, b"card", None]


@pytest.mark.parametrize(
    ("name", "field", "bad"),
    [
        *(("RegisterEntry", "tokens", bad) for bad in NO_COUNTS),
        *(("RegisterEntry", "uses", bad) for bad in NO_COUNTS),
        *(("RegisterEntry", "size_bytes", bad) for bad in NO_SIZES),
        *(("RegisterEntry", "device", bad) for bad in NO_DEVICES),
        *(("RegisterEntry", "key", bad) for bad in (b"k" * 31, b"k" * 33, "k" * 32, None)),
        ("RegisterEntry", "agent", "x" * 129),
        *(("OpenDevice", "device", bad) for bad in NO_DEVICES),
        ("UseEntries", "keys", [KEY, b"short"]),
        ("UseEntries", "keys", [KEY] * (KEYS_MAX + 1)),
        ("ReleaseEntries", "keys", [1]),
        *(("AcknowledgeOrder", field, [b"short"]) for field in ("offloaded", "dropped", "kept")),
        *(("AcknowledgeOrder", field, [KEY] * (KEYS_MAX + 1)) for field in ("offloaded", "dropped", "kept")),
        *(("AcknowledgeOrder", "freed_bytes", bad) for bad in (-1, 2**48 + 1, math.nan)),
        *(("AcknowledgeOrder", "order", bad) for bad in (0, -1, 2**63)),
        *(("ReserveDevice", "size_bytes", bad) for bad in NO_SIZES),
        *(("ReserveDevice", "for_s", bad) for bad in (0.0, -1.0, math.nan, math.inf, -math.inf, 1e12, "1", None)),
        ("ReleaseReservation", "reservation", 0),
        *(("ReadDevice", "used_bytes", bad) for bad in (-1, 2**48 + 1, math.nan, math.inf)),
        *(("ReadDevice", "total_bytes", bad) for bad in NO_SIZES),
        *(("Drill", "used_bytes", bad) for bad in (-1, 2**48 + 1, math.nan, math.inf)),
        *(("Drill", "total_bytes", bad) for bad in NO_SIZES),
        *(("Drill", "gauge", bad) for bad in NO_DEVICES),
        ("Drill", "act", 1),
        *(("AdvanceWorkflow", "step", bad) for bad in NO_COUNTS),
        *(("AdvanceWorkflow", "workflow", bad) for bad in ("", "x" * 129, None)),
        *(("RegisterWorkflow", "workflow", bad) for bad in ("", "x" * 129, None)),
        *(("RegisterWorkflow", "steps", bad) for bad in NO_STEPS),
        *(("RequestsArrived", "count", bad) for bad in (0, -1, 1_000_001, math.nan)),
        *(("RequestCompleted", "service_s", bad) for bad in (-1e-9, math.nan, math.inf, -math.inf, 1e12)),
        *(("RequestCompleted", "blocks", bad) for bad in (-1, 2**32 + 1, math.nan, 0.5)),
    ],
)
def test_a_field_out_of_its_range_is_named_and_nothing_is_taken(pair: Pair, name: str, field: str, bad: object) -> None:
    assert field in VALID[name]
    arrival = pair.server.receive_data(msgpack.packb(VALID[name] | {field: bad}))
    assert arrival.messages == []
    assert type(arrival.failure) is BadMessage
    assert str(arrival.failure).startswith(f"{name}: ")
    assert f"`$.{field}" in str(arrival.failure)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("tokens", -1),
        ("tokens", math.nan),
        ("step", -1),
        ("step", 2**63),
        ("agent", ""),
        ("agent", "x" * 129),
        ("after", ["a"] * (DEPENDENCIES_MAX + 1)),
        ("after", ["x" * 129]),
        ("after", "a"),
        ("optional", 1),
    ],
)
def test_a_bad_field_of_a_step_is_named(field: str, bad: object) -> None:
    step = {"agent": "a", "step": 0} | {field: bad}
    with pytest.raises(BadMessage, match=rf"RegisterWorkflow: .*`\$\.steps\[0\]\.{field}"):
        decode(VALID["RegisterWorkflow"] | {"steps": [step]}, CONTROL_REQUESTS)


@pytest.mark.parametrize("bad", ["full", "RELAXED", "", None, 3])
def test_a_mode_or_tier_that_nobody_knows_is_no_message(bad: object) -> None:
    for field in ("mode", "tier"):
        state = msgpack.unpackb(pack(PUSHED[0]))["state"] | {field: bad}
        with pytest.raises(BadMessage, match=rf"ModeChanged: .*`\$\.state\.{field}"):
            decode({"type": "ModeChanged", "before": "relaxed", "state": state}, CONTROL_ANSWERS)
    order = msgpack.unpackb(pack(PUSHED[1])) | {"kind": bad}
    with pytest.raises(BadMessage, match=r"Order: .*`\$\.kind"):
        decode(order, CONTROL_ANSWERS)


def test_every_mode_crosses_by_its_name() -> None:
    assert set(Mode) == {*LEVELS, Mode.WORKFLOW_AWARE}
    for mode in Mode:
        found = msgpack.unpackb(pack(m.ModeChanged(mode, STATE)))
        assert found["before"] == mode.value == str(mode)
        arrived = decode(found, CONTROL_ANSWERS)
        assert isinstance(arrived, m.ModeChanged)
        assert arrived.before is mode


# ---- limits


def test_more_keys_than_a_request_may_have_are_refused_on_both_sides() -> None:
    pair = Pair(limits=ClientLimits(keys_per_request_max=4))
    release = m.ReleaseEntries(5, CARD, [KEY] * 5)
    with pytest.raises(LimitReached, match="ReleaseEntries of 5 keys; keys_per_request_max is 4"):
        pair.client.send(release)
    arrival = pair.server.receive_data(pack(release))
    assert arrival.messages == []
    (told,) = FrameReader().feed(bytes(arrival.replies))
    assert isinstance(told, dict)
    assert (told["id"], told["code"]) == (5, "LimitReached")


def test_a_refused_message_without_an_answer_gets_none() -> None:
    """An error without an id would be taken for the end of the connection."""
    pair = Pair(limits=ClientLimits(keys_per_request_max=4))
    arrival = pair.server.receive_data(pack(m.UseEntries(CARD, [KEY] * 5)) + pack(m.UseEntries(CARD, [KEY])))
    assert arrival.failure is None
    assert arrival.replies == b""
    assert [message for message, _ in arrival.messages] == [m.UseEntries(CARD, [KEY])]


@pytest.mark.parametrize(
    "largest",
    [
        m.Order((1 << 63) - 1, "d" * 64, "offload", [KEY] * KEYS_MAX, "r" * 128),
        m.AcknowledgeOrder((1 << 63) - 1, "d" * 64, 1, [KEY] * KEYS_MAX, [], [], 1 << 48),
        m.UseEntries("d" * 64, [KEY] * KEYS_MAX),
        m.Modes(1, [m.TierState(f"{n:04}:65:00.0", Tier.DEVICE, Mode.EMERGENCY, 1 << 48, 1 << 48) for n in range(256)]),
    ],
    ids=name_of,
)
def test_the_largest_messages_fit_into_a_frame(largest: Message) -> None:
    data = pack(largest)
    assert len(data) <= CONTROL_FRAMES.message_bytes_max
    (found,) = FrameReader().feed(data)
    known: Any = CONTROL_REQUESTS if type(largest) in GOVERNOR else CONTROL_ANSWERS
    assert decode(found, known) == largest


def test_requests_of_the_governor_count_as_requests_in_flight() -> None:
    pair = Pair(limits=ClientLimits(requests_in_flight_max=2))
    pair.ask(m.Subscribe(5))
    pair.ask(m.OpenDevice(6, CARD))
    pair.ask(m.ReadDevice(CARD, 1, 2))
    with pytest.raises(LimitReached, match="requests_in_flight_max, which is 2"):
        pair.client.send(m.EndWorkflow(7, "w"))
