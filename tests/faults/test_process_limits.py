"""A client's process can open no more files, or start no more threads: it goes on as without a daemon, and says why."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.errors import DaemonUnavailable, LimitReached, ProcessLimit

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from ..processes import Child, Stage
from .payloads import is_payload, key, payload

FILES = 128
UID = 64_321
NAMESPACE = tensord.Namespace(model="few", revision="1", dtype="uint64", processor="none")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(socket_mode="0666") as daemon:
        daemon.folder.chmod(0o755)
        yield daemon.start()


def takes_all_but(free: int) -> list[int]:
    """Opens files until only `free` descriptors are left."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    held: list[int] = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        for _ in range(free):
            os.close(held.pop())
    return held


def has_few_files(stage: Stage, path: Path, free: int) -> Any:
    client_of, cache_of = tensord.Client, tensord.PrefixCache  # a name of tensord is imported at its first use
    tokens = np.arange(64, dtype=np.uint32)
    held = takes_all_but(free)
    client = client_of(path, timeout_s=PATIENCE_S)
    prefixes = cache_of(client, NAMESPACE, block_tokens=16)
    found = [client.get(key(1)) is None, prefixes.match(tokens) is None, client.get_or_compute(key(3), lambda: 1)]
    put = client.put(key(1), payload(1), wait=True)
    for fd in held:
        os.close(fd)
    again = client.wait_connected(PATIENCE_S) and client.put(key(2), payload(2), wait=True).state
    return found, put.state, type(put.error).__name__, str(put.error), again


@pytest.mark.parametrize("free", range(7))
def test_a_client_without_free_descriptors_misses_and_says_the_limit_until_some_are_free(
    daemon: Daemon, free: int
) -> None:
    with Child(has_few_files, daemon.socket, free) as child:
        found, state, error, text, again = child.hear()
    assert found[:2] == [True, True]
    assert (state, error) == ("lost", ProcessLimit.__name__), text
    assert f"its limit is {FILES} (RLIMIT_NOFILE)" in text
    assert again == "stored"


def is_attached_with_few_files(stage: Stage, path: Path, free: int, first: bool) -> Any:
    client = tensord.Client(path, timeout_s=PATIENCE_S)
    assert client.wait_connected(PATIENCE_S) and client.get(key(1)) is None
    if first:
        assert client.put(key(1), payload(1), wait=True).state == "stored"
    connection = client._link.connection
    held = takes_all_but(free)
    large = client.put(key(2), np.ones(2 * MIB, np.uint8), wait=True)
    small = client.put(key(3), payload(3), wait=True)
    kept = client._link.connection is connection
    for fd in held:
        os.close(fd)
    again = [client.put(key(number), np.ones(2 * MIB, np.uint8), wait=True).state for number in (4, 5)]
    kept = kept and client._link.connection is connection
    return kept, [(put.state, str(put.error)) for put in (large, small)], again


@pytest.mark.parametrize("free", range(4))
@pytest.mark.parametrize("first", [False, True], ids=["no inbox", "an inbox"])
def test_a_put_for_which_no_file_can_be_opened_names_the_limit_and_leaves_the_connection(
    daemon: Daemon, free: int, first: bool
) -> None:
    with Child(is_attached_with_few_files, daemon.socket, free, first) as child:
        kept, puts, again = child.hear()
    assert kept
    for state, error in puts:
        assert state == "stored" or (state == "lost" and f"its limit is {FILES} (RLIMIT_NOFILE)" in error), error
    if first:
        assert [state for state, _ in puts] == ["stored", "stored"], puts
    assert again == ["stored", "stored"]


def may_open(daemon: Daemon, files: int) -> None:
    _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (files, hard))


