"""The messages between the governor and its clients: modes, device entries, orders, workflows, requests.

A device and its gauge have the same name: the PCI address, such as `0000:65:00.0`. The host's gauge is named `host`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, get_args

from msgspec import Meta, Struct, ValidationError, convert, field
from msgspec.structs import force_setattr

from ...errors import BadGraph, shown
from .declared import Answer, Counted, Done, GaugeRequest, GovernorRequest, Question, Reply
from .modes import Mode, Tier
from .schema import (
    AGENT_NAME_CHARS_MAX,
    Bytes,
    Count,
    Key,
    Keys,
    Milliseconds,
    Name,
    Seconds,
    SecondsOrNone,
    SomeBytes,
    Text,
    Token,
)

GAUGES_MAX: Final = 1024
GAUGE_CHARS_MAX: Final = 64
WORKFLOW_CHARS_MAX: Final = 128
ARRIVALS_MAX: Final = 1_000_000
DEVICE_BLOCKS_MAX: Final = 1 << 32
STEPS_MAX: Final = 1024
DEPENDENCIES_MAX: Final = 64

GaugeName = Annotated[str, Meta(min_length=1, max_length=GAUGE_CHARS_MAX)]
"""The name of a device, or `host`."""
RoomOutcome = Literal["freed", "nothing", "left alone", "asked", "failed"]
WorkflowName = Annotated[str, Meta(min_length=1, max_length=WORKFLOW_CHARS_MAX)]


class TierState(Struct, frozen=True):
    """The current state of one gauge. `refuses`: no new entries are accepted until the mode is left. `baseline_bytes`:
    the used bytes that are held by plan; the mode is about the rest.

    Example:
        >>> host = cache.modes()["host"]
        >>> host.tier == "host", host.total_bytes > 0
        (True, True)
    """

    gauge: GaugeName
    tier: Tier
    mode: Mode
    used_bytes: Bytes
    total_bytes: Bytes
    refuses: bool = False
    baseline_bytes: Bytes = 0


# ---- modes


class Modes(Reply, frozen=True):
    """Answers Subscribe with the states of all gauges. Empty before the daemon's first sample."""

    tiers: Annotated[list[TierState], Meta(max_length=GAUGES_MAX)]


class ModeChanged(Answer, frozen=True):
    """A push to subscribed clients: a gauge changed its mode, or is new. `before`: for a new gauge in mode relaxed it
    is relaxed too."""

    before: Mode
    state: TierState


class Subscribe(GovernorRequest, Question, frozen=True):
    """Asks for the modes. A ModeChanged follows at every transition, and for every new gauge."""

    answered_by = Modes
    pushes = (ModeChanged,)


# ---- devices and their entries


class DeviceOpened(Reply, frozen=True):
    """Answers OpenDevice. `state` is None while the daemon knows no gauge of that name. `report_every_s`: the interval
    at which the client sends ReadDevice; 0 if the daemon has its own gauge."""

    state: TierState | None = None
    report_every_s: SecondsOrNone = 0.0


class Order(Answer, frozen=True):
    """A push: tells a client to offload, drop or promote entries. `promote`: the client reads the entries from the host
    tier and registers them again. It acknowledges `offload` and `drop` with the number `order`, and no `promote`.
    `reason`: the mode, `budget` or `reservation`."""

    order: Token
    device: GaugeName
    kind: Literal["offload", "drop", "promote"]
    keys: Keys
    reason: Name


class OpenDevice(GovernorRequest, Question, frozen=True):
    """Announces that this client will register entries on `device`. Sent once per device and connection; sending it
    again changes nothing."""

    answered_by = DeviceOpened
    pushes = (Order,)
    device: GaugeName


class Registered(Reply, frozen=True):
    """Answers RegisterEntry if it was not refused."""


