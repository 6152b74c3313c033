"""Sequences of a PrefixCache that another host has computed."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tensord
from tensord.client.computing import remote_run
from tensord.client.prefix import other_hosts
from tensord.client.prefix.other_hosts import form_key

from ..daemon_process import PATIENCE_S, Daemon, until
from .hosts import LONG_S, NAMESPACE, Host

BLOCK_TOKENS = 16
COST_MS = 1000 * LONG_S
TEXT = np.arange(100, 180, dtype=np.uint32)
BLOCKS = len(TEXT) // BLOCK_TOKENS
FORM = form_key(NAMESPACE, BLOCK_TOKENS)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with Host(f"dir://{tmp_path}") as first, Host(f"dir://{tmp_path}") as second:
        yield first, second


@pytest.fixture(autouse=True)
def asks_at_every_match_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_hosts, "ASK_EVERY_S", 0.0)
    monkeypatch.setattr(remote_run, "FETCH_S", LONG_S)


def layers(tokens: int, dim: int = 4) -> list[tensord.NormalLayer]:
    return [tensord.NormalLayer(np.arange(2 * tokens * dim, dtype=np.float32).reshape(1, 2, tokens, dim))]


def prefixes(host: Host, namespace: tensord.Namespace = NAMESPACE) -> tensord.PrefixCache:
    return tensord.PrefixCache(host.client, namespace, block_tokens=BLOCK_TOKENS)


def put(host: Host, text: np.ndarray, dim: int = 4, namespace: tensord.Namespace = NAMESPACE) -> None:
    """Puts a sequence, and waits until the store has it."""
    there = prefixes(host, namespace).put(text, layers(len(text), dim), cost_ms=COST_MS, wait=True)
    assert there.state in ("stored", "existed"), there
    host.idle()


def matched(cache: tensord.PrefixCache, text: np.ndarray = TEXT, dim: int = 4) -> int:
    """How many tokens of a sequence are found. What is found must be what was put, in the form that it was put in."""
    match = cache.match(text)
    if match is None:
        return 0
    found = np.concatenate(match.layers[0], axis=-2)
    np.testing.assert_array_equal(found, layers(len(text), dim)[0].tree[:, :, : match.offset])
    return match.offset


def test_a_process_that_has_put_nothing_finds_the_sequences_of_other_hosts(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    put(first, TEXT)
    there = prefixes(second)
    # A busy store may answer a match too late, and the next one in time.
    until(lambda: matched(there) == 79, "the sequence to be found")
    longer = np.concatenate([TEXT[:40], np.arange(40, dtype=np.uint32)])
    match = there.match(longer)
    assert match is not None and match.offset == 40


def test_a_form_that_is_gone_is_stored_again_with_the_next_put(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    cache = prefixes(first)
    cache.put(TEXT, layers(len(TEXT)), cost_ms=COST_MS, wait=True)
    first.idle()
    first.client.evict(FORM)
    first.idle()
    there = prefixes(second)
    assert matched(there) == 0, "it does not know the form of the layers"
    cache.put(TEXT[:20], layers(20), cost_ms=COST_MS, wait=True)
    until(lambda: matched(there) == 79, "the form to be found")


def test_of_two_forms_in_one_namespace_the_newest_is_found_and_none_is_taken_for_the_other(
    hosts: tuple[Host, Host],
) -> None:
    first, second = hosts
    put(first, TEXT, dim=4)
    other = TEXT + 1000
    put(first, other, dim=8)
    there = prefixes(second)
    until(lambda: matched(there, other, dim=8) == 79, "the newest form to be found")
    assert matched(there, TEXT) == 0, "it is of the form before"
    there.put(np.arange(BLOCK_TOKENS, dtype=np.uint32), layers(BLOCK_TOKENS, 4), wait=True)
    assert matched(there, TEXT, dim=4) == 79, "a process finds what is of its own form"


def test_after_an_invalidation_the_form_is_that_of_the_new_generation(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    put(first, TEXT, dim=4)
    until(lambda: matched(prefixes(second)) == 79, "the form to be found")
    current = first.client.invalidate(NAMESPACE)
    until(lambda: second.client.current(NAMESPACE).generation == current.generation, "the other host to hear of it")
    assert matched(prefixes(second)) == 0

    def found() -> bool:
        # What the first host puts before the store has answered its invalidation is offered again by its use.
        put(first, TEXT, dim=8, namespace=current)
        assert matched(prefixes(first, current), dim=8) == 79
        return matched(prefixes(second, current), dim=8) == 79

    until(found, "the new form to be found")
    assert matched(prefixes(second)) == 0


def test_a_host_without_a_remote_store_stores_no_form() -> None:
    with Daemon() as daemon:
        client = daemon.start().client()
        cache = tensord.PrefixCache(client, NAMESPACE, block_tokens=BLOCK_TOKENS)
        assert cache.put(TEXT, layers(len(TEXT)), wait=True).blocks == BLOCKS
        assert daemon.store("entries") == BLOCKS
        assert not client.contains(FORM)


def test_a_put_that_does_not_wait_needs_no_answer_of_the_daemon(tmp_path: Path) -> None:
    with Host(f"dir://{tmp_path}") as host:
        patient = host.daemon.client(timeout_s=math.inf)
        there = tensord.PrefixCache(patient, NAMESPACE, block_tokens=BLOCK_TOKENS)
        host.daemon.pause()
        putting = threading.Thread(target=there.put, args=(TEXT, layers(len(TEXT))), daemon=True)
        putting.start()
        try:
            putting.join(PATIENCE_S)
            assert not putting.is_alive()
        finally:
            host.daemon.resume()
        assert patient.wait_connected(PATIENCE_S)
        there.put(TEXT, layers(len(TEXT)), wait=True)
        until(lambda: patient.contains(FORM), "the form is stored with the next put")
