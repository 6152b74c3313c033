"""A client's process can open no more files, or start no more threads: it goes on as without a daemon, and says why."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.errors import DaemonUnavailable, LimitReached, ProcessLimit

from ..daemon_process import PATIENCE_S, Daemon, until
from ..processes import Child, Stage
from .payloads import has, key, payload

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


@pytest.mark.parametrize("free", [0, 3, 6])
def test_a_client_without_free_descriptors_misses_and_says_the_limit_until_some_are_free(
    daemon: Daemon, free: int
) -> None:
    with Child(has_few_files, daemon.socket, free) as child:
        found, state, error, text, again = child.hear()
    assert found[:2] == [True, True]
    assert (state, error) == ("lost", ProcessLimit.__name__), text
    assert f"its limit is {FILES} (RLIMIT_NOFILE)" in text
    assert again == "stored"


def may_open(daemon: Daemon, files: int) -> None:
    _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (files, hard))


@pytest.mark.parametrize("free", [0, 2, 5])
def test_a_daemon_without_free_descriptors_tells_new_clients_the_limit_and_serves_the_others(
    daemon: Daemon, free: int
) -> None:
    attached = daemon.client()
    assert attached.put(key(1), payload(1), wait=True).state == "stored"
    connection = attached.link.connection
    files = daemon.descriptors() + free
    before, _ = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    may_open(daemon, files)
    news = [tensord.Client(daemon.socket, timeout_s=PATIENCE_S) for _ in range(4)]
    puts = [put_when_answered(client, 10 + number) for number, client in enumerate(news)]
    assert {put.state for put in puts} <= {"stored", "refused"}
    errors = [str(put.error) for put in puts if put.state == "refused"]
    assert errors and all(f"its limit is {files} (RLIMIT_NOFILE)" in error for error in errors), errors
    assert has(attached, 1)
    assert attached.put(key(2), payload(2), wait=True).state == "stored"
    assert attached.link.connection is connection
    assert daemon.log.count("cannot accept a connection") <= 1
    may_open(daemon, before)
    for client in news:
        until(partial(has_put, client), "a put once the daemon can open files")
        client.close()


def put_when_answered(client: tensord.Client, number: int) -> Any:
    """A put of a new client, once it is attached or refused."""
    client.get(key(1))
    until(lambda: client.connected or isinstance(client.link.error, LimitReached), "the daemon's answer")
    return client.put(key(number), payload(number), wait=True)


def has_put(client: tensord.Client) -> bool:
    return client.put(key(3), payload(3), wait=True).state in ("stored", "existed")


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
