"""Every limit that is reached, and every fault of a start, is named with the remedy, and disturbs nobody."""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tensord
from tensord.daemon.connections.sockets import Sockets
from tensord.errors import LimitReached, ObjectTooLarge, StoreFull, TensordError
from tensord.ipc.messages import control as messages
from tensord.shm.ring.layout import LAYOUT_VERSION
from tensord.shm.ring.segments import existing

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from ..faults.payloads import has, is_payload, key, payload
from ..faults.raw import RawClient
from ..processes import Child, Stage, python

LIMITS = "tensord.daemon.config.limits"
OTHERS = range(900, 904)


@contextmanager
def undisturbed(daemon: Daemon) -> Iterator[tensord.Client]:
    """Another client's entries are there before, and still there and right after, and it can still put."""
    other = daemon.client(name="other")
    for number in OTHERS:
        assert other.put(key(number), payload(number, 4096), wait=True).state == "stored"
    yield other
    assert other.connected
    for number in OTHERS:
        assert has(other, number, verify=True)
    assert other.put(key(999), payload(999, 4096), wait=True).state == "stored"


def refused(put: tensord.Put, kind: type[TensordError], *named: object) -> None:
    """The put was refused with an error of `kind` that names all of `named`."""
    assert put.wait(PATIENCE_S).state == "refused", put
    assert type(put.error) is kind, put.error
    for what in named:
        assert str(what) in str(put.error), f"{what} is not named: {put.error}"


# ---- size


def test_a_payload_larger_than_the_ring_is_refused() -> None:
    with Daemon(ring_bytes=2 * MIB) as daemon, undisturbed(daemon.start()):
        client = daemon.client()
        data = payload(1, 3 * MIB)
        refused(client.put(key(1), data), ObjectTooLarge, "object_bytes_max", 2 * MIB, "3145", "raise ring_bytes")
        with pytest.raises(ObjectTooLarge, match="takes at most 2097152"):
            client.reserve(tensord.Spec((3 * MIB,), "uint8"))
        # It fits the limit, but not with its header.
        refused(client.put(key(1), payload(1, 2 * MIB - 128)), ObjectTooLarge, 2 * MIB)
        with RawClient(daemon.socket, writes="in place") as raw:
            with pytest.raises(ObjectTooLarge, match="object_bytes_max is 2097152"):
                raw.borrow(3 * MIB)
            (place,) = raw.borrow(MIB)
            answer = raw.until_settled(raw.submit(key(1), place, (3 * MIB, 10)))
            assert answer is not None and answer.error is not None and "not lent to its client" in answer.error.text


def test_a_full_ring_with_everything_pinned_refuses_and_serves_again_when_a_lease_goes() -> None:
    with Daemon(ring_bytes=2 * MIB) as daemon, undisturbed(daemon.start()):
        client = daemon.client()
        held = []
        for number in range(7):
            assert client.put(key(number), payload(number, 256 << 10), wait=True).state == "stored"
            held.append(client.get(key(number)))
        others = [client.get(key(number)) for number in OTHERS]
        # The fence and a scan or two: it is answered, and never waits for a reader.
        refused(
            client.put(key(50), payload(50, 256 << 10)),
            StoreFull,
            "(ring)",
            "largest_free_bytes",
            "pinned",
            "raise ring_bytes",
        )
        for number, lease in enumerate(held):
            assert lease is not None and is_payload(lease.tree, number)
        assert all(others)
        held.pop(3)
        del lease
        assert client.put(key(50), payload(50, 256 << 10), wait=True).state == "stored"
        assert daemon.store("found_corrupt") == 0


# ---- counts


@pytest.mark.parametrize("limit", ["clients_max", "lanes_max"])
def test_over_a_limit_a_new_client_is_refused_and_a_client_with_a_lane_may_attach_again(limit: str) -> None:
    with Daemon(**{f"limits_{limit}": 2}) as daemon, undisturbed(daemon.start()) as other:
        client = daemon.client()
        for _ in range(30):
            with pytest.raises(LimitReached, match=rf"{limit} is 2.*raise it"):
                tensord.Client(daemon.socket, required=True, timeout_s=PATIENCE_S)
        assert client.connected
        held = client.get(key(OTHERS[0]))
        daemon.restart()
        daemon.attached(client, other)
        assert held is not None and is_payload(held.tree, OTHERS[0])
        client.close()
        if limit == "lanes_max":
            # Its lane is in being for as long as a view of it lives.
            with pytest.raises(LimitReached, match=limit):
                tensord.Client(daemon.socket, required=True)
        del held
        until(lambda: daemon.status()["lanes"] == 1, "the lane to go")
        daemon.client()


# ---- starting


