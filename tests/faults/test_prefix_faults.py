"""Cached sequences when the daemon is killed, and when a client says what it may not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tensord
from tensord import PrefixCache
from tensord.client.arguments.put_options import PutOptions
from tensord.client.link import absence as silence
from tensord.client.prefix import cache as prefix_cache
from tensord.client.writing.outcomes import Put

from ..client.prefix.sequences import BLOCK, assert_right, matched, namespace_of, normal
from ..daemon_process import MIB, PATIENCE_S, Daemon, some, until
from .payloads import cut, payload
from .payloads import key as key_of

SYSTEM = np.arange(100, dtype=np.uint32)
NAMESPACE = namespace_of(-1)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(ring_bytes=8 * MIB) as running:
        yield running.start()


def conversation(number: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """A hundred tokens that all have, and as many of its own."""
    return np.concatenate([SYSTEM, np.arange(100, dtype=np.uint32) + 1000 * (number + 1)])


def cached(cache: PrefixCache, tokens: np.ndarray[Any, Any]) -> bool:
    """Whether all but the last token of a sequence are found, with what was stored of them."""
    with matched(cache, tokens, timeout_s=PATIENCE_S) as match:
        assert_right(match, tokens)
        return match.offset == len(tokens) - 1


def test_a_query_that_is_written_while_its_connection_is_lost_is_never_answered_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Daemon(ring_bytes=8 * MIB) as daemon:
        client = daemon.start().client(timeout_s=PATIENCE_S)
        cache = PrefixCache(client, NAMESPACE, block_tokens=BLOCK)
        stored, other = conversation(0), np.arange(200, dtype=np.uint32) + 7_000_000
        assert cache.put(stored, normal(stored), wait=True, timeout_s=PATIENCE_S).state == "stored"
        # Its place in the inbox is kept for the next query.
        assert cached(cache, stored)
        written = vars(prefix_cache)["fold"]

        def lost_meanwhile(*arguments: Any) -> Any:
            """The next connection's inbox is another one."""
            folded = written(*arguments)
            daemon.pause()
            client.put(key_of(1), payload(1))
            cut(client)
            daemon.resume()
            until(lambda: client.connected, "the client to be connected again")
            return folded

        monkeypatch.setattr(prefix_cache, "fold", lost_meanwhile)
        assert cache.match(other, timeout_s=PATIENCE_S) is None
        monkeypatch.setattr(prefix_cache, "fold", written)
        assert cache.match(other, timeout_s=PATIENCE_S) is None
        assert cached(cache, stored)


def test_a_killed_daemons_sequences_are_matched_again_byte_for_byte() -> None:
    with Daemon(ring_bytes=8 * MIB) as daemon:
        client = daemon.start().client()
        cache = PrefixCache(client, NAMESPACE, block_tokens=BLOCK)
        conversations = [conversation(number) for number in range(6)]
        for tokens in conversations:
            put = cache.put(tokens, normal(tokens), cost_ms=7.0, wait=True, timeout_s=PATIENCE_S)
            assert put.state == "stored", put
        view = some(cache.match(conversations[0], timeout_s=PATIENCE_S))
        blocks = daemon.store("prefix_blocks")
        daemon.kill()
        daemon.start()
        daemon.attached(client)
        daemon.until(lambda s: not s["store"]["prefix_rebuilding"], "the index to be rebuilt")
        assert daemon.store("prefix_blocks") == blocks
        assert all(cached(cache, tokens) for tokens in conversations)
        # The view from before.
        assert_right(view, conversations[0])
        # A sequence that goes on from there follows what the former daemon had.
        longer = np.concatenate([conversations[1], SYSTEM + 77])
        assert cache.put(longer, normal(longer), wait=True, timeout_s=PATIENCE_S).state == "stored"
        assert cached(cache, longer)
        assert daemon.store("found_corrupt") == 0
        client.close()


def test_a_killed_daemons_sequences_are_matched_whole_by_the_first_query(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine a daemon that begins is silent for longer than a client waits for a word.
    monkeypatch.setattr(silence, "WORD_S", PATIENCE_S)
    with Daemon(ring_bytes=32 * MIB, limits_prefix_wait_s=PATIENCE_S) as daemon:
        client = daemon.start().client(timeout_s=PATIENCE_S)
        cache = PrefixCache(client, NAMESPACE, block_tokens=BLOCK)
        conversations = [conversation(number) for number in range(300)]
        for tokens in conversations:
            cache.put(tokens, normal(tokens))
        cache.put(conversations[0], normal(conversations[0]), wait=True, timeout_s=PATIENCE_S)
        until(lambda: not client.link.puts.waiting, "all of it to be stored")
        for _ in range(3):
            daemon.kill()
            daemon.start()
            daemon.attached(client)
            assert cached(cache, conversations[-1]) and cached(cache, conversations[0])


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("times", [1, 3])
def test_a_put_whose_blocks_are_evicted_on_its_way_is_repeated_and_stores_all_of_it(
    monkeypatch: pytest.MonkeyPatch, daemon: Daemon, wait: bool, times: int
) -> None:
    evicted: list[bytes] = []
    tokens = conversation(40 + times + 10 * wait)
    with daemon.client(timeout_s=PATIENCE_S) as client, daemon.client() as other:
        cache = PrefixCache(client, NAMESPACE, block_tokens=BLOCK)
        real = client.link.puts.put
        before: list[tensord.Put] = []

        def put(put: Put, payload: Any, options: PutOptions, deadline: float) -> None:
            """After four blocks, and after each refusal, somebody who knows nothing of this put evicts the last."""
            is_due = len(before) >= 4 and (not evicted or before[-1].state == "refused")
            if options.parent is not None and len(evicted) < times and is_due:
                until(lambda: other.contains(options.parent or b""), "the block before")
                assert other.evict(options.parent)
                evicted.append(options.parent)
            real(put, payload, options, deadline)
            before.append(put.wait(PATIENCE_S))

        monkeypatch.setattr(client.link.puts, "put", put)
        done = cache.put(tokens, normal(tokens), wait=wait, timeout_s=PATIENCE_S)
        assert (done.state, done.error) == ("stored", None)
        assert len(evicted) == times
        assert cached(cache, tokens)
