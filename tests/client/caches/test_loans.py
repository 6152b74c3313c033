"""Loans: what a sender of the processor cache sent is read, whatever becomes of the entry, the ring or the daemon."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Final

import numpy as np
import pytest

import tensord
from tensord.client.caches.processor import loans
from tensord.client.caches.processor.cache import ProcessorCache
from tensord.client.caches.processor.loans import LOAN_BYTES, Loans, Reference, fetch
from tensord.client.reading.lease import Lease

from ...daemon_process import MIB, PATIENCE_S, Daemon, until
from ...processes import child_says
from .processor_items import is_picture, picture, read, receiver, sender

NO_LIMIT: Final = 1 << 60
_numbers = count(1)


@pytest.fixture(autouse=True)
def _as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a lender's thread may take longer to answer than an engine would wait for it."""
    monkeypatch.setattr(loans, "FETCH_S", PATIENCE_S)


@pytest.fixture
def lender() -> Iterator[Loans]:
    made = Loans(1000, NO_LIMIT, PATIENCE_S)
    yield made
    made.close()


def an_entry(client: tensord.Client, size_bytes: int = MIB) -> tuple[bytes, Lease]:
    """A stored tree, held."""
    number = next(_numbers)
    key = os.urandom(32)
    tree = {"number": number, "x": np.full(size_bytes, number % 251, np.uint8)}
    client.put(key, tree, wait=True, timeout_s=PATIENCE_S)
    lease = client.get(key)
    assert lease is not None
    return key, lease


def lent(lender: Loans, lease: Lease) -> bytes:
    loan = lender.lend(lease)
    assert loan is not None and len(loan) == LOAN_BYTES
    return loan


# ---- a loan


def test_a_new_loan_ends_an_older_one_only_after_the_older_ones_seconds(daemon: Daemon) -> None:
    client = daemon.client()
    (_, one), (_, other) = an_entry(client), an_entry(client)
    for seconds in (PATIENCE_S, 0.01):
        lender = Loans(1000, MIB * 3 // 2, seconds)
        first = lent(lender, one)
        if seconds == PATIENCE_S:
            assert lender.lend(other) is None
            assert fetch(first) is not None
        else:
            until(lambda lender=lender: lender.lend(other), "the first loan to make room")  # type: ignore[misc]
            assert fetch(first) is None
        lender.close()


def test_a_loan_that_is_never_read_ends_after_unread_s_max(
    daemon: Daemon, lender: Loans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loans, "UNREAD_S_MAX", 0.05)
    monkeypatch.setattr(loans, "_SWEEP_S", 0.01)
    _, lease = an_entry(daemon.client())
    lent(lender, lease)
    until(lambda: lender.lent_bytes == 0, "the loan to end")


def test_the_child_of_a_fork_lends_for_itself(daemon: Daemon, lender: Loans) -> None:
    _, lease = an_entry(daemon.client())
    loan = lent(lender, lease)
    assert fetch(loan) is not None

    def lends() -> bool:
        own = lender.lend(lease)
        right = own is not None and own[:8] != loan[:8] and fetch(own) is not None
        return right and lender.lent_bytes == lease.payload_bytes

    assert child_says(lends) == 0
    assert fetch(loan) is not None


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_a_lender_that_is_closed_or_forgotten_ends_its_thread(daemon: Daemon, how: str) -> None:
    before = set(threading.enumerate())
    made = Loans(1000, NO_LIMIT, PATIENCE_S)
    lent(made, an_entry(daemon.client())[1])
    (thread,) = (each for each in set(threading.enumerate()) - before if each.name == "tensord-loans")
    if how == "closed":
        made.close()
    del made
    until(lambda: not thread.is_alive(), "the thread to end, and what it kept to go")


# ---- in the processor cache


def nothing(daemon: Daemon, frontend: ProcessorCache) -> None:
    pass


def cleared(daemon: Daemon, frontend: ProcessorCache) -> None:
    """`tensorctl clear`, by which time others have stored something else."""
    assert daemon.client().clear() >= 1
    client = daemon.client()
    for _ in range(64):  # all is overwritten that nobody pins
        client.put(os.urandom(32), np.full(MIB // 2, 77, np.uint8), wait=True, timeout_s=PATIENCE_S)


def reset(daemon: Daemon, frontend: ProcessorCache) -> None:
    """The frontend's own cache is reset, too."""
    cleared(daemon, frontend)
    frontend.forget()


def replaced(daemon: Daemon, frontend: ProcessorCache) -> None:
    daemon.interrupt()
    daemon.start()


def killed(daemon: Daemon, frontend: ProcessorCache) -> None:
    daemon.kill()


@pytest.mark.parametrize("copy", [False, True, "on_write"])
@pytest.mark.parametrize("what", [nothing, cleared, reset, replaced, killed], ids=lambda what: what.__name__)
def test_a_sent_handle_is_readable_whatever_happens_meanwhile(
    daemon: Daemon, what: Callable[[Daemon, ProcessorCache], None], copy: Any
) -> None:
    frontend = sender(daemon.client())
    engine_client = daemon.client()
    engine = receiver(engine_client, copy=copy)
    numbers = range(1, 4)
    sent = [frontend.get_and_update([picture(number)], [str(number)])[0] for number in numbers]
    assert all(isinstance(data, Reference) and data.loan for data in sent)
    ring = engine_client.ring()
    what(daemon, frontend)
    if what is replaced:
        until(lambda: engine_client.ring() is not ring and engine_client.connected, "the engine to see the new ring")
    for number, data in zip(numbers, sent, strict=True):
        assert is_picture(read(engine, str(number), data), number)
    until(lambda: frontend.lent_bytes == 0, "what was read to be let go")
    frontend.close()
    engine.close()


def test_an_entry_stored_again_is_not_the_one_that_was_sent(daemon: Daemon) -> None:
    frontend, other = sender(daemon.client()), sender(daemon.client())
    (sent,) = frontend.get_and_update([picture(1)], ["x"])
    daemon.client().clear()
    other.get_and_update([{"another": "processor"}], ["x"])
    assert is_picture(read(receiver(daemon.client()), "x", sent), 1)
    frontend.close()
    other.close()
