"""What vLLM calls in each of its processes, when tensord is installed beside it."""

from __future__ import annotations

from typing import Final

_CONNECTOR: Final = "TensordECConnector"


def register() -> None:
    """Makes the EC connector known by its name alone. Called several times in a process, it does so once."""
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    if _CONNECTOR not in ECConnectorFactory._registry:
        ECConnectorFactory.register_connector(_CONNECTOR, "tensord.client.vllm.connector", _CONNECTOR)
