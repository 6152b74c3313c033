"""tensord: memcached for tensors. The public names; the daemon needs none of them and imports none of their parts.

Example:
    >>> import numpy as np
    >>> import tensord
    >>> cache = tensord.Client()
    >>> ns = tensord.Namespace(model="my/vlm", revision="9f3c", dtype="float32", processor="mine-1.0")
    >>> key = ns.key("encoder", "image", b"the bytes of a picture")

The examples of the classes begin with these lines.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from .client.aio import AsyncClient as AsyncClient
    from .client.cache import Client as Client
    from .client.claim import Claim as Claim
    from .client.device.cache import DeviceCache as DeviceCache
    from .client.device.entries import DeviceLease as DeviceLease
    from .client.device.entries import Registration as Registration
    from .client.device.reservation import DeviceReservation as DeviceReservation
    from .client.dp_mode import Recommendation as Recommendation
    from .client.dp_mode import recommend_dp_mode as recommend_dp_mode
    from .client.encoder_cache import EncoderCacheManager as EncoderCacheManager
    from .client.encoder_cache import EncoderInput as EncoderInput
    from .client.encoder_cache import EncoderRequest as EncoderRequest
    from .client.encoder_cache import compute_encoder_budget as compute_encoder_budget
    from .client.governor import ModeChange as ModeChange
    from .client.governor import Subscription as Subscription
    from .client.lease import Batch as Batch
    from .client.lease import Lease as Lease
    from .client.namespace import Namespace as Namespace
    from .client.prefix_cache import PrefixCache as PrefixCache
    from .client.prefix_layers import NormalLayer as NormalLayer
    from .client.prefix_layers import RecurrentLayer as RecurrentLayer
    from .client.prefix_layers import RotatingLayer as RotatingLayer
    from .client.prefix_layers import SharedLayer as SharedLayer
    from .client.prefix_match import PrefixMatch as PrefixMatch
    from .client.prefix_put import PrefixPut as PrefixPut
    from .client.processor_cache import Feature as Feature
    from .client.processor_cache import ProcessorCache as ProcessorCache
    from .client.processor_cache import Reference as Reference
    from .client.puts import Put as Put
    from .client.reservation import Reservation as Reservation
    from .client.ring_reader import RingReader as RingReader
    from .client.view import Entry as Entry
    from .client.view import Reuse as Reuse
    from .client.visual_cache import VisualCache as VisualCache
    from .client.visual_cache import VisualResult as VisualResult
    from .client.workflow import Workflow as Workflow
    from .errors import TensordError as TensordError
    from .ipc.messages import TierState as TierState
    from .ipc.modes import Mode as Mode
    from .ipc.modes import Tier as Tier
    from .ipc.steps import AgentStep as AgentStep
    from .ipc.steps import AgentStepGraph as AgentStepGraph
    from .shm.prefix import Media as Media
    from .shm.tree import Spec as Spec

_PLACES = {
    "AgentStep": ".ipc.steps",
    "AgentStepGraph": ".ipc.steps",
    "AsyncClient": ".client.aio",
    "Batch": ".client.lease",
    "Claim": ".client.claim",
    "Client": ".client.cache",
    "DeviceCache": ".client.device.cache",
    "DeviceLease": ".client.device.entries",
    "DeviceReservation": ".client.device.reservation",
    "EncoderCacheManager": ".client.encoder_cache",
    "EncoderInput": ".client.encoder_cache",
    "EncoderRequest": ".client.encoder_cache",
    "Entry": ".client.view",
    "Feature": ".client.processor_cache",
    "Lease": ".client.lease",
    "Media": ".shm.prefix",
    "Mode": ".ipc.modes",
    "ModeChange": ".client.governor",
    "Namespace": ".client.namespace",
    "NormalLayer": ".client.prefix_layers",
    "PrefixCache": ".client.prefix_cache",
    "PrefixMatch": ".client.prefix_match",
    "PrefixPut": ".client.prefix_put",
    "ProcessorCache": ".client.processor_cache",
    "Put": ".client.puts",
    "Recommendation": ".client.dp_mode",
    "RecurrentLayer": ".client.prefix_layers",
    "Reference": ".client.processor_cache",
    "Registration": ".client.device.entries",
    "Reservation": ".client.reservation",
    "Reuse": ".client.view",
    "RingReader": ".client.ring_reader",
    "RotatingLayer": ".client.prefix_layers",
    "SharedLayer": ".client.prefix_layers",
    "Spec": ".shm.tree",
    "Subscription": ".client.governor",
    "TensordError": ".errors",
    "Tier": ".ipc.modes",
    "TierState": ".ipc.messages",
    "VisualCache": ".client.visual_cache",
    "VisualResult": ".client.visual_cache",
    "Workflow": ".client.workflow",
    "compute_encoder_budget": ".client.encoder_cache",
    "recommend_dp_mode": ".client.dp_mode",
}

__all__ = ["__version__", *_PLACES]


if not TYPE_CHECKING:  # a type checker that sees it takes any name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in _PLACES:
            raise AttributeError(f"module 'tensord' has no attribute {name!r}")
        return getattr(import_module(_PLACES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
