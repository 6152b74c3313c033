"""What status and watchers are told of puts through the whole store. The forms are tested in tests/daemon/reports."""

from __future__ import annotations

from tensord.ipc.messages import control as messages

from .stand import SPAN, Make, key


def test_watchers_get_every_announced_event_and_nothing_is_made_without_them(make: Make) -> None:
    stand = make(2 * SPAN)
    stand.put(1)
    stand.put(2)
    stand.put(3, parent=key(9))
    stand.send(1, messages.RequestClaim(1, key(3)))
    stand.send(1, messages.Limit(1, 9999))
    stand.send(1, messages.Clear(2))
    events = [event["event"] for event in stand.told]
    assert [each for each in events if each != "evict"] == ["put", "put", "refuse", "claim", "limit", "clear"]
    assert "evict" in events
    stand.store.parts.outbox.is_watched = lambda: False
    stand.put(4)
    assert len(stand.told) == len(events)


def test_puts_are_counted_by_outcome_and_bytes_by_what_has_them(make: Make) -> None:
    stand = make()
    stand.put(1, 100, tokens=5)
    assert stand.put(1) == "existed"
    assert stand.put(2, tree=0) == "BadMessage"
    stand.begin(2)
    status = stand.store.status()
    assert status["puts"] == {"stored": 1, "existed": 1, "refused": 1}
    assert (status["entries"], status["tokens"], status["put_bytes"]) == (1, 5, 100)
    assert (status["used_bytes"], status["lent_bytes"], status["grants"]) == (320 + SPAN, SPAN, 1)
    assert status["largest_free_bytes"] == 4096 - 320 - SPAN
    rows = stand.store.reports.by_uid()
    assert rows[1001] | {"claims": 0} == {
        "span_bytes": 320, "entries": 1, "tokens": 5, "claims": 0, "namespaces": 0, "lent_bytes": 0,
    }  # fmt: skip
    assert (rows[1002]["span_bytes"], rows[1002]["lent_bytes"]) == (SPAN, SPAN)
