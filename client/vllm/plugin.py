"""The plugin that vLLM calls in each of its processes if tensord is installed.

Owns: which of vLLM's parts are replaced, by which setting; forwarding the library's log to vLLM's. Does not own: the
replacements.

    TENSORD_VLLM_PROCESSOR_CACHE=1    processor outputs are shared by all frontends and engines of the host
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from typing import Final

from ...errors import BadConfiguration
from ..checkpoints.loading import loading_begins

PROCESSOR_CACHE: Final = "TENSORD_VLLM_PROCESSOR_CACHE"


def register() -> None:
    """Registers the connectors by their names, replaces vLLM's processor cache if the setting is 1, and forwards the
    library's log to vLLM's. Further calls in a process do nothing.

    Raises:
        BadConfiguration: a setting is neither 0 nor 1.
    """
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    log_with_vllm()
    if multiprocessing.parent_process() is not None:
        # vLLM made this process for one engine.
        loading_begins()
    for factory, name, module in (
        (ECConnectorFactory, "TensordECConnector", "tensord.client.vllm.connector"),
        (KVConnectorFactory, "TensordKVConnector", "tensord.client.vllm.kv.connector"),
    ):
        if name not in factory._registry:
            factory.register_connector(name, module, name)
    value = os.environ.get(PROCESSOR_CACHE, "")
    if value not in ("", "0", "1"):
        raise BadConfiguration(f"{PROCESSOR_CACHE}={value!r} must be 0 or 1")
    if value == "1":
        from .processor.factories import install

        install()


def log_with_vllm() -> None:
    """Sends the library's log lines to vLLM's handlers, unless the library's logger has handlers already."""
    library = logging.getLogger("tensord")
    if not library.handlers:
        library.parent = logging.getLogger("vllm")
