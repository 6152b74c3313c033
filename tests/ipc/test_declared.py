"""What the daemon and the client derive from how messages are declared."""

from __future__ import annotations

import pytest

from tensord.ipc.messages import control as m
from tensord.ipc.messages.declared import handlers


def test_a_handler_for_a_base_class_handles_all_messages_declared_with_it() -> None:
    table = handlers(m.StatusRequest, {m.DaemonQuery: "both", m.StatusRequest: "store", m.Watch: "watchers"})
    assert table[m.StatusQuery] == table[m.HealthQuery] == "both"
    assert table[m.WhyQuery] == "store"
    assert table[m.Watch] == "watchers"


def test_a_handler_for_a_message_of_another_part_is_refused() -> None:
    with pytest.raises(TypeError, match="Evict has a handler here, and is not declared as a GaugeRequest"):
        handlers(m.GaugeRequest, {m.ReadDevice: "gauges", m.Evict: "gauges"})


def test_a_message_without_a_handler_is_named() -> None:
    with pytest.raises(TypeError, match="HealthQuery is declared as a DaemonQuery, and nothing here handles it"):
        handlers(m.DaemonQuery, {m.StatusQuery: "store"})
