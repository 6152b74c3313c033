"""What a caller hands to a client is taken, or refused by its name with a UsageError, and with nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.errors import BadKey, Refusal, UsageError

from ..daemon_process import Daemon

KEY = b"k" * 32
SURROGATE = "\ud800"
"""What a file's name that is no text has in it, and no message can carry."""
NO_TIMES: list[Any] = [math.nan, -1, 1e300, 10**400, "5", b"5", True, np.arange(2)]

Call = Callable[[tensord.Client, Any], object]
TAKE_TIMEOUTS: dict[str, Call] = {
    "put": lambda client, time: client.put(KEY, 1, timeout_s=time),
    "put and wait": lambda client, time: client.put(KEY, 1, wait=True, timeout_s=time),
    "put_many": lambda client, time: client.put_many([(KEY, 1)], timeout_s=time),
    "Put.wait": lambda client, time: client.put(KEY, 1).wait(time),
    "reserve": lambda client, time: client.reserve(1, timeout_s=time).abandon(),
    "commit": lambda client, time: client.reserve(1).commit(KEY, timeout_s=time),
    "get_or_compute": lambda client, time: client.get_or_compute(KEY, lambda: 1, timeout_s=time),
    "wait_connected": lambda client, time: client.wait_connected(time),
    "reserve_device": lambda client, time: client.reserve_device("card", 1, timeout_s=time),
}
TAKE_DURATIONS: dict[str, Call] = {
    "ttl_s": lambda client, time: client.put(KEY, 1, ttl_s=time),
    "ttl_s of put_many": lambda client, time: client.put_many([(KEY, 1)], ttl_s=time),
    "ttl_s of a commit": lambda client, time: client.reserve(1).commit(KEY, ttl_s=time),
    "cost_ms": lambda client, time: client.put(KEY, 1, cost_ms=time),
    "pin": lambda client, time: client.pin(KEY, time),
    "for_s": lambda client, time: client.reserve_device("card", 1, time),
}
TAKE_KEYS: dict[str, Call] = {
    "get": lambda client, key: client.get(key),
    "get verified": lambda client, key: client.get(key, verify=True),
    "get_many": lambda client, key: client.get_many([key])[0],
    "hold": lambda client, key: client.hold(key),
    "contains": lambda client, key: client.contains(key),
    "peek": lambda client, key: client.peek(key),
    "reuse": lambda client, key: client.reuse(key),
    "touch": lambda client, key: client.touch(key),
    "pin": lambda client, key: client.pin(key, 1),
    "put": lambda client, key: client.put(key, 1, wait=True),
    "put_many": lambda client, key: client.put_many([(key, 1)], wait=True),
    "get_or_compute": lambda client, key: client.get_or_compute(key, lambda: 1),
    "evict": lambda client, key: client.evict(key),
}


@pytest.fixture
def client(daemon: Daemon) -> tensord.Client:
    return daemon.client()


@pytest.mark.parametrize("call", [*TAKE_TIMEOUTS, *TAKE_DURATIONS])
def test_an_invalid_time_is_refused_with_its_value(client: tensord.Client, call: str) -> None:
    for wrong in NO_TIMES:
        with pytest.raises(UsageError) as caught:
            {**TAKE_TIMEOUTS, **TAKE_DURATIONS}[call](client, wrong)
        assert repr(wrong) in str(caught.value)


@pytest.mark.parametrize("call", TAKE_TIMEOUTS)
def test_an_infinite_timeout_is_no_limit(client: tensord.Client, call: str) -> None:
    try:
        TAKE_TIMEOUTS[call](client, math.inf)
    except Refusal:
        assert call == "reserve_device", "there is no such card"


def test_client_arguments_that_fit_no_message_are_refused(daemon: Daemon) -> None:
    for field, wrong in (
        *(("timeout_s", time) for time in NO_TIMES),
        *(("attach_s", time) for time in NO_TIMES),
        *(("name", name) for name in (SURROGATE, "x" * 129, 5)),
    ):
        with pytest.raises(UsageError, match=field):
            tensord.Client(daemon.socket, **{field: wrong})
    for socket in ("", "a\0b", f"/tmp/{SURROGATE}", 5):
        with pytest.raises(UsageError, match="socket"):
            tensord.Client(socket)  # type: ignore[arg-type]
    with tensord.Client(daemon.socket, timeout_s=math.inf) as patient:
        assert patient.status()["store"]


def test_a_program_whose_name_is_no_text_is_attached(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(Path("/bin") / (SURROGATE + "x" * 200))])
    assert daemon.client().connected
    assert daemon.client_rows()[0]["name"].startswith("?x")


def test_names_that_no_message_can_carry_are_refused(client: tensord.Client) -> None:
    for call in (
        lambda: client.put(KEY, 1, agent=SURROGATE),
        lambda: client.on_mode(print, SURROGATE),
        lambda: client.request_arrived(SURROGATE),
        lambda: client.reserve_device(SURROGATE, 1),
    ):
        with pytest.raises(UsageError, match="surrogates"):
            call()


@pytest.mark.parametrize("items", [5, [KEY], {KEY: 1}, [(KEY,)], [(KEY, 1, 2)], [5]], ids=repr)
def test_items_that_are_no_pairs_are_refused_and_none_is_stored(client: tensord.Client, items: Any) -> None:
    with pytest.raises(UsageError, match="pairs of a key and a tree"):
        client.put_many(items)
    client.put(b"z" * 32, 1, wait=True)
    assert not client.contains(KEY)


@pytest.mark.parametrize("call", TAKE_KEYS)
@pytest.mark.parametrize("stored", [True, False])
def test_every_call_takes_the_same_for_a_key(client: tensord.Client, call: str, stored: bool) -> None:
    if stored:
        client.put(KEY, 1, wait=True)
    array = np.frombuffer(KEY, np.uint8)
    for wrong in (array, array.view("f4"), np.frombuffer(KEY * 2, np.uint8)[::2], "k" * 32, KEY[:31], None, 5):
        with pytest.raises(BadKey):
            TAKE_KEYS[call](client, wrong)
    with pytest.raises(BadKey):
        TAKE_KEYS[call](client, memoryview(KEY).cast("I"))
    for right in (bytearray(KEY), memoryview(KEY), KEY):
        TAKE_KEYS[call](client, right)
    assert client.contains(KEY) is ((stored and call != "evict") or call in ("put", "put_many", "get_or_compute"))