@pytest.mark.parametrize("free", range(6))
def test_a_daemon_without_free_descriptors_tells_new_clients_the_limit_and_serves_the_others(
    daemon: Daemon, free: int
) -> None:
    attached = daemon.client()
    assert attached.put(key(1), payload(1), wait=True).state == "stored"
    connection = attached._link.connection
    files = daemon.descriptors() + free
    before, _ = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    may_open(daemon, files)
    news = [tensord.Client(daemon.socket, timeout_s=PATIENCE_S) for _ in range(4)]
    puts = [put_when_answered(client, 10 + number) for number, client in enumerate(news)]
    assert {put.state for put in puts} <= {"stored", "refused"}
    errors = [str(put.error) for put in puts if put.state == "refused"]
    assert errors and all(f"its limit is {files} (RLIMIT_NOFILE)" in error for error in errors), errors
    lease = attached.get(key(1))
    assert lease is not None and is_payload(lease.tree, 1)
    assert attached.put(key(2), payload(2), wait=True).state == "stored"
    assert attached._link.connection is connection
    assert daemon.log.count("cannot accept a connection") <= 1
    may_open(daemon, before)
    for client in news:
        until(partial(has_put, client), "a put once the daemon can open files")
        client.close()


def put_when_answered(client: tensord.Client, number: int) -> Any:
    """A put of a new client, once it is attached or refused."""
    client.get(key(1))
    until(lambda: client.connected or isinstance(client._link.error, LimitReached), "the daemon's answer")
    return client.put(key(number), payload(number), wait=True)


def has_put(client: tensord.Client) -> bool:
    return client.put(key(3), payload(3), wait=True).state in ("stored", "existed")


def test_an_async_call_for_which_no_thread_can_be_started_says_the_limit_and_is_not_made_later(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def called() -> None:
        begun, over = threading.Event(), threading.Event()

        def busy() -> None:
            begun.set()
            over.wait()

        async with tensord.AsyncClient(daemon.socket, timeout_s=PATIENCE_S) as client:
            assert await client.wait_connected(PATIENCE_S)
            loop = asyncio.get_running_loop()
            pool = ThreadPoolExecutor(2)
            loop.set_default_executor(pool)
            working = loop.run_in_executor(None, busy)
            begun.wait()
            with monkeypatch.context() as patched:
                patched.setattr(threading.Thread, "start", no_thread_more)
                with pytest.raises(ProcessLimit, match="RLIMIT_NPROC"):
                    await client.put(key(1), payload(1))
            over.set()
            await working
            # Queued after the first one.
            assert (await client.put(key(2), payload(2), wait=True)).state == "stored"
            assert not await client.contains(key(1))

    def no_thread_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    asyncio.run(called())


def may_start_no_thread(stage: Stage, path: Path) -> Any:
    client_of, limit = tensord.Client, resource.getrlimit(resource.RLIMIT_NPROC)
    os.setgroups([])
    os.setresgid(UID, UID, UID)
    os.setresuid(UID, UID, 0)
    os.setresuid(UID, UID, UID)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, limit[1]))
    client = client_of(path, timeout_s=PATIENCE_S)
    put = client.put(key(1), payload(1), wait=True)
    found = [client.get(key(1)) is None, client.connected, put.state, type(put.error).__name__, str(put.error)]
    try:
        client_of(path, required=True)
    except DaemonUnavailable as error:
        found.append(type(error).__name__)
    try:
        client.on_mode(lambda change: None)
    except ProcessLimit as error:
        found.append(type(error).__name__)
    resource.setrlimit(resource.RLIMIT_NPROC, limit)
    return found, client.wait_connected(PATIENCE_S) and client.put(key(2), payload(2), wait=True).state


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_a_client_that_may_start_no_thread_acts_as_without_a_daemon_until_it_may(daemon: Daemon) -> None:
    with Child(may_start_no_thread, daemon.socket) as child:
        (missed, connected, state, error, text, required, mode), again = child.hear()
    assert missed and not connected
    assert (state, error, required, mode) == ("lost", *[ProcessLimit.__name__] * 3)
    assert "can start no thread" in text and "RLIMIT_NPROC" in text
    assert again == "stored"
