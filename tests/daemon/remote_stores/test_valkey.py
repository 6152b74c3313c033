"""Redis as a remote store: the conformance suite with a real redis-server, and what only such a server has."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import OutOfMemoryError

from tensord.daemon.remote_stores.store import RemoteStore
from tensord.daemon.remote_stores.valkey import ValkeyStore
from tensord.errors import TierFull, TierRefused, TierTimedOut, TierUnavailable
from tests.daemon_process import until

from .conformance import MIB, AnyStore, Backend, claims
from .conftest import Opened
from .entries import calls, get, heads, key_of, made, put
from .servers import HOST, RedisServer


def name_of(key: bytes) -> str:
    return f"tensord-1:{key.hex()}"


class Redis(Backend):
    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.url = server.url
        self.direct = redis.Redis(HOST, server.port)

    def raw(self, key: bytes) -> bytes:
        found = self.direct.get(name_of(key))
        assert isinstance(found, bytes)
        return found

    def set_raw(self, key: bytes, stored: bytes) -> None:
        self.direct.set(name_of(key), stored)

    def fill(self) -> None:
        """From now on there is no room for 1 MiB."""
        used: Any = self.direct.info("memory")
        self.direct.config_set("maxmemory", used["used_memory"] + 200_000)
        self.direct.config_set("maxmemory-policy", "noeviction")
        with suppress(OutOfMemoryError):
            while True:
                self.direct.append("filler", bytes(100_000))


@pytest.fixture
def backend(server: RedisServer) -> Iterator[Redis]:
    made_once = Redis(server)
    yield made_once
    made_once.direct.close()


class TestRedis(AnyStore):
    def test_a_full_store_says_so_and_keeps_serving_without_claims(self, backend: Redis, store: RemoteStore) -> None:
        small = made(1)
        put(store, small)
        backend.fill()
        with pytest.raises(TierFull, match=r"bytes"):
            put(store, made(2, MIB))
        assert get(store, small.key) == (small.payload, small.entry)
        assert get(store, key_of(2)) is None
        assert heads(store, [key_of(2)]) == [None]
        assert store.claim(key_of(2), b"host 1", 60.0) is None
        assert store.corrupt == 0

    @pytest.mark.parametrize("connected", [True, False])
    def test_a_stopped_server_costs_a_call_its_time_and_no_byte(
        self, backend: Redis, opened: Opened, connected: bool
    ) -> None:
        store, entry = opened(backend.url, 0.2), made(1, 8 * MIB)
        if connected:
            put(store, entry)
        every: list[Callable[[], object]] = [*calls(store, entry), partial(store.claim, entry.key, b"me", 1.0)]
        with backend.server.paused():
            for call in every:
                with pytest.raises(TierTimedOut, match=r"within 0\.2 s"):
                    call()
        store = opened(backend.url)
        put(store, entry)
        assert get(store, entry.key, 8 * MIB) == (entry.payload, entry.entry)
        assert store.corrupt == 0

    def test_a_killed_server_is_an_error_and_a_restarted_one_serves(self, backend: Redis, store: RemoteStore) -> None:
        entry = made(1)
        put(store, entry)
        backend.server.kill()
        for call in calls(store, entry):
            with pytest.raises(TierUnavailable, match=backend.url):
                call()
        backend.server.start()
        assert get(store, entry.key) is None
        put(store, entry)
        assert get(store, entry.key) == (entry.payload, entry.entry)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, server.pem for 127.0.0.1 and its key, and other.pem, another authority."""
    folder = tmp_path_factory.mktemp("tls")
    # Python 3.13 and newer want to be told what a certificate is for.
    use = ("-addext", "keyUsage=critical,digitalSignature,keyCertSign,cRLSign")
    ca = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *use)
    for name in ("ca", "other"):
        words = ("-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
        subprocess.run([*ca, *words], cwd=folder, check=True, capture_output=True)
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-subj", "/CN=server", "-addext", f"subjectAltName=IP:{HOST}")
    files = ("-keyout", "server.key", "-out", "server.pem")
    subprocess.run([*ca, *signed, *files], cwd=folder, check=True, capture_output=True)
    return folder


def test_a_server_with_tls_and_a_users_password_is_used(certificates: Path, opened: Opened) -> None:
    ca = str(certificates / "ca.pem")
    with RedisServer("--user", "tensord", "on", ">s%cret", "~tensord-*", "+@all", tls=certificates) as server:
        store = opened(f"rediss://tensord:s%25cret@{HOST}:{server.port}?ssl_ca_certs={ca}")
        put(store, made(1, MIB))
        assert get(store, key_of(1)) == (made(1, MIB).payload, made(1, MIB).entry)


def test_a_certificate_of_another_authority_or_host_and_a_client_without_tls_are_refused(
    certificates: Path, opened: Opened
) -> None:
    with RedisServer(tls=certificates) as server:
        for url, says in (
            (f"rediss://{HOST}:{server.port}?ssl_ca_certs={certificates}/other.pem", "ssl_ca_certs"),
            (f"rediss://{HOST}:{server.port}", "ssl_ca_certs"),
            (f"valkeys://localhost:{server.port}?ssl_ca_certs={certificates}/ca.pem", "ssl_ca_certs"),
            (f"redis://{HOST}:{server.port}", "rediss://"),
        ):
            store = opened(url)
            with pytest.raises(TierUnavailable, match=says):
                put(store, made(1))


@pytest.mark.parametrize("who", ["", ":wrong@", "tensord:wrong@", "nobody:secret@"])
def test_wrong_credentials_are_refused_and_never_shown(who: str, opened: Opened) -> None:
    with RedisServer("--requirepass", "secret", "--user", "tensord", "on", ">right", "~tensord-*", "+@all") as server:
        store = opened(f"redis://{who}{HOST}:{server.port}")
        for call in calls(store, made(1)):
            with pytest.raises(TierRefused, match="put the user and password into the URL") as raised:
                call()
            assert f"redis://{HOST}:{server.port}" in str(raised.value)
            assert "wrong" not in str(raised.value).replace("WRONGPASS", "").lower() or not who
            assert "secret" not in str(raised.value)
        assert "wrong" not in store.address


def test_a_password_file_is_read_for_each_new_connection(tmp_path: Path, opened: Opened) -> None:
    secret = tmp_path / "password"
    with RedisServer("--requirepass", "second") as server:
        store = opened(f"valkey://{HOST}:{server.port}?password_file={secret}")
        for written, says in ((None, "password_file cannot be read"), ("first\n", "refuses the user")):
            if written:
                secret.write_text(written)
            with pytest.raises(TierRefused, match=says):
                get(store, key_of(1))
        secret.write_text("second\n")
        assert get(store, key_of(1)) is None


def test_objects_live_for_the_urls_expiry_or_their_own_shorter_time(backend: Redis, opened: Opened) -> None:
    for option, low_ms, high_ms in (("", 86_000_000, 86_400_000), ("?expiry=10m", 500_000, 600_000)):
        put(opened(backend.url + option), made(1), made(2, lives_s=300.0), made(3, lives_s=1e7))
        assert low_ms < int(backend.direct.pttl(name_of(key_of(1)))) <= high_ms
        assert 200_000 < int(backend.direct.pttl(name_of(key_of(2)))) <= 300_000
        assert low_ms < int(backend.direct.pttl(name_of(key_of(3)))) <= high_ms
    put(opened(backend.url + "?expiry=none"), made(1), made(4, lives_s=-1.0))
    assert backend.direct.pttl(name_of(key_of(1))) == -1
    assert not backend.direct.exists(name_of(key_of(4)))


def test_a_claim_ends_by_itself_and_tells_how_long_ago_it_began(backend: Redis, opened: Opened) -> None:
    one, two = opened(backend.url), opened(backend.url)
    name = f"tensord-1:claim:{key_of(1).hex()}"
    assert claims(one, key_of(1), b"one", 0.05)
    until(lambda: claims(one, key_of(1), b"two", 60.0), "the claim to end")
    assert one.unclaim(key_of(1), b"one") is False, "the claim belongs to another owner by now"
    assert 0 < int(backend.direct.pttl(name)) <= 60_000
    backend.direct.pexpire(name, 20_000)
    other = two.claim(key_of(1), b"three", 90.0)
    assert other is not None and not other.mine and other.age_s == pytest.approx(50.0, abs=10.1)
    assert claims(one, key_of(1), b"two", 60.0), "it begins anew"
    other = two.claim(key_of(1), b"three", 90.0)
    assert other is not None and other.age_s < 20.0


def test_a_connection_that_the_server_has_ended_is_replaced(backend: Redis, opened: Opened) -> None:
    store = opened(backend.url)
    put(store, made(1))
    backend.direct.client_kill_filter(_type="normal", skipme=True)
    assert get(store, key_of(1)) is not None


def test_a_call_during_which_the_store_is_closed_leaves_no_connection(server: RedisServer) -> None:
    class ClosedMeanwhile(redis.Redis):
        def pipeline(self, *args: Any, **options: Any) -> Any:
            store.close()
            return super().pipeline(*args, **options)

    closed = ClosedMeanwhile(HOST, server.port)
    store = ValkeyStore(server.url, 5.0, lambda: closed, None)
    store.look([key_of(1)])
    with redis.Redis(HOST, server.port) as client:
        until(lambda: len(client.client_list()) == 1, "the store's connection to end")


def test_a_server_that_is_no_redis_is_named(opened: Opened) -> None:
    with ThreadingHTTPServer((HOST, 0), BaseHTTPRequestHandler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        url = f"redis://{HOST}:{web.server_port}"
        with pytest.raises(TierUnavailable, match=url):
            get(opened(url), key_of(1))
        web.shutdown()


def test_without_redis_py_the_extra_is_named() -> None:
    program = """
import sys
sys.modules["redis"] = None
from tensord.daemon.remote_stores.store import open_store
from tensord.errors import BadConfiguration
try:
    open_store("valkey://host")
except BadConfiguration as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "pip install 'tensord[valkey]'" in said


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("..", "cannot be reached"),
        ("no-such-host.invalid", "cannot be reached"),
        (f"{HOST}:1", "check that a server runs there"),
        ("{server}?cluster=yes", "leave cluster=yes out of the URL"),
        ("{server}/9999", "a lower number as the path"),
    ],
)
def test_what_cannot_be_reached_or_is_not_there_is_said_with_what_to_write(
    server: RedisServer, where: str, says: str, opened: Opened
) -> None:
    store = opened(f"redis://{where.format(server=f'{HOST}:{server.port}')}")
    with pytest.raises((TierUnavailable, TierRefused), match=says):
        heads(store, [key_of(1)])
