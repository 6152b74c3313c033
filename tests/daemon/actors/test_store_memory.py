"""The store actor over real shared memory: during a large eviction everybody else is answered."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tensord.client.writing.inbox import Inbox
from tensord.daemon.actors.messages import Requested
from tensord.daemon.room import ways
from tensord.daemon.store import spans
from tensord.ipc.messages import control as messages
from tensord.shm.payloads.packing import pack

from ...memory_bench import key
from .stand import PATIENCE_S, serving

ENTRIES = 1_500


@pytest.fixture(autouse=True)
def _one_victim_a_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "ROUND_ROWS_MAX", 1)
    monkeypatch.setattr(spans, "SCAN_ROWS_MAX", 1)


def test_an_eviction_of_more_rounds_than_the_stack_is_deep_comes_to_its_end() -> None:
    async def evicts() -> None:
        async with serving() as stand:
            await stand.fill(ENTRIES)
            stand.reconfigure(max_tokens=10)
            # A victim is hidden first, and counted when it has gone.
            status = await stand.until(lambda status: status["store"]["evictions"].get("tokens", 0) >= ENTRIES - 10)
            assert status["store"]["entries"] == 10

    asyncio.run(evicts())


def test_status_and_requests_are_answered_while_a_large_eviction_is_under_way() -> None:
    async def evicts() -> None:
        async with serving() as stand:
            client = await stand.fill(ENTRIES)
            stand.reconfigure(max_tokens=10)
            told = stand.ask(messages.StatusQuery(0))
            client.tell(Requested(client.number, messages.Touch(client.request(), [key(ENTRIES - 1)])))
            status = await told
            assert status["store"]["entries"] > ENTRIES // 2, "the question waited for the eviction"
            assert (await client.heard(messages.Counted)).count == 1
            assert (await stand.status())["store"]["entries"] > ENTRIES // 2, "the request waited for the eviction"
            await stand.until(lambda status: status["store"]["entries"] <= 10)

    asyncio.run(evicts())


def test_a_stop_carries_out_what_had_arrived() -> None:
    async def stops() -> None:
        async with serving() as stand:
            client = await stand.fill(1)
            places = await client.places([stand.payload.payload_bytes] * 40)
            for number, place in enumerate(places, 100):
                client.put(number, place, stand.payload, 1)
            store = stand.store
        assert store.status()["puts"]["stored"] == 1 + len(places) > 30

    asyncio.run(stops())


@pytest.mark.parametrize("through", ["ring", "inbox"])
def test_what_a_client_has_put_before_a_request_is_stored_before_its_answer(through: str) -> None:
    async def puts() -> None:
        async with serving() as stand:
            client = stand.client()
            await client.attach(Inbox(stand.memory.superblock.ring_bytes) if through == "inbox" else None)
            large = pack(np.zeros(100_000, np.uint8))
            for number in range(20):
                (place,) = await client.places([large.payload_bytes])
                client.put(number, place, large)
                client.ask(messages.Touch(client.request(), [key(number)]))
                assert (await client.heard(messages.Counted)).count == 1

    asyncio.run(puts())


def test_a_refusal_comes_before_its_record_counts_as_settled() -> None:
    async def puts() -> None:
        async with serving() as stand:
            client = await stand.fill(1)
            for _ in range(50):
                (place,) = await client.places([stand.payload.payload_bytes])
                record = client.put(0, place, stand.payload)
                await client.settled(record)
                assert (await client.heard(messages.PutRefused)) == messages.PutRefused(record)

    asyncio.run(puts())


def test_a_stop_leaves_a_large_eviction_to_the_next_daemon() -> None:
    async def stops() -> None:
        async with serving() as stand:
            await stand.fill(ENTRIES)
            stand.reconfigure(max_tokens=10)
            await stand.until(lambda status: status["store"]["entries"] < ENTRIES)
            store = stand.store
        assert store.status()["entries"] > ENTRIES // 2

    asyncio.run(stops())


def test_a_request_of_many_keys_leaves_others_their_turns_and_keeps_its_senders_order() -> None:
    async def asks() -> None:
        async with serving() as stand:
            client, other = await stand.fill(600), stand.client()
            client.tell(Requested(client.number, messages.Evict(client.request(), [*map(key, range(600))])))
            client.tell(Requested(client.number, messages.Touch(client.request(), [key(0), key(599)])))
            other.tell(Requested(other.number, messages.Touch(other.request(), [key(599)])))
            assert (await other.heard(messages.Counted)).count == 1, "it waited for the eviction's end"
            assert (await client.heard(messages.Counted)).count == 600
            assert (await client.heard(messages.Counted)).count == 0, "answered before what was asked first"

    asyncio.run(asks())


def test_a_time_to_live_ends_although_messages_never_stop_coming() -> None:
    async def floods() -> None:
        async with serving(default_ttl_s="200ms") as stand:
            await stand.fill(1)
            async with asyncio.timeout(PATIENCE_S):
                while stand.store.status()["entries"]:
                    while len(stand.actor.inbox) < 100:
                        stand.ask(messages.EntriesQuery(1, None, 1))
                    await asyncio.sleep(0)

    asyncio.run(floods())


def test_times_are_shown_by_the_wall_clock_as_it_is_now() -> None:
    async def asks() -> None:
        async with serving() as stand:
            await stand.fill(1)
            shown = []
            for zero_s in (1e6, 2e6):
                stand.actor._report._unix_at_zero = lambda at=zero_s: at  # type: ignore[misc]
                page = await stand.ask(messages.EntriesQuery(0))
                entry = (await stand.ask(messages.WhyQuery(0, key(0))))["entry"]
                assert page["entries"] == [entry]
                shown.append(entry["created_unix_s"])
            assert shown[1] - shown[0] == pytest.approx(1e6)

    asyncio.run(asks())
