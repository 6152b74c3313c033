"""The servers of a Valkey store: connections to them, and in cluster mode which of them has which key.

Owns: the idle connections of each server, the map from slots to servers, and the way of a command to the server that
has its key. Does not own: what commands say (`valkey`), nor how they are sent (`valkey_wire`).

A cluster tells by an error that a key is elsewhere (MOVED, ASK). The command is then sent there, a few times at most.
When a server fails, the map is forgotten, and the next call reads it anew from any server that answers.

Limit: name resolution has no deadline, and a TLS handshake may take as long as the TCP connection before it.
"""

from __future__ import annotations

import threading
import time
from binascii import crc_hqx
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ...errors import TensordError, TierFull, TierReadOnly, TierRefused, TierUnavailable
from .form import Buffer
from .store import timed_out
from .valkey_wire import ServerError, ValkeyWire, command

SLOTS: Final = 16384
IDLE_MAX: Final = 8
"""Connections that are kept to each server while no call uses them."""
_HOPS_MAX: Final = 5
_AGAIN_S: Final = 0.01

Address = tuple[str, int]


class ValkeyCommand(NamedTuple):
    """A command of one key. `name` is the name of the key in the store, by which a cluster chooses the server."""

    name: bytes
    pieces: Sequence[Buffer]


class ValkeyNodes:
    """The server at `seed`, or its whole cluster.

    Args:
        scheme: the URL's, for messages.
        connect_with: the arguments of `kind`, the connection class of redis-py, except for host, port and timeouts.
    """

    def __init__(
        self,
        scheme: str,
        seed: Address,
        kind: Callable[..., Any],
        connect_with: Mapping[str, Any],
        *,
        cluster: bool = False,
    ) -> None:
        self.seed = seed
        self._scheme = scheme
        self._kind = kind
        self._connect_with = connect_with
        self._cluster = cluster
        self._lock = threading.Lock()
        self._idle: dict[Address, list[ValkeyWire]] = {}
        self._slots: dict[int, Address] = {}
        self._known: list[Address] = [seed]
        self._closed = False

    def shown(self, address: Address) -> str:
        """A server's address for messages."""
        host, port = address
        return f"{self._scheme}://[{host}]:{port}" if ":" in host else f"{self._scheme}://{host}:{port}"

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle = [wire for wires in self._idle.values() for wire in wires]
            self._idle.clear()
        for wire in idle:
            wire.close()

    def run(
        self,
        commands: Sequence[ValkeyCommand],
        read: Callable[[int, ValkeyWire], Any],
        deadline: float,
        *,
        writes: bool = False,
    ) -> list[Any]:
        """Sends commands, all of one server together, and reads their replies by `read`, which gets the command's
        position. The replies, in the order of the commands. A key whose value is of another type than the command
        works on has the server's error WRONGTYPE as its reply, since that says nothing of the server. `writes`:
        whether the commands change anything, so that their refusal says nothing of reads.

        Raises:
            TierUnavailable, TierRefused, TierReadOnly, TierFull: as `RemoteStore`. All replies have been read or given
                up.
        """
        replies: list[Any] = [None] * len(commands)
        todo: dict[Address, list[int]] = {}
        asking: dict[int, Address] = {}
        for position, each in enumerate(commands):
            todo.setdefault(self._home_of(each.name, deadline), []).append(position)
        for hop in range(_HOPS_MAX + 1):
            refused: ServerError | None = None
            elsewhere: dict[Address, list[int]] = {}
            for address, positions in todo.items():
                self._exchange(address, positions, asking, commands, read, replies, deadline)
                for position in positions:
                    reply = replies[position]
                    asking.pop(position, None)
                    if not isinstance(reply, ServerError) or reply.code == "WRONGTYPE":
                        continue
                    target = self._elsewhere(reply, commands[position].name, address)
                    if target is None:
                        refused = refused or reply
                        continue
                    if reply.code == "ASK":
                        asking[position] = target
                    elsewhere.setdefault(target, []).append(position)
            if refused is not None:
                raise self._refusal(refused, writes=writes)
            if not elsewhere:
                return replies
            if hop:
                time.sleep(min(_AGAIN_S, max(0.0, deadline - time.monotonic())))
            todo = elsewhere
        raise TierUnavailable(f"{self.shown(self.seed)}: the cluster has sent a command on {_HOPS_MAX} times")

    def _exchange(
        self,
        address: Address,
        positions: Sequence[int],
        asking: Mapping[int, Address],
        commands: Sequence[ValkeyCommand],
        read: Callable[[int, ValkeyWire], Any],
        replies: list[Any],
        deadline: float,
    ) -> None:
        pieces: list[Buffer] = []
        for position in positions:
            if position in asking:
                pieces += command(b"ASKING")
            pieces += commands[position].pieces
        with self._wire(address, deadline) as wire:
            wire.send(pieces, deadline)
            for position in positions:
                if position in asking:
                    wire.answer(deadline)
                replies[position] = read(position, wire)

    def _elsewhere(self, error: ServerError, name: bytes, address: Address) -> Address | None:
        """The server that a cluster's error names for a key. None if the error says something else."""
        if error.code == "TRYAGAIN":
            return address
        if error.code not in ("MOVED", "ASK") or not self._cluster:
            return None
        host, _, port = error.text.rpartition(" ")[2].rpartition(":")
        if not port.isdecimal():
            return None
        target = (host or address[0], int(port))
        if error.code == "MOVED":
            with self._lock:
                self._slots[_slot_of(name)] = target
        return target

    def _home_of(self, name: bytes, deadline: float) -> Address:
        if not self._cluster:
            return self.seed
        with self._lock:
            found = self._slots.get(_slot_of(name))
        if found is None:
            self._read_map(deadline)
            with self._lock:
                found = self._slots.get(_slot_of(name))
        if found is None:
            raise TierUnavailable(
                f"{self.shown(self.seed)}: no server of the cluster has slot {_slot_of(name)}; look at its state "
                "with CLUSTER INFO"
            )
        return found

    def _read_map(self, deadline: float) -> None:
        """Reads the map from the first server that answers."""
        with self._lock:
            known = list(dict.fromkeys([self.seed, *self._known]))
        failed: TensordError | None = None
        for address in known:
            try:
                with self._wire(address, deadline) as wire:
                    wire.send(command(b"CLUSTER", b"SLOTS"), deadline)
                    rows = wire.answer(deadline)
            except TierUnavailable as error:
                failed = failed or error
                continue
            if isinstance(rows, ServerError):
                raise self._refusal(rows)
            try:
                slots = _slots_in(rows, address[0])
            except (AttributeError, TypeError, ValueError):
                failed = failed or TierUnavailable(f"{self.shown(address)} has sent a map of slots that is none")
                continue
            with self._lock:
                self._slots = slots
                self._known = list(dict.fromkeys(slots.values()))
            return
        assert failed is not None
        raise failed

    @contextmanager
    def _wire(self, address: Address, deadline: float) -> Iterator[ValkeyWire]:
        """A connection for one exchange. It is closed if the exchange fails, since its next reply is unknown then."""
        wire = self._idle_wire(address)
        try:
            if wire is None:
                wire = self._connected(address, deadline)
            yield wire
        except BaseException as error:
            if wire is not None:
                wire.close()
            if isinstance(error, TierUnavailable):
                with self._lock:
                    self._slots = {}
            raise
        with self._lock:
            idle = self._idle.setdefault(address, [])
            keep = not self._closed and len(idle) < IDLE_MAX
            if keep:
                idle.append(wire)
        if not keep:
            wire.close()

    def _idle_wire(self, address: Address) -> ValkeyWire | None:
        while True:
            with self._lock:
                if self._closed:
                    raise TierUnavailable(f"{self.shown(address)} was closed by this process: open a new store")
                idle = self._idle.get(address)
                if not idle:
                    return None
                wire = idle.pop()
            if wire.usable:
                return wire
            wire.close()

    def _connected(self, address: Address, deadline: float) -> ValkeyWire:
        shown = self.shown(address)
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise timed_out(shown)
        host, port = address

        def log_in(connection: Any) -> None:
            connection._sock.settimeout(max(deadline - time.monotonic(), 1e-3))
            connection.on_connect()

        connection: Any = self._kind(
            host=host,
            port=port,
            socket_timeout=left_s,
            socket_connect_timeout=left_s,
            protocol=2,
            redis_connect_func=log_in,
            **self._connect_with,
        )
        try:
            connection.connect()
        except RedisTimeoutError:
            raise timed_out(shown) from None
        except (AuthenticationError, ResponseError) as error:
            raise self._refusal(ServerError("AUTH", str(error))) from None
        except (RedisError, OSError, UnicodeError) as error:  # UnicodeError: of a host name
            hint = "check that a server runs there, and use rediss:// or valkeys:// for one with TLS"
            if "CERTIFICATE_VERIFY" in str(error):
                hint = "name the host as its certificate does, and its authority's file by ssl_ca_certs in the URL"
            raise TierUnavailable(f"{shown} cannot be reached: {error}; {hint}") from None
        return ValkeyWire(connection, shown)

    def _refusal(self, error: ServerError, *, writes: bool = False) -> TensordError:
        shown = self.shown(self.seed)
        if "cluster support disabled" in error.text:
            return TierRefused(f"{shown} is no server of a cluster: leave cluster=yes out of the URL ({error.text})")
        if "DB index is out of range" in error.text:
            return TierRefused(f"{shown} has no such database: write a lower number as the path ({error.text})")
        match error.code:
            case "OOM":
                return TierFull(
                    f"{shown} is full: {error.text}; raise maxmemory, set maxmemory-policy to volatile-lru, or lower "
                    "`expiry` in the URL. No bytes were stored"
                )
            case "READONLY":
                return TierReadOnly(
                    f"{shown} takes no writes: {error.text}; name the primary in the URL, or set remote.write = false"
                )
            case "NOPERM" if writes:
                return TierReadOnly(
                    f"{shown} takes no writes of this user: {error.text}; allow SET, UNLINK and EVAL on keys "
                    "tensord-*, or set remote.write = false"
                )
            case "AUTH" | "NOAUTH" | "WRONGPASS" | "NOPERM":
                return TierRefused(
                    f"{shown} refuses the user or the command: {error.text}; put the user and password into the URL "
                    "(password_file=PATH keeps it out of it), and allow GET, GETRANGE, SET, PTTL, UNLINK and EVAL on "
                    "keys tensord-*"
                )
            case "CLUSTERDOWN" | "LOADING" | "MASTERDOWN" | "BUSY" | "TRYAGAIN":
                return TierUnavailable(f"{shown} does not serve now: {error.text}")
            case "MOVED" | "ASK":
                return TierRefused(f"{shown} is a server of a cluster: add cluster=yes to the URL ({error.text})")
        return TierRefused(f"{shown} refuses the command: {error.text}")


def _slots_in(rows: Any, host: str) -> dict[int, Address]:
    """The map in a reply to CLUSTER SLOTS. `host` stands for the server itself, where the reply names none."""
    slots: dict[int, Address] = {}
    for first, last, (named, port, *_), *_ in rows:
        own = range(max(first, 0), min(last, SLOTS - 1) + 1)
        slots.update(dict.fromkeys(own, (named.decode() if named else host, int(port))))
    return slots


def _slot_of(name: bytes) -> int:
    """The slot of a key without braces: CRC-16 (XMODEM) modulo 16384."""
    return crc_hqx(name, 0) % SLOTS
