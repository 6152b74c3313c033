"""A network of hosts in namespaces of their own, with a Redis server in the middle. Needs root and iproute2.

    hub:   bridge 10.79.0.1, redis-server
    h0 …   10.79.0.11 …, a daemon each; its clients are processes of the machine, which reach it by its socket

Owns: the namespaces, and the links between them. All are gone when the `with` block ends.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Final, Self

PATIENCE_S: Final = 30.0
HUB: Final = "10.79.0.1"
_numbers = count(1)


def missing() -> str:
    """Why no network can be made here; empty if one can."""
    if os.geteuid() != 0:
        return "namespaces of the network need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc are missing: apt-get install iproute2"
    tried = subprocess.run(
        ["ip", "netns", "add", f"tensord-try-{os.getpid()}"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        return f"no namespace can be made: {tried.stderr.strip()}"
    run("ip", "netns", "del", f"tensord-try-{os.getpid()}")
    return ""


def run(*words: str) -> str:
    """Runs a command, and gives what it prints.

    Raises:
        RuntimeError: it has failed.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
    return done.stdout


class Network:
    """`hosts` namespaces around a hub."""

    def __init__(self, hosts: int) -> None:
        self._prefix = f"td{os.getpid() % 10000}x{next(_numbers)}"
        self._names = [f"{self._prefix}h{number}" for number in range(hosts)]
        self.hub = f"{self._prefix}hub"
        self._made: list[str] = []

    def __enter__(self) -> Self:
        try:
            self._make(self.hub)
            run("ip", "-n", self.hub, "link", "add", "br0", "type", "bridge")
            run("ip", "-n", self.hub, "addr", "add", f"{HUB}/24", "dev", "br0")
            run("ip", "-n", self.hub, "link", "set", "br0", "up")
            for number, name in enumerate(self._names):
                self._make(name)
                peer = f"to{number}"
                run("ip", "-n", self.hub, "link", "add", peer, "type", "veth", "peer", "name", "eth0", "netns", name)
                run("ip", "-n", self.hub, "link", "set", peer, "master", "br0", "up")
                run("ip", "-n", name, "addr", "add", f"10.79.0.{11 + number}/24", "dev", "eth0")
                run("ip", "-n", name, "link", "set", "eth0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        self._made.clear()

    @staticmethod
    def within(name: str) -> list[str]:
        """What a command is run under to be in a namespace."""
        return ["ip", "netns", "exec", name]

    def host(self, number: int) -> list[str]:
        """What host `number`'s daemon is run under."""
        return self.within(self._names[number])

    def cut(self, number: int) -> None:
        """The host reaches nobody from now on. Packets are lost without an answer."""
        run("ip", "-n", self.hub, "link", "set", f"to{number}", "down")

    def join(self, number: int) -> None:
        """The host reaches the others again."""
        run("ip", "-n", self.hub, "link", "set", f"to{number}", "up")

    def slow(self, number: int, rate: str) -> None:
        """What the host receives comes at `rate`, as tc writes it."""
        shaped = ("root", "tbf", "rate", rate, "burst", "16kb", "latency", "400ms")
        run("tc", "-n", self.hub, "qdisc", "replace", "dev", f"to{number}", *shaped)

    def quick(self, number: int) -> None:
        """Ends `slow`."""
        run("tc", "-n", self.hub, "qdisc", "del", "dev", f"to{number}", "root")

    def _make(self, name: str) -> None:
        run("ip", "netns", "add", name)
        self._made.append(name)
        run("ip", "-n", name, "link", "set", "lo", "up")


class HubRedis:
    """A redis-server at the hub of a network."""

    def __init__(self, network: Network, folder: Path, *words: str) -> None:
        self._network = network
        self._folder = folder
        self._words = words
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"valkey://{HUB}:6379"

    def start(self) -> Self:
        program = shutil.which("redis-server")
        if program is None:
            raise RuntimeError("redis-server is missing: apt-get install redis-server")
        log = self._folder / "redis.log"
        ready_before = log.read_text().count("Ready to accept") if log.exists() else 0
        options = ["--bind", HUB, "--protected-mode", "no", "--save", "", "--appendonly", "no"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*self._network.within(self._network.hub), program, "--dir", str(self._folder), *options, *self._words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + PATIENCE_S
        while log.read_text().count("Ready to accept") == ready_before:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"redis-server does not listen:\n{log.read_text()}")
            time.sleep(0.01)
        return self

    def kill(self) -> None:
        """SIGKILL, and waits for its end."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(PATIENCE_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class LocalRedis:
    """A redis-server on a free port of the loopback."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"valkey://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        program = shutil.which("redis-server")
        if program is None:
            raise RuntimeError("redis-server is missing: apt-get install redis-server")
        words = ["--port", str(self._port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
        self._process = subprocess.Popen([program, *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE_S
        while not _listens(self._port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("redis-server does not listen")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_S)


@contextmanager
def hosts(count: int, folder: Path) -> Iterator[tuple[str, list[list[str]]]]:
    """Hosts that share a redis-server, whose files are in `folder`: the URL of the server, and for each host what its
    daemon is run under. Without root they share the loopback, which is printed."""
    why_not = missing()
    with ExitStack() as stack:
        if why_not:
            print(f"the hosts share the loopback: {why_not}")
            yield stack.enter_context(LocalRedis(folder)).url, [[] for _ in range(count)]
            return
        network = stack.enter_context(Network(count))
        redis = stack.enter_context(HubRedis(network, folder))
        yield redis.url, [network.host(number) for number in range(count)]
