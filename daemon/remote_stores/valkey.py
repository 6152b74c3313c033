"""Valkey or Redis as a remote store: a server, or a cluster.

    tensord-1:KEY           an object, with a time to live; KEY in hexadecimal
    tensord-1:claim:KEY     a claim: its owner and the milliseconds that it was given, with a time to live
    tensord-1:gen:TAG       the generation of a namespace, without a time to live

Owns: the commands, the names of keys, and what an error of the library says. Does not own: connections and clusters,
which are redis-py's.

A claim is best effort: a server that fails over to a replica may forget it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from ...errors import BadConfiguration, TensordError, TierFull, TierReadOnly, TierRefused, TierTooLarge, TierUnavailable
from ...ipc.quantities import DURATION_WANTS, read_duration
from ...shm.index.keys import GENERATION_MAX
from ...shm.ring.layout import NAMESPACE_TAG_BYTES
from ..forms.events import RemoteEntry
from .form import OBJECT_HEADER_BYTES, Buffer, object_header
from .store import NAME, HostClaim, RemoteStore, one_of, options, shown, split

try:
    import redis
    from redis import exceptions as told
    from redis.backoff import NoBackoff
    from redis.credentials import CredentialProvider
    from redis.retry import Retry
except ImportError:
    raise BadConfiguration(
        "redis://, rediss://, valkey:// and valkeys:// need redis-py: pip install 'tensord[valkey]'"
    ) from None

EXPIRY_S: Final = 86400.0
VALUE_BYTES_MAX: Final = 512 << 20
"""The most bytes of a value that a server takes by default (proto-max-bulk-len)."""
PIECE_BYTES: Final = 512 << 10
_EXPIRY_S_MAX: Final = 10 * 365 * 86400.0
_PORT: Final = 6379
_RAISE: Final = (
    "local s = redis.call('GET', KEYS[1]) or '0' "
    "if not string.find(s, '^%d+$') or tonumber(s) > tonumber(ARGV[2]) then return s end "
    "local n = math.max(tonumber(s) + 1, tonumber(ARGV[1])) redis.call('SET', KEYS[1], n) return n"
)
_OWN: Final = "local v = redis.call('GET', KEYS[1]) local own = v and string.sub(v, 1, #ARGV[1]) == ARGV[1] "
_CLAIM: Final = _OWN + (
    "if v and not own then return {v, redis.call('PTTL', KEYS[1])} end "
    "redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. ARGV[2], 'PX', ARGV[2])"
)
_RELEASE: Final = _OWN + "if own then return redis.call('UNLINK', KEYS[1]) end return 0"


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
    "cluster": (one_of("no", "yes"), "yes or no"),
    "password_file": _FILE,
}
_TLS_OPTIONS: Final = {**_OPTIONS, "ssl_ca_certs": _FILE, "ssl_certfile": _FILE, "ssl_keyfile": _FILE}


@dataclass
class PasswordFile(CredentialProvider):  # type: ignore[misc, unused-ignore]
    """Credentials whose password is read from a file for each new connection, so that it may change."""

    user: str | None
    path: Path
    address: str

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """(password) or (user, password). Raises TierRefused if the file cannot be read."""
        try:
            password = self.path.read_text("utf-8").rstrip("\n")
        except (OSError, ValueError) as error:
            raise TierRefused(f"{self.address}: the password_file cannot be read: {error}") from None
        return (self.user, password) if self.user else (password,)


class ValkeyStore(RemoteStore):
    """The store of which `connect` makes the client, at the first call: that of a cluster asks for its servers at once.
    `expiry_s`: how long an object is kept after its put; None: for ever."""

    def __init__(self, address: str, timeout_s: float, connect: Callable[[], Any], expiry_s: float | None) -> None:
        super().__init__(address, timeout_s)
        self._connect = connect
        self._expiry_s = expiry_s
        self._connecting = threading.Lock()
        self._connected: Any = None
        self._closed = False

    @classmethod
    def of_url(cls, url: str, timeout_s: float) -> ValkeyStore:
        """The store of a URL such as valkeys://user:password@host:6379/0?expiry=1h&cluster=yes."""
        parts = split(url)
        address = shown(url)
        secure = parts.scheme in ("rediss", "valkeys")
        given = options(url, _TLS_OPTIONS if secure else _OPTIONS)
        database = parts.path.strip("/")
        if not parts.hostname:
            raise BadConfiguration(f"{address} names no host: write {parts.scheme}://HOST:PORT")
        if database and not (database.isdecimal() and len(database) < 6):
            raise BadConfiguration(f"{address}: the database {database!r} must be a number")
        cluster, expiry_s = given.pop("cluster", "no") == "yes", given.pop("expiry", EXPIRY_S)
        if cluster and database.strip("0"):
            raise BadConfiguration(f"{address}: a cluster has only database 0, not {database}")
        user, password = (unquote(text) if text else None for text in (parts.username, parts.password))
        if "password_file" in given:
            if password:
                raise BadConfiguration(f"{address} has a password and a password_file; leave one out")
            given["credential_provider"] = PasswordFile(user, Path(given.pop("password_file")), address)
        elif user or password:
            given |= {"username": user, "password": password}
        if secure:  # the default of redis-py differs from release to release
            given |= {"ssl": True, "ssl_check_hostname": True}
        given |= {"host": parts.hostname, "port": parts.port or _PORT, "protocol": 2, "socket_timeout": timeout_s}
        given["socket_connect_timeout"] = timeout_s

        def connect() -> Any:
            if cluster:
                return redis.RedisCluster(**given, retry=Retry(NoBackoff(), 1), require_full_coverage=False)
            return redis.Redis(**given, retry=Retry(NoBackoff(), 0), db=int(database or 0))

        return cls(address, timeout_s, connect, expiry_s)

    def look(self, keys: Sequence[bytes]) -> tuple[int, list[RemoteEntry | None]]:
        tag, last = keys[0][:NAMESPACE_TAG_BYTES], OBJECT_HEADER_BYTES - 1
        heads = [("GETRANGE", _name(key), 0, last) for key in keys]
        generation, *found = self._replies(("GET", _generation_name(tag)), *heads)
        return self._generation(tag, generation), [self._head(*each) for each in zip(keys, found, strict=True)]

    def get_into(self, key: bytes, buffer: memoryview) -> RemoteEntry | None:
        """In pieces: redis-py copies a reply several times, which takes a fifth of the time in the processor's cache.
        If the object is replaced meanwhile, its checksum may be wrong."""
        at = 0
        while True:
            [piece] = self._replies(("GETRANGE", _name(key), at, at + PIECE_BYTES - 1))
            if isinstance(piece, Exception):
                return self._head(key, piece)
            if at + len(piece) > len(buffer):
                return None
            buffer[at : at + len(piece)] = piece
            at += len(piece)
            if len(piece) < PIECE_BYTES:
                return self._checked(key, buffer[:at]) if at else None

    def put_from(self, key: bytes, payload: Buffer, entry: RemoteEntry) -> None:
        value_bytes = OBJECT_HEADER_BYTES + len(payload)
        if value_bytes > VALUE_BYTES_MAX:
            raise TierTooLarge(
                f"{self.address}: an object of {value_bytes} bytes is larger than a value's {VALUE_BYTES_MAX} bytes"
            )
        times_s = [each for each in (self._expiry_s, entry.lives_s) if each is not None]
        ttl_ms = round(min(times_s) * 1000) if times_s else None
        if ttl_ms is None or ttl_ms > 0:
            with self._asking(writes=True) as client:
                client.set(_name(key), b"".join((object_header(key, entry, time.time()), payload)), px=ttl_ms)

    def remove(self, keys: Sequence[bytes]) -> None:
        self._replies(*(("UNLINK", _name(key)) for key in keys), writes=True)

    def claim(self, key: bytes, owner: bytes, seconds: float) -> HostClaim | None:
        """None also if the server takes no writes, or the value is no claim: nobody would ever end that one."""
        name, lasts_ms = f"{NAME}:claim:{key.hex()}", max(1, round(seconds * 1000))
        try:
            [others] = self._replies(("EVAL", _CLAIM, 1, name, owner, lasts_ms), writes=True)
        except (TierFull, TierReadOnly):
            return None
        if others is None:
            return HostClaim(True)
        if isinstance(others, Exception):
            self._count_corrupt(f"the value of {name} is no claim, delete it: {others}")
            return None
        [value, left_ms] = others
        given_ms = value.rpartition(b" ")[2]
        known = given_ms.isdigit() and left_ms >= 0
        return HostClaim(False, max(0.0, (int(given_ms) - left_ms) / 1000) if known else 0.0)

    def unclaim(self, key: bytes, owner: bytes) -> bool:
        return self._replies(("EVAL", _RELEASE, 1, f"{NAME}:claim:{key.hex()}", owner), writes=True) == [1]

    def generations(self, tags: Sequence[bytes]) -> list[int]:
        found = self._replies(*(("GET", _generation_name(tag)) for tag in tags))
        return [self._generation(tag, each) for tag, each in zip(tags, found, strict=True)]

    def raise_generation(self, tag: bytes, least: int) -> int:
        [given] = self._replies(("EVAL", _RAISE, 1, _generation_name(tag), least, GENERATION_MAX - 1), writes=True)
        return self._generation(tag, given)

    def close(self) -> None:
        with self._connecting:
            self._closed, client, self._connected = True, self._connected, None
        self._disconnect_if_closed(client)

    @contextmanager
    def _asking(self, *, writes: bool = False) -> Iterator[Any]:
        """The client. Errors of the library become errors of tensord. `writes`: whether they say nothing of reads."""
        try:
            with self._connecting:
                if self._closed:
                    raise self._was_closed()
                if self._connected is None:
                    self._connected = self._connect()
                client = self._connected
            try:
                yield client
            finally:
                self._disconnect_if_closed(client)
        except (told.RedisError, told.RedisClusterException, OSError, ValueError) as error:
            if isinstance(error, TensordError):
                raise
            raise self._error(error, writes=writes) from None

    def _disconnect_if_closed(self, client: Any) -> None:
        """Also after each call: one that was under way when the store was closed may have connected again."""
        if not self._closed or client is None:
            return
        if isinstance(client, redis.Redis):
            client.connection_pool.disconnect()
        else:
            client.disconnect_connection_pools()

    def _error(self, error: Exception, *, writes: bool) -> TensordError:
        address, said = self.address, "".join(each if each.isprintable() else "?" for each in str(error))
        match error:
            case told.TimeoutError() | TimeoutError():
                return self.timed_out()
            case told.OutOfMemoryError():
                return TierFull(
                    f"{address} is full: {said}; raise maxmemory, set maxmemory-policy to volatile-lru, or lower "
                    "`expiry` in the URL. No bytes were stored"
                )
            case told.ReadOnlyError():
                return TierReadOnly(
                    f"{address} takes no writes: {said}; name the primary in the URL, or set remote.write = false"
                )
            case told.NoPermissionError() if writes:
                return TierReadOnly(
                    f"{address} takes no writes of this user: {said}; allow SET, UNLINK and EVAL on keys tensord-*, or "
                    "set remote.write = false"
                )
            case told.AuthenticationError() | told.NoPermissionError():
                return TierRefused(
                    f"{address} refuses the user or the command: {said}; put the user and password into the URL "
                    "(password_file=PATH keeps it out of it), and allow GET, GETRANGE, SET, PTTL, UNLINK and EVAL on "
                    "keys tensord-*"
                )
            case told.ClusterDownError() | told.TryAgainError():
                return TierUnavailable(f"{address} does not serve now: {said}")
            case told.AskError():
                return TierRefused(f"{address} is a server of a cluster: add cluster=yes to the URL ({said})")
            case told.ResponseError() if "DB index is out of range" in said:
                return TierRefused(f"{address} has no such database: write a lower number as the path ({said})")
            case told.ResponseError():
                return TierRefused(f"{address} refuses the command: {said}")
            case told.RedisClusterException() if "not enabled" in said:
                return TierRefused(f"{address} is no server of a cluster: leave cluster=yes out of the URL ({said})")
        hint = "check that a server runs there, and use rediss:// or valkeys:// for one with TLS"
        if "CERTIFICATE_VERIFY" in said:
            hint = "name the host as its certificate does, and its authority's file by ssl_ca_certs in the URL"
        return TierUnavailable(f"{address} cannot be reached: {said}; {hint}")

    def _replies(self, *commands: tuple[Any, ...], writes: bool = False) -> list[Any]:
        """The replies to commands that are sent together. An error is raised, but for that of a value of another type:
        that one is the reply, since it says nothing of the server."""
        with self._asking(writes=writes) as client:
            asked = client.pipeline(transaction=False)
            for command in commands:
                asked.execute_command(*command)
            replies: list[Any] = asked.execute(raise_on_error=False)
            for reply in replies:
                if isinstance(reply, Exception) and "WRONGTYPE" not in str(reply):
                    raise reply
            return replies

    def _head(self, key: bytes, stored: bytes | Exception) -> RemoteEntry | None:
        if isinstance(stored, Exception):
            self._count_corrupt(f"the value of {key.hex()} is no object: {stored}")
            return None
        return self._checked(key, memoryview(stored), header=True) if stored else None

    def _generation(self, tag: bytes, reply: Any) -> int:
        try:
            number = 0 if reply is None else int(reply)
        except (TypeError, ValueError):
            number = -1
        if not 0 <= number < GENERATION_MAX:
            raise TierRefused(f"{self.address} has {reply!r} as a generation: delete the key {_generation_name(tag)}")
        return number


def _name(key: bytes) -> str:
    return f"{NAME}:{key.hex()}"


def _generation_name(tag: bytes) -> str:
    return f"{NAME}:gen:{tag.hex()}"
