"""tensord: memcached for tensors. The public names; the daemon needs none of them and imports none of their parts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from .client.aio import AsyncClient as AsyncClient
    from .client.cache import Client as Client
    from .client.device.cache import DeviceCache as DeviceCache
    from .client.device.entries import DeviceLease as DeviceLease
    from .client.device.entries import Registration as Registration
    from .client.device.reservation import DeviceReservation as DeviceReservation
    from .client.governor import ModeChange as ModeChange
    from .client.governor import Subscription as Subscription
    from .client.lease import Batch as Batch
    from .client.lease import Lease as Lease
    from .client.namespace import Namespace as Namespace
    from .client.puts import Put as Put
    from .client.reservation import Reservation as Reservation
    from .client.view import Entry as Entry
    from .client.workflow import Workflow as Workflow
    from .errors import TensordError as TensordError
    from .ipc.messages import TierState as TierState
    from .ipc.modes import Mode as Mode
    from .ipc.modes import Tier as Tier
    from .ipc.steps import AgentStep as AgentStep
    from .ipc.steps import AgentStepGraph as AgentStepGraph
    from .shm.tree import Spec as Spec

_PLACES = {
    "AgentStep": ".ipc.steps",
    "AgentStepGraph": ".ipc.steps",
    "AsyncClient": ".client.aio",
    "Batch": ".client.lease",
    "Client": ".client.cache",
    "DeviceCache": ".client.device.cache",
    "DeviceLease": ".client.device.entries",
    "DeviceReservation": ".client.device.reservation",
    "Entry": ".client.view",
    "Lease": ".client.lease",
    "Mode": ".ipc.modes",
    "ModeChange": ".client.governor",
    "Namespace": ".client.namespace",
    "Put": ".client.puts",
    "Registration": ".client.device.entries",
    "Reservation": ".client.reservation",
    "Spec": ".shm.tree",
    "Subscription": ".client.governor",
    "TensordError": ".errors",
    "Tier": ".ipc.modes",
    "TierState": ".ipc.messages",
    "Workflow": ".client.workflow",
}

__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'tensord' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
