"""What the daemon and the client derive from how messages are declared."""

from __future__ import annotations

import pytest

from tensord.ipc.messages import control as m
from tensord.ipc.messages.declared import handlers, id_of
from tensord.ipc.wire.states import ANSWERED_BY, CONTROL_ANSWERS, STATUS_ANSWERS


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


def test_an_answer_and_its_followers_may_come_on_the_request_s_socket() -> None:
    assert ANSWERED_BY[m.AskForGrants] is m.GrantsLent
    assert {"GrantsLent", "PutRefused", "Settled", "ModeChanged", "Order", "Error"} <= set(CONTROL_ANSWERS)
    assert set(STATUS_ANSWERS) == {"Document", "Event", "Error"}


def test_a_message_that_nobody_answers_has_no_id_to_answer() -> None:
    assert id_of(m.Evict(7, [])) == 7
    assert id_of(m.Renew([])) is None
