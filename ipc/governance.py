"""What the governor and its clients say: modes, device entries and orders about them, workflows, requests, drills.

Owns: names and fields, as `messages`, from where all of them can be had too. Gauges and devices go by one name: a
device's gauge is called as the device is (its PCI address, `0000:65:00.0`), the host's `host`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, field

from .declared import Answer, Counted, Done, GaugeRequest, GovernorRequest
from .modes import Mode, Tier
from .schema import Bytes, Count, Id, Key, Keys, Name, Seconds, SecondsOrNone, SomeBytes, Token

STEPS_MAX: Final = 1024
DEPENDENCIES_MAX: Final = 64
GAUGES_MAX: Final = 1024
GAUGE_CHARS_MAX: Final = 64
AGENT_CHARS_MAX: Final = 128
WORKFLOW_CHARS_MAX: Final = 128
ARRIVALS_MAX: Final = 1_000_000
BLOCKS_MAX: Final = 1 << 32

GaugeName = Annotated[str, Meta(min_length=1, max_length=GAUGE_CHARS_MAX)]
"""A device, or `host`."""
AgentName = Annotated[str, Meta(max_length=AGENT_CHARS_MAX)]
"""Empty: no agent's."""
WorkflowName = Annotated[str, Meta(min_length=1, max_length=WORKFLOW_CHARS_MAX)]


_STEP_NAMES: Final = {
    "agent_id": "agent",
    "step_index": "step",
    "depends_on": "after",
    "estimated_tokens": "tokens",
    "is_optional": "optional",
}


class TierState(Struct, frozen=True):
    """One gauge as it stands. `refuses`: nothing new is taken in until the mode is left.

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


class Step(Struct, frozen=True, omit_defaults=True, rename=_STEP_NAMES):
    """One step of a workflow, as `steps.AgentStep` says it. Its names are short on the wire: STEPS_MAX in a message."""

    agent_id: Annotated[str, Meta(min_length=1, max_length=AGENT_CHARS_MAX)]
    step_index: Count
    depends_on: Annotated[list[AgentName], Meta(max_length=DEPENDENCIES_MAX)] = field(default_factory=list)
    estimated_tokens: Count = 0
    is_optional: bool = False


# ---- modes


class Modes(Answer, frozen=True):
    """Answers Subscribe, with every gauge there is; none before the daemon's first sample."""

    id: Id
    tiers: Annotated[list[TierState], Meta(max_length=GAUGES_MAX)]


class ModeChanged(Answer, frozen=True):
    """A push, to whoever subscribed. `before` is the state's mode where the gauge is new, and relaxed."""

    before: Mode
    state: TierState


class Subscribe(GovernorRequest, frozen=True):
    """Answered by Modes; a ModeChanged follows at every transition, and for every new gauge."""

    answered_by = Modes
    pushes = (ModeChanged,)
    id: Id


# ---- devices and their entries


class DeviceOpened(Answer, frozen=True):
    """Answers OpenDevice. `state` is None while no gauge of that name is known.

    `report_every_s`: send ReadDevice so often; 0 where the daemon has a gauge of its own for it.
    """

    id: Id
    state: TierState | None = None
    report_every_s: SecondsOrNone = 0.0


class Order(Answer, frozen=True):
    """A push: what to do with entries. `promote`: get them from the host tier, and register them again.

    `offload` and `drop` are acknowledged, with `order`; `promote` is not. `reason`: the mode, or the budget passed.
    """

    order: Token
    device: GaugeName
    kind: Literal["offload", "drop", "promote"]
    keys: Keys
    reason: Name


class OpenDevice(GovernorRequest, frozen=True):
    """This client will register entries on `device`. Once per device and connection; again is the same as once."""

    answered_by = DeviceOpened
    pushes = (Order,)
    id: Id
    device: GaugeName


class Registered(Answer, frozen=True):
    """Answers RegisterEntry where it was not refused; `renewed`: this client had the key registered."""

    id: Id
    renewed: bool = False