class RegisterEntry(GovernorRequest, Question, frozen=True):
    """Registers a tree of tensors in this client's VRAM. Of a key that this client has registered, it is a use. `uses`:
    those under the former daemon. `cost_ms`: the time that computing the tensors took; 0: not known, and estimated from
    `tokens`. `new_bytes`: the memory that was taken for it, and that nothing else of this client has counted."""

    answered_by = Registered
    device: GaugeName
    key: Key
    size_bytes: SomeBytes
    tokens: Count = 0
    agent: Name = ""
    uses: Count = 0
    cost_ms: Milliseconds = 0.0
    new_bytes: Bytes = 0


class UseEntries(GovernorRequest, frozen=True):
    """Counts one use for each occurrence of a key in `keys`. No answer. Unknown keys are ignored."""

    device: GaugeName
    keys: Keys


class ReleaseEntries(GovernorRequest, Question, frozen=True):
    """Says that this client deleted entries of its own. The answer counts the known ones."""

    answered_by = Counted
    device: GaugeName
    keys: Keys


class AcknowledgeOrder(GovernorRequest, Question, frozen=True):
    """Reports the outcome of an order for all of its entries or for some, each in exactly one list. `offloaded`: now in
    the ring. `dropped`: deleted without a copy there. `kept`: in use by this client, so they stay device entries.
    `freed_bytes`: the memory returned to the driver for the entries of this message."""

    answered_by = Done
    device: GaugeName
    order: Token
    offloaded: Keys = field(default_factory=list)
    dropped: Keys = field(default_factory=list)
    kept: Keys = field(default_factory=list)
    freed_bytes: Bytes = 0


class Reserved(Reply, frozen=True):
    """Answers ReserveDevice. `lasts_s`: the time until the reservation expires."""

    reservation: Token
    lasts_s: SecondsOrNone


class ReserveDevice(GovernorRequest, Question, frozen=True):
    """Reserves free memory of a device for `for_s` at most. One that does not fit waits up to `wait_s` for its answer.
    Requests of a device are granted in order of arrival. Cached entries leave for them. `promotes`: the memory is for
    an entry of the host tier, so the device must stay below pressure. Never waits. `held`: the client has held the
    memory since before this connection, for `for_s` more. Granted at once, whatever the gauge shows."""

    answered_by = Reserved
    device: GaugeName
    size_bytes: SomeBytes
    for_s: Seconds
    wait_s: SecondsOrNone = 0.0
    promotes: bool = False
    held: bool = False


class ReleaseReservation(GovernorRequest, Question, frozen=True):
    """Ends a reservation: the client has allocated the memory, or no longer needs it."""

    answered_by = Done
    reservation: Token


class RoomStep(Struct, frozen=True):
    """What one holder of a device's memory did for a room: the cached tensors, or a neighbour by its name.
    `freed_bytes`: the fall of the device's gauge during the step. `outcome`: "freed"; "nothing", if nothing could go,
    or a neighbour accepted the request and the gauge did not fall; "left alone", if it is busy; "asked", if it has not
    answered yet; "failed". `why`: the reason, unless it freed; then what a neighbour keeps all the same."""

    who: Name
    outcome: RoomOutcome
    freed_bytes: Bytes = 0
    why: Text = ""


class RoomMade(Reply, frozen=True):
    """Answers MakeRoom. `made`: the bytes are free, and reserved for `lasts_s`. Else `missing_bytes` are not free, and
    `why` has the state of the device."""

    made: bool
    lasts_s: SecondsOrNone = 0.0
    missing_bytes: Bytes = 0
    steps: Annotated[list[RoomStep], Meta(max_length=STEPS_MAX)] = field(default_factory=list)
    why: Text = ""


class MakeRoom(GovernorRequest, Question, frozen=True):
    """Makes room on a device: cached entries leave, then the configured neighbours are asked for theirs, until
    `size_bytes` are free. They are reserved for `for_s` at most, also after the end of this connection. `wait_s`: the
    most seconds until the answer."""

    answered_by = RoomMade
    device: GaugeName
    size_bytes: SomeBytes
    for_s: Seconds
    wait_s: Seconds


