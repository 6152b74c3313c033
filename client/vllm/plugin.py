"""The plugin that vLLM calls in each of its processes if tensord is installed.

Owns: which of vLLM's parts are replaced, by which setting; the versions of vLLM that share; forwarding the library's
log to vLLM's. Does not own: the replacements.

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
TESTED: Final = "0.32"
"""The series of vLLM's versions that are tested. With others nothing is shared: their interfaces differ."""
_log = logging.getLogger("tensord")


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
        import vllm

        if why_not := why_untested(vllm.__version__):
            _log.warning("tensord: processor outputs are not shared: %s", why_not)
            return
        from .processor.factories import install

        install()


def why_untested(version: str) -> str | None:
    """Why engines of this version of vLLM share nothing; None if it is tested."""
    if version.startswith(f"{TESTED}."):
        return None
    return f"vLLM {version} is not a tested version: install {TESTED}, or a newer tensord"


def log_with_vllm() -> None:
    """Sends the library's log lines to vLLM's handlers, unless the library's logger has handlers already."""
    if not _log.handlers:
        _log.parent = logging.getLogger("vllm")