class RegisterEntry(GovernorRequest, frozen=True):
    """A tree of tensors lies in this client's VRAM. Again for a key that it has: its sizes are replaced, its uses kept.

    `uses`: what a former daemon knew of, for an entry that is registered anew after a restart.
    """

    answered_by = Registered
    id: Id
    device: GaugeName
    key: Key
    size_bytes: SomeBytes
    tokens: Count = 0
    agent: AgentName = ""
    uses: Count = 0


class UseEntries(GovernorRequest, frozen=True):
    """No answer. One use for each time that a key stands here; unknown keys are ignored."""

    device: GaugeName
    keys: Keys


class ReleaseEntries(GovernorRequest, frozen=True):
    """This client deleted entries of its own. Answered by how many were known."""

    answered_by = Counted
    id: Id
    device: GaugeName
    keys: Keys


class AcknowledgeOrder(GovernorRequest, frozen=True):
    """What became of an order's entries, all of them or the next few, each in one of the lists.

    `offloaded` lie in the ring now; `dropped` do not; `kept` are in use here, and go on being device entries.
    `freed_bytes`: what the driver got back for these.
    """

    answered_by = Done
    id: Id
    device: GaugeName
    order: Token
    offloaded: Keys = field(default_factory=list)
    dropped: Keys = field(default_factory=list)
    kept: Keys = field(default_factory=list)
    freed_bytes: Bytes = 0


class Reserved(Answer, frozen=True):
    id: Id
    reservation: Token
    lasts_s: SecondsOrNone


class ReserveDevice(GovernorRequest, frozen=True):
    """Sets free memory of a device aside, for `for_s` at most. Answered by Reserved, or by why there is not so much."""

    answered_by = Reserved
    id: Id
    device: GaugeName
    size_bytes: SomeBytes
    for_s: Seconds


class ReleaseReservation(GovernorRequest, frozen=True):
    """The memory was taken, or is not wanted."""

    answered_by = Done
    id: Id
    reservation: Token


class ReadDevice(GaugeRequest, frozen=True):
    """No answer. What the driver tells this client, for a daemon that has no library to ask it."""

    device: GaugeName
    used_bytes: Bytes
    total_bytes: SomeBytes


# ---- workflows and requests


class RegisterWorkflow(GovernorRequest, frozen=True):
    """Ended with EndWorkflow, or with its client. Registering it again replaces its steps and keeps its place."""

    answered_by = Done
    id: Id
    workflow: WorkflowName
    steps: Annotated[list[Step], Meta(min_length=1, max_length=STEPS_MAX)]


class AdvanceWorkflow(GovernorRequest, frozen=True):
    """The workflow is at `step` now; never less than before."""

    answered_by = Done
    id: Id
    workflow: WorkflowName
    step: Count


class EndWorkflow(GovernorRequest, frozen=True):
    answered_by = Done
    id: Id
    workflow: WorkflowName


class RequestsArrived(GovernorRequest, frozen=True):
    """No answer. So many inference requests arrived at this client, for a device's queueing floor."""

    device: GaugeName
    count: Annotated[int, Meta(ge=1, le=ARRIVALS_MAX)] = 1


class RequestCompleted(GovernorRequest, frozen=True):
    """No answer. An inference request was served in `service_s`, holding `blocks` of the device's cache."""

    device: GaugeName
    service_s: SecondsOrNone
    blocks: Annotated[int, Meta(ge=0, le=BLOCKS_MAX)]


# ---- drills


class Drilled(Answer, frozen=True):
    """What follows, or would follow, from a made-up reading."""

    id: Id
    before: Mode
    state: TierState
    offload_entries: Count = 0
    offload_bytes: Bytes = 0
    drop_entries: Count = 0
    drop_bytes: Bytes = 0
    shrink_bytes: Bytes = 0


class Drill(GovernorRequest, frozen=True):
    """A made-up reading. `act`: it replaces the gauge until this connection ends; else nothing follows from it."""

    answered_by = Drilled
    id: Id
    gauge: GaugeName
    used_bytes: Bytes
    total_bytes: SomeBytes
    act: bool = False
