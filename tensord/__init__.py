"""The public names of tensord: memcached for tensors. The daemon imports none of them.

Example:
    >>> import numpy as np
    >>> import tensord
    >>> cache = tensord.Client()
    >>> ns = tensord.Namespace(model="my/vlm", revision="9f3c", dtype="float32", processor="mine-1.0")
    >>> key = ns.key("encoder", "image", b"the bytes of a picture")

The examples of the classes begin with these lines.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

if "t" in sys.abiflags:
    # Views are pinned and released without locks, by operations that the GIL makes atomic (shm/lanes/lane.py).
    raise ImportError(
        "tensord does not run on a free-threaded build of Python: use the ordinary build, such as python3.13"
    )

if TYPE_CHECKING:
    from .client.arguments.namespace import Namespace as Namespace
    from .client.caches.dp_mode import Recommendation as Recommendation
    from .client.caches.dp_mode import recommend_dp_mode as recommend_dp_mode
    from .client.caches.encoder import EncoderCacheManager as EncoderCacheManager
    from .client.caches.encoder import compute_encoder_budget as compute_encoder_budget
    from .client.caches.encoder_request import EncoderInput as EncoderInput
    from .client.caches.encoder_request import EncoderRequest as EncoderRequest
    from .client.caches.processor.cache import Feature as Feature
    from .client.caches.processor.cache import ProcessorCache as ProcessorCache
    from .client.caches.processor.loans import Reference as Reference
    from .client.caches.visual import VisualCache as VisualCache
    from .client.caches.visual import VisualResult as VisualResult
    from .client.computing.claim import Claim as Claim
    from .client.core.async_client import AsyncClient as AsyncClient
    from .client.core.client import Client as Client
    from .client.device.cache import DeviceCache as DeviceCache
    from .client.device.entries import DeviceLease as DeviceLease
    from .client.device.entries import Registration as Registration
    from .client.prefix.cache import PrefixCache as PrefixCache
    from .client.prefix.layers import NormalLayer as NormalLayer
    from .client.prefix.layers import RecurrentLayer as RecurrentLayer
    from .client.prefix.layers import RotatingLayer as RotatingLayer
    from .client.prefix.layers import SharedLayer as SharedLayer
    from .client.prefix.match import PrefixMatch as PrefixMatch
    from .client.prefix.put import PrefixPut as PrefixPut
    from .client.pressure.device_reservation import DeviceReservation as DeviceReservation
    from .client.pressure.modes import ModeChange as ModeChange
    from .client.pressure.modes import Subscription as Subscription
    from .client.pressure.workflow import Workflow as Workflow
    from .client.reading.lease import Batch as Batch
    from .client.reading.lease import Lease as Lease
    from .client.reading.lease import RingReader as RingReader
    from .client.reading.ring_mapping import Entry as Entry
    from .client.writing.outcomes import Put as Put
    from .client.writing.put import Reservation as Reservation
    from .errors import TensordError as TensordError
    from .ipc.graphs import AgentStepGraph as AgentStepGraph
    from .ipc.messages.control import TierState as TierState
    from .ipc.messages.governance import AgentStep as AgentStep
    from .ipc.messages.modes import Mode as Mode
    from .ipc.messages.modes import Tier as Tier
    from .shm.payloads.prefix import Media as Media
    from .shm.payloads.specs import Spec as Spec

_PLACES = {
    "AgentStep": ".ipc.messages.governance",
    "AgentStepGraph": ".ipc.graphs",
    "AsyncClient": ".client.core.async_client",
    "Batch": ".client.reading.lease",
    "Claim": ".client.computing.claim",
    "Client": ".client.core.client",
    "DeviceCache": ".client.device.cache",
    "DeviceLease": ".client.device.entries",
    "DeviceReservation": ".client.pressure.device_reservation",
    "EncoderCacheManager": ".client.caches.encoder",
    "EncoderInput": ".client.caches.encoder_request",
    "EncoderRequest": ".client.caches.encoder_request",
    "Entry": ".client.reading.ring_mapping",
    "Feature": ".client.caches.processor.cache",
    "Lease": ".client.reading.lease",
    "Media": ".shm.payloads.prefix",
    "Mode": ".ipc.messages.modes",
    "ModeChange": ".client.pressure.modes",
    "Namespace": ".client.arguments.namespace",
    "NormalLayer": ".client.prefix.layers",
    "PrefixCache": ".client.prefix.cache",
    "PrefixMatch": ".client.prefix.match",
    "PrefixPut": ".client.prefix.put",
    "ProcessorCache": ".client.caches.processor.cache",
    "Put": ".client.writing.outcomes",
    "Recommendation": ".client.caches.dp_mode",
    "RecurrentLayer": ".client.prefix.layers",
    "Reference": ".client.caches.processor.loans",
    "Registration": ".client.device.entries",
    "Reservation": ".client.writing.put",
    "RingReader": ".client.reading.lease",
    "RotatingLayer": ".client.prefix.layers",
    "SharedLayer": ".client.prefix.layers",
    "Spec": ".shm.payloads.specs",
    "Subscription": ".client.pressure.modes",
    "TensordError": ".errors",
    "Tier": ".ipc.messages.modes",
    "TierState": ".ipc.messages.control",
    "VisualCache": ".client.caches.visual",
    "VisualResult": ".client.caches.visual",
    "Workflow": ".client.pressure.workflow",
    "compute_encoder_budget": ".client.caches.encoder",
    "recommend_dp_mode": ".client.caches.dp_mode",
}

__all__ = ["__version__", *_PLACES]


if not TYPE_CHECKING:  # a type checker that sees it takes any name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in _PLACES:
            raise AttributeError(f"module 'tensord' has no attribute {name!r}")
        # Kept: nothing can be imported while the interpreter ends.
        value = globals()[name] = getattr(import_module(_PLACES[name], __name__), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
