"""Valkey or Redis as a remote store: a server, or a cluster.

    tensord-1:KEY           an object, with a time to live; KEY in hexadecimal
    tensord-1:claim:KEY     a claim: its owner and the milliseconds that it was given, with a time to live
    tensord-1:gen:TAG       the generation of a namespace, without a time to live

Owns: the commands, and the names of keys. Does not own: connections and clusters (`valkey_nodes`).

An object is read into the caller's buffer from the socket, and written to the socket from the caller's memory, without
a copy in between. A claim is best effort: a server that fails over to a replica may forget it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from ...errors import BadConfiguration, TierFull, TierReadOnly, TierRefused, TierTooLarge
from ...ipc.quantities import DURATION_WANTS, read_duration
from ...shm.index.keys import GENERATION_MAX
from ..process.small_files import small_text
from .form import OBJECT_HEADER_BYTES, Buffer, Meta, RemoteEntry, object_header
from .store import NAME, HostClaim, RemoteStore
from .urls import options, shown, split, switch

try:
    from redis.connection import Connection, SSLConnection
    from redis.credentials import CredentialProvider
except ImportError:
    raise BadConfiguration(
        "redis://, rediss://, valkey:// and valkeys:// need redis-py: pip install 'tensord[valkey]'"
    ) from None

from .valkey_nodes import ValkeyCommand, ValkeyNodes
from .valkey_wire import ServerError, command

EXPIRY_S: Final = 86400.0
VALUE_BYTES_MAX: Final = 512 << 20
"""The most bytes of a value that a server takes by default (proto-max-bulk-len)."""
_EXPIRY_S_MAX: Final = 10 * 365 * 86400.0
_PORT: Final = 6379
_CLAIM_DIGITS: Final = 12
_RAISE: Final = (
    b"local s = redis.call('GET', KEYS[1]) or '0' "
    b"if not string.find(s, '^%d+$') or tonumber(s) > tonumber(ARGV[2]) then return s end "
    b"local n = math.max(tonumber(s) + 1, tonumber(ARGV[1])) redis.call('SET', KEYS[1], n) return n"
)
_RELEASE: Final = (
    b"local v = redis.call('GET', KEYS[1]) "
    b"if v and string.sub(v, 1, #ARGV[1]) == ARGV[1] then return redis.call('UNLINK', KEYS[1]) end return 0"
)


def _expiry(text: str) -> float | None:
    if text == "none":
        return None
    expiry_s = read_duration(text)
    if not 1 <= expiry_s <= _EXPIRY_S_MAX:
        raise ValueError
    return expiry_s


def _file(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError
    return text


_FILE: Final = (_file, "an absolute path")
_OPTIONS: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    "expiry": (_expiry, f"{DURATION_WANTS}, from 1s to 10 years, or none"),
    "cluster": (switch, "yes or no"),
    "password_file": _FILE,
}
_TLS_OPTIONS: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    "ssl_ca_certs": _FILE,
    "ssl_certfile": _FILE,
    "ssl_keyfile": _FILE,
}


class PasswordFile(CredentialProvider):  # type: ignore[misc, unused-ignore]
    """Credentials whose password is read from a file for each new connection, so that it may change."""

    def __init__(self, user: str | None, path: Path, address: str) -> None:
        self._user = user
        self._path = path
        self._address = address

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """(password) or (user, password).

        Raises:
            TierRefused: the file cannot be read.
        """
        try:
            password = small_text(self._path).rstrip("\n")
        except (OSError, ValueError) as error:
            raise TierRefused(f"{self._address}: the password_file cannot be read: {error}") from None
        return (self._user, password) if self._user else (password,)


class ValkeyStore(RemoteStore):
    """The store at `nodes`. `expiry_s` is the time that an object is kept after its put; None keeps it for ever."""

    def __init__(self, nodes: ValkeyNodes, expiry_s: float | None = EXPIRY_S) -> None:
        super().__init__(nodes.shown(nodes.seed))
        self._nodes = nodes
        self._expiry_s = expiry_s

    @classmethod
    def of_url(cls, url: str) -> ValkeyStore:
        """The store of a URL such as valkeys://user:password@host:6379/0?expiry=1h&cluster=yes.

        Raises:
            BadConfiguration: the URL has no host, or a wrong database or option.
        """
        parts = split(url)
        address = shown(url)
        secure = parts.scheme in ("rediss", "valkeys")
        given = options(url, {**_OPTIONS, **_TLS_OPTIONS} if secure else _OPTIONS)
        database = parts.path.strip("/")
        if not parts.hostname:
            raise BadConfiguration(f"{address} names no host: write {parts.scheme}://HOST:PORT")
        if database and not (database.isdecimal() and len(database) < 6):
            raise BadConfiguration(f"{address}: the database {database!r} must be a number")
        cluster = given.pop("cluster", False)
        if cluster and database.strip("0"):
            raise BadConfiguration(f"{address}: a cluster has only database 0, not {database}")
        user, password = (unquote(text) if text else None for text in (parts.username, parts.password))
        connect_with: dict[str, Any] = {"db": int(database or 0)}
        if "password_file" in given:
            if password:
                raise BadConfiguration(f"{address} has a password and a password_file; leave one out")
            path = Path(given.pop("password_file"))
            connect_with["credential_provider"] = PasswordFile(user, path, address)
        elif user or password:
            connect_with |= {"username": user, "password": password}
        if secure:  # the default of redis-py differs from release to release
            given["ssl_check_hostname"] = True
        expiry_s = given.pop("expiry", EXPIRY_S)
        nodes = ValkeyNodes(
            parts.scheme,
            (parts.hostname, parts.port or _PORT),
            SSLConnection if secure else Connection,
            connect_with | given,
            cluster=cluster,
        )
        return cls(nodes, expiry_s)

    def heads(self, keys: Sequence[bytes], deadline: float) -> list[RemoteEntry | None]:
        self._left_s(deadline)
        commands = [_of(key, b"GETRANGE", 0, OBJECT_HEADER_BYTES - 1) for key in keys]
        found = self._nodes.run(commands, lambda _, wire: wire.answer(deadline), deadline)
        return [self._found(key, stored) if stored else None for key, stored in zip(keys, found, strict=True)]

    def get_into(self, key: bytes, buffer: memoryview, deadline: float) -> RemoteEntry | None:
        self._left_s(deadline)
        [reply] = self._nodes.run([_of(key, b"GET")], lambda _, wire: wire.payload(buffer, deadline), deadline)
        if isinstance(reply, ServerError):
            self._count_wrong_type(key, reply)
            return None
        return self._checked(key, buffer[:reply]) if reply is not None and reply <= len(buffer) else None

    def put_from(self, key: bytes, payload: Buffer, meta: Meta, deadline: float) -> None:
        self._left_s(deadline)
        stores = self._set(key, payload, meta)
        if stores is not None:
            self._change([stores], deadline)

    def remove(self, keys: Sequence[bytes], deadline: float) -> None:
        self._left_s(deadline)
        commands = [_of(key, b"UNLINK") for key in keys]
        self._change(commands, deadline)

    def claim(self, key: bytes, owner: bytes, seconds: float, deadline: float) -> HostClaim | None:
        """None also if the server takes no writes, or the value is no claim: nobody would ever end that one."""
        self._left_s(deadline)
        name, given_ms = _claim_name(key), max(1, round(seconds * 1000))
        value = owner + b" %d" % given_ms
        pieces = command(b"SET", name, value, b"NX", b"PX", given_ms)
        looks = command(b"GETRANGE", name, 0, len(owner) + _CLAIM_DIGITS)
        try:
            given, seen = self._change([ValkeyCommand(name, pieces), ValkeyCommand(name, looks)], deadline)
            if given is None and isinstance(seen, bytes) and seen.startswith(owner):
                pieces = command(b"SET", name, value, b"XX", b"PX", given_ms)
                [given] = self._change([ValkeyCommand(name, pieces)], deadline)
        except (TierFull, TierReadOnly):
            return None
        if isinstance(seen, ServerError):
            self._count_corrupt(f"the value of {name.decode()} is no claim, delete it: {seen.text}")
            return None
        return HostClaim(True) if given is not None else HostClaim(False, self._age_s(name, seen, deadline))

    def unclaim(self, key: bytes, owner: bytes, deadline: float) -> bool:
        self._left_s(deadline)
        name = _claim_name(key)
        pieces = command(b"EVAL", _RELEASE, 1, name, owner)
        [reply] = self._change([ValkeyCommand(name, pieces)], deadline)
        return bool(reply == 1)

    def generations(self, tags: Sequence[bytes], deadline: float) -> list[int]:
        self._left_s(deadline)
        commands = [ValkeyCommand(name, command(b"GET", name)) for name in map(_generation_name, tags)]
        found = self._nodes.run(commands, lambda _, wire: wire.answer(deadline), deadline)
        return [self._generation(tag, each) for tag, each in zip(tags, found, strict=True)]

    def raise_generation(self, tag: bytes, least: int, deadline: float) -> int:
        self._left_s(deadline)
        name = _generation_name(tag)
        pieces = command(b"EVAL", _RAISE, 1, name, least, GENERATION_MAX - 1)
        [reply] = self._change([ValkeyCommand(name, pieces)], deadline)
        return self._generation(tag, reply)

    def close(self) -> None:
        self._nodes.close()

    def _age_s(self, name: bytes, value: bytes, deadline: float) -> float:
        """How long ago another host's claim began; 0 if that cannot be told."""
        given_ms = value.rpartition(b" ")[2]
        try:
            pieces = command(b"PTTL", name)
            [left_ms] = self._nodes.run([ValkeyCommand(name, pieces)], lambda _, wire: wire.answer(deadline), deadline)
        except TierRefused:
            return 0.0
        return max(0.0, (int(given_ms) - left_ms) / 1000) if given_ms.isdigit() and left_ms >= 0 else 0.0

    def _change(self, commands: Sequence[ValkeyCommand], deadline: float) -> list[Any]:
        """The short replies to commands that change something."""
        return self._nodes.run(commands, lambda _, wire: wire.answer(deadline), deadline, writes=True)

    def _found(self, key: bytes, stored: bytes | ServerError) -> RemoteEntry | None:
        if isinstance(stored, ServerError):
            self._count_wrong_type(key, stored)
            return None
        return self._head(key, memoryview(stored))

    def _count_wrong_type(self, key: bytes, error: ServerError) -> None:
        self._count_corrupt(f"the value of {key.hex()} is no object: {error.text}")

    def _generation(self, tag: bytes, reply: Any) -> int:
        try:
            number = 0 if reply is None else int(reply)
        except (TypeError, ValueError):
            number = -1
        if not 0 <= number < GENERATION_MAX:
            what = reply.text if isinstance(reply, ServerError) else reply
            raise TierRefused(
                f"{self.address} has {what!r} as a generation: delete the key {_generation_name(tag).decode()}"
            )
        return number

    def _set(self, key: bytes, payload: Buffer, meta: Meta) -> ValkeyCommand | None:
        """The command that stores an entry. None if the time of the entry is over."""
        header = object_header(key, len(payload), meta)
        value_bytes = OBJECT_HEADER_BYTES + len(payload)
        if value_bytes > VALUE_BYTES_MAX:
            raise TierTooLarge(
                f"{self.address}: an object of {value_bytes} bytes is larger than a value's {VALUE_BYTES_MAX} bytes"
            )
        times_s = [self._expiry_s] if self._expiry_s is not None else []
        if meta.expires_unix_s:
            times_s.append(meta.expires_unix_s - time.time())
        ttl_ms = round(min(times_s) * 1000) if times_s else None
        if ttl_ms is not None and ttl_ms <= 0:
            return None
        name = _name(key)
        words = 3 if ttl_ms is None else 5
        pieces: list[Buffer] = [
            b"*%d\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (words, len(name), name, value_bytes),
            header,
            payload,
            b"\r\n" if ttl_ms is None else b"\r\n" + b"".join(command(b"PX", ttl_ms)[1:]),
        ]
        return ValkeyCommand(name, pieces)


def _name(key: bytes) -> bytes:
    return f"{NAME}:{key.hex()}".encode()


def _claim_name(key: bytes) -> bytes:
    return f"{NAME}:claim:{key.hex()}".encode()


def _generation_name(tag: bytes) -> bytes:
    return f"{NAME}:gen:{tag.hex()}".encode()


def _of(key: bytes, word: bytes, *more: int) -> ValkeyCommand:
    name = _name(key)
    return ValkeyCommand(name, command(word, name, *more))