def test_a_ring_of_another_layout_version_is_freed_with_both_named() -> None:
    with Daemon() as daemon:
        client = daemon.start().client()
        assert client.put(key(1), payload(1), wait=True).state == "stored"
        lease = client.get(key(1))
        daemon.terminate()
        index = next(path for path in daemon.segments() if path.name.endswith(".index"))
        with index.open("r+b") as file:
            file.seek(8)
            file.write((77).to_bytes(8, "little"))
        daemon.start()
        assert f"layout version 77, this release reads {LAYOUT_VERSION}" in daemon.log
        (notice,) = daemon.ask(messages.HealthQuery)["notices"]
        assert "version 77" in notice and "freed with its entries" in notice
        until(lambda: client.get(key(1)) is None, "it to see the new ring")
        assert client.wait_connected(PATIENCE_S)
        assert client.put(key(1), payload(1), wait=True).state == "stored"
        assert lease is not None and is_payload(lease.tree, 1)


def test_a_daemon_serves_in_spite_of_variables_that_it_does_not_know_and_logs_them() -> None:
    injected = {"TENSORD_PORT": "tcp://10.0.0.1:9477", "TENSORD_VLLM_PROCESSOR_CACHE": "1"}
    with Daemon() as daemon:
        daemon.prefix = ["env", *(f"{name}={value}" for name, value in injected.items())]
        daemon.start()
        for name in injected:
            (line,) = (line for line in daemon.log.splitlines() if name in line)
            assert "level=warning" in line and "environment variable ignored" in line, line


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        (("--ring-bytes", "plenty"), 2),
        (("--socket-group", "no-such-group"), 2),  # is found out while it starts
        (("--socket", "/proc/nowhere/control.sock"), 1),
        # No fault of the configuration: a service manager starts the daemon again, as it does with a busy Unix socket.
        (("--http", "taken"), 1),
        (("--metrics-listen", "taken"), 1),
    ],
)
def test_every_wrong_configuration_ends_with_status_2_and_leaves_no_memory(
    tmp_path: Path, flags: tuple[str, ...], status: int
) -> None:
    instance = f"start-{os.getpid()}"
    given = ["--instance", instance, "--ring-bytes", "4MiB", "--socket", str(tmp_path / "control.sock"), *flags]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [word.replace("taken", f"127.0.0.1:{taken.getsockname()[1]}") for word in given]
        done = python("-m", "tensord.daemon", *words)
    assert done.returncode == status, done.stderr
    assert existing(instance) == []


# ---- signals


def signal_when_listening(number: int, config: str, text: str) -> None:
    """Runs in the daemon: as soon as its sockets listen, `text` goes to the file `config`, then the signal comes."""
    begin = Sockets.__enter__

    def enter(sockets: Sockets) -> Sockets:
        Path(config).write_text(text)
        os.kill(os.getpid(), number)
        return begin(sockets)

    Sockets.__enter__ = enter  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(("number", "kept"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_a_signal_to_stop_at_the_start_ends_it_as_later(number: signal.Signals, kept: bool) -> None:
    with Daemon() as daemon:
        file = daemon.folder / "tensord.toml"
        file.touch()
        daemon.flags["config"] = file
        changed = {"number": number, "config": str(file), "text": "max_bytes = 1048576\n"}
        daemon.before = f"{__name__}:signal_when_listening", changed
        assert daemon.spawn().wait(30.0) == 0, daemon.log
        assert "stopping" in daemon.log
        assert not daemon.socket.exists() and not daemon.status_socket.exists()
        assert bool(daemon.segments()) == kept


# ---- limits of the service manager or the shell


def limit(name: str, value: int) -> None:
    number = getattr(resource, name)
    resource.setrlimit(number, (value, resource.getrlimit(number)[1]))


def lacks_addresses(stage: Stage, path: Path, free_bytes: int) -> Any:
    client_of = tensord.Client  # imported before the limit
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit("RLIMIT_AS", pages * resource.getpagesize() + free_bytes)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    client = client_of(path, timeout_s=PATIENCE_S)
    found, put = client.get(key(1)) is None, client.put(key(1), payload(1), wait=True)
    computed = client.get_or_compute(key(2), lambda: 2)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    again = client.wait_connected(PATIENCE_S) and client.put(key(3), payload(3), wait=True).state
    return found, put.state, type(put.error).__name__, str(put.error), computed, again


def test_a_client_that_cannot_map_the_ring_names_its_size_and_the_limit_until_it_can() -> None:
    with Daemon(ring_bytes=256 * MIB) as daemon, Child(lacks_addresses, daemon.start().socket, 200 * MIB) as child:
        missed, state, error, text, computed, again = child.hear()
    assert (missed, state, error, computed) == (True, "lost", "ProcessLimit", 2)
    assert f"the ring of {256 * MIB} bytes cannot be mapped" in text, text
    assert "RLIMIT_AS" in text and "ulimit -v" in text and "smaller ring_bytes" in text
    assert again == "stored"


# ---- of a client


def test_loggings_fork_handlers_come_before_those_of_the_client() -> None:
    """The client's may log: in a child, logging renews its locks first, whatever is imported first."""
    program = """
import os
found, register = [], os.register_at_fork
def registered(**handlers):
    found.append(next(iter(handlers.values())).__module__)
    register(**handlers)
os.register_at_fork = registered
import tensord.client.caches.visual
print(*found)
"""
    found = python("-c", program).stdout.split()
    assert found.index("logging") < found.index("tensord.client.threads.forks")
