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
    # Views are pinned and released without locks, by operations that the GIL makes atomic (shm/lanes.py).
    raise ImportError(
        "tensord does not run on a free-threaded build of Python: use the ordinary build, such as python3.13"
    )

if TYPE_CHECKING:
    from .client.caches.dp_mode import Recommendation as Recommendation
    from .client.caches.dp_mode import recommend_dp_mode as recommend_dp_mode
    from .client.caches.encoder import EncoderCacheManager as EncoderCacheManager
    from .client.caches.encoder import compute_encoder_budget as compute_encoder_budget
    from .client.caches.encoder_request import EncoderInput as EncoderInput
    from .client.caches.encoder_request import EncoderRequest as EncoderRequest
    from .client.caches.processor import Feature as Feature
    from .client.caches.processor import ProcessorCache as ProcessorCache
    from .client.caches.references import Reference as Reference
    from .client.caches.visual import VisualCache as VisualCache
    from .client.caches.visual_result import VisualResult as VisualResult
    from .client.core.aio import AsyncClient as AsyncClient
    from .client.core.cache import Client as Client
    from .client.core.claim import Claim as Claim
    from .client.core.device_reservation import DeviceReservation as DeviceReservation
    from .client.core.entry import Entry as Entry
    from .client.core.entry import Reuse as Reuse
    from .client.core.governor import ModeChange as ModeChange
    from .client.core.governor import Subscription as Subscription
    from .client.core.lease import Batch as Batch
    from .client.core.lease import Lease as Lease
    from .client.core.namespace import Namespace as Namespace
    from .client.core.ring_reader import RingReader as RingReader
    from .client.core.workflow import Workflow as Workflow
    from .client.device.cache import DeviceCache as DeviceCache
    from .client.device.entries import DeviceLease as DeviceLease
    from .client.device.registration import Registration as Registration
    from .client.prefix.cache import PrefixCache as PrefixCache
    from .client.prefix.layers import NormalLayer as NormalLayer
    from .client.prefix.layers import RecurrentLayer as RecurrentLayer
    from .client.prefix.layers import RotatingLayer as RotatingLayer
    from .client.prefix.layers import SharedLayer as SharedLayer
    from .client.prefix.match import PrefixMatch as PrefixMatch
    from .client.prefix.put import PrefixPut as PrefixPut
    from .client.writing.outcomes import Put as Put
    from .client.writing.reservation import Reservation as Reservation
    from .errors import TensordError as TensordError
    from .ipc.messages import TierState as TierState
    from .ipc.modes import Mode as Mode
    from .ipc.modes import Tier as Tier
    from .ipc.steps import AgentStep as AgentStep
    from .ipc.steps import AgentStepGraph as AgentStepGraph
    from .shm.places import Spec as Spec
    from .shm.prefix import Media as Media

_PLACES = {
    "AgentStep": ".ipc.steps",
    "AgentStepGraph": ".ipc.steps",
    "AsyncClient": ".client.core.aio",
    "Batch": ".client.core.lease",
    "Claim": ".client.core.claim",
    "Client": ".client.core.cache",
    "DeviceCache": ".client.device.cache",
    "DeviceLease": ".client.device.entries",
    "DeviceReservation": ".client.core.device_reservation",
    "EncoderCacheManager": ".client.caches.encoder",
    "EncoderInput": ".client.caches.encoder_request",
    "EncoderRequest": ".client.caches.encoder_request",
    "Entry": ".client.core.entry",
    "Feature": ".client.caches.processor",
    "Lease": ".client.core.lease",
    "Media": ".shm.prefix",
    "Mode": ".ipc.modes",
    "ModeChange": ".client.core.governor",
    "Namespace": ".client.core.namespace",
    "NormalLayer": ".client.prefix.layers",
    "PrefixCache": ".client.prefix.cache",
    "PrefixMatch": ".client.prefix.match",
    "PrefixPut": ".client.prefix.put",
    "ProcessorCache": ".client.caches.processor",
    "Put": ".client.writing.outcomes",
    "Recommendation": ".client.caches.dp_mode",
    "RecurrentLayer": ".client.prefix.layers",
    "Reference": ".client.caches.references",
    "Registration": ".client.device.registration",
    "Reservation": ".client.writing.reservation",
    "Reuse": ".client.core.entry",
    "RingReader": ".client.core.ring_reader",
    "RotatingLayer": ".client.prefix.layers",
    "SharedLayer": ".client.prefix.layers",
    "Spec": ".shm.places",
    "Subscription": ".client.core.governor",
    "TensordError": ".errors",
    "Tier": ".ipc.modes",
    "TierState": ".ipc.messages",
    "VisualCache": ".client.caches.visual",
    "VisualResult": ".client.caches.visual_result",
    "Workflow": ".client.core.workflow",
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
