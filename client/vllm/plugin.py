"""What vLLM calls in each of its processes, when tensord is installed beside it.

Owns: what is put in the place of vLLM's own, and upon which setting; the way of the library's log into vLLM's.

    TENSORD_VLLM_PROCESSOR_CACHE=1    processor outputs are shared by all frontends and engines of the host
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from typing import Final

from ...errors import BadConfiguration
from ..identity.loading import loading_begins

PROCESSOR_CACHE: Final = "TENSORD_VLLM_PROCESSOR_CACHE"
_CONNECTOR: Final = "TensordECConnector"
_SWITCHES: Final = {"": False, "0": False, "1": True}


def register() -> None:
    """Makes the EC connector known by its name alone, the processor cache vLLM's where it is switched on, and the
    library's log part of vLLM's.

    Called several times in a process, it does so once.

    Raises:
        BadConfiguration: a switch that is neither 0 nor 1.
    """
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    log_with_vllm()
    if multiprocessing.parent_process() is not None:
        # A process that vLLM has made for an engine, and for no other.
        loading_begins()
    if _CONNECTOR not in ECConnectorFactory._registry:
        ECConnectorFactory.register_connector(_CONNECTOR, "tensord.client.vllm.connector", _CONNECTOR)
    if _is_on(PROCESSOR_CACHE):
        from . import processor

        processor.install()


def log_with_vllm() -> None:
    """What the library logs in this process goes where vLLM's own lines go, in their form and from their level on.

    vLLM gives handlers to its own logger alone. Where somebody gave the library's logger handlers nothing changes.
    """
    library = logging.getLogger("tensord")
    if not library.handlers:
        library.parent = logging.getLogger("vllm")


def _is_on(name: str) -> bool:
    value = os.environ.get(name, "")
    if value not in _SWITCHES:
        raise BadConfiguration(f"{name}={value!r} must be 0 or 1")
    return _SWITCHES[value]