class EndRoom(GovernorRequest, Question, frozen=True):
    """Ends the rooms of a device, those that MakeRoom has left and one that is being made. The answer counts them."""

    answered_by = Counted
    device: GaugeName


class ReadDevice(GaugeRequest, frozen=True):
    """A device's memory as the driver reports it to this client, for a daemon without a gauge of its own. No answer.
    `read_at_s`: CLOCK_MONOTONIC as the client began to read; 0: the daemon takes the time of arrival."""

    device: GaugeName
    used_bytes: Bytes
    total_bytes: SomeBytes
    read_at_s: SecondsOrNone = 0.0


# ---- workflows and requests

_FIELDS_ON_THE_WIRE: Final = {
    "agent_id": "agent",
    "step_index": "step",
    "depends_on": "after",
    "estimated_tokens": "tokens",
    "is_optional": "optional",
}
"""Short, because a message may have STEPS_MAX steps."""


_Agent = Annotated[str, Meta(min_length=1, max_length=AGENT_NAME_CHARS_MAX)]
_Agents = Annotated[tuple[_Agent, ...], Meta(max_length=DEPENDENCIES_MAX)]
_Step = tuple[_Agent, _Agents, Count, Count, bool]
"""The fields of an AgentStep, in its order."""


class AgentStep(Struct, frozen=True, omit_defaults=True, rename=_FIELDS_ON_THE_WIRE):
    """One step of a workflow: the agent `agent_id` runs at `step_index`, after the agents in `depends_on`.

    `estimated_tokens`: the number of tokens that the agent will hold at this step; 0 if not known. `is_optional`: the
    workflow can continue without this step.

    Raises BadGraph, which names the field, its value and the accepted values.

    Example:
        >>> step = tensord.AgentStep("coder", depends_on=("planner",), step_index=1, estimated_tokens=4000)
        >>> step.step_index
        1
    """

    agent_id: _Agent
    depends_on: _Agents = ()
    step_index: Count = 0
    estimated_tokens: Count = 0
    is_optional: bool = False

    def __post_init__(self) -> None:
        for name, kind in zip(self.__struct_fields__, get_args(_Step), strict=True):
            given = getattr(self, name)
            try:
                force_setattr(self, name, convert(given, kind))
            except ValidationError as error:
                raise BadGraph(f"{name} = {shown(given)}: {error}") from None
        try:
            "".join((self.agent_id, *self.depends_on)).encode()
        except UnicodeEncodeError:
            raise BadGraph(f"{shown(self)} has lone surrogates, which cannot be sent: leave them out") from None


class RegisterWorkflow(GovernorRequest, Question, frozen=True):
    """Registers a workflow, until EndWorkflow or the end of the client's connection. A second time it replaces the
    steps and keeps the current step."""

    answered_by = Done
    workflow: WorkflowName
    steps: Annotated[list[AgentStep], Meta(min_length=1, max_length=STEPS_MAX)]


class AdvanceWorkflow(GovernorRequest, Question, frozen=True):
    """Sets the current step of a workflow. `step` must not be less than before."""

    answered_by = Done
    workflow: WorkflowName
    step: Count


class EndWorkflow(GovernorRequest, Question, frozen=True):
    """Ends a workflow."""

    answered_by = Done
    workflow: WorkflowName


class RequestsArrived(GovernorRequest, frozen=True):
    """Counts inference requests that arrived at this client, for a device's queueing floor. No answer."""

    device: GaugeName
    count: Annotated[int, Meta(ge=1, le=ARRIVALS_MAX)] = 1


class RequestCompleted(GovernorRequest, frozen=True):
    """Reports one inference request: served in `service_s`, with `blocks` of the device's cache. No answer."""

    device: GaugeName
    service_s: SecondsOrNone
    blocks: Annotated[int, Meta(ge=0, le=DEVICE_BLOCKS_MAX)]
