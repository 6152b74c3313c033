"""tensord: memcached for tensors. The public names; the daemon needs none of them and imports none of their parts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from .client.aio import AsyncClient as AsyncClient
    from .client.cache import Client as Client
    from .client.lease import Batch as Batch
    from .client.lease import Lease as Lease
    from .client.namespace import Namespace as Namespace
    from .client.puts import Put as Put
    from .client.reservation import Reservation as Reservation
    from .client.view import Entry as Entry
    from .errors import TensordError as TensordError
    from .shm.tree import Spec as Spec

_PLACES = {
    "AsyncClient": ".client.aio",
    "Batch": ".client.lease",
    "Client": ".client.cache",
    "Entry": ".client.view",
    "Lease": ".client.lease",
    "Namespace": ".client.namespace",
    "Put": ".client.puts",
    "Reservation": ".client.reservation",
    "Spec": ".shm.tree",
    "TensordError": ".errors",
}

__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'tensord' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
