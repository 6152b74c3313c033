"""What the daemon and the client derive from how messages are declared."""

from __future__ import annotations

import pytest

from tensord.ipc.messages import control as m
from tensord.ipc.messages.declared import handlers


def test_a_message_without_a_handler_is_named() -> None:
    with pytest.raises(TypeError, match="HealthQuery is declared as a DaemonQuery, and nothing here handles it"):
        handlers(m.DaemonQuery, {m.StatusQuery: "store"})
