"""Redis as a remote store: the conformance suite with a real redis-server, and what only such a server has."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import OutOfMemoryError

from tensord.daemon.remote_stores.urls import open_store
from tensord.errors import BadConfiguration, TierRefused, TierUnavailable
from tests.daemon_process import until

from .conformance import MIB, AnyStore, claims
from .entries import get, heads, key_of, made, put
from .redis_server import HOST, RedisServer
from .server_conformance import AnyServer, Server


def name_of(key: bytes) -> str:
    return f"tensord-1:{key.hex()}"


class Redis(Server):
    def __init__(self, server: RedisServer, url: str, **options: Any) -> None:
        self.server = server
        self.url = url
        self.direct = redis.Redis(HOST, server.port, **options)

    def raw(self, key: bytes) -> bytes:
        found = self.direct.get(name_of(key))
        assert isinstance(found, bytes)
        return found

    def set_raw(self, key: bytes, stored: bytes) -> None:
        self.direct.set(name_of(key), stored)

    def fill(self) -> None:
        used: Any = self.direct.info("memory")
        self.direct.config_set("maxmemory", used["used_memory"] + 200_000)
        self.direct.config_set("maxmemory-policy", "noeviction")
        try:
            while True:
                self.direct.append("filler", bytes(100_000))
        except OutOfMemoryError:
            pass

    def pause(self) -> None:
        self.server.pause()

    def resume(self) -> None:
        self.server.resume()

    def kill(self) -> None:
        self.server.kill()

    def restart(self) -> None:
        self.server.start()


@pytest.fixture
def backend() -> Iterator[Redis]:
    with RedisServer() as server:
        opened = Redis(server, f"redis://{HOST}:{server.port}")
        yield opened
        opened.direct.close()


class TestRedis(AnyStore, AnyServer):
    pass


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


def test_a_server_with_tls_and_a_users_password_is_used(certificates: Path) -> None:
    ca = str(certificates / "ca.pem")
    with RedisServer("--user", "tensord", "on", ">s%cret", "~tensord-*", "+@all", tls=certificates) as server:
        store = open_store(f"rediss://tensord:s%25cret@{HOST}:{server.port}?ssl_ca_certs={ca}")
        put(store, made(1, MIB))
        assert get(store, key_of(1)) == (made(1, MIB).payload, made(1, MIB).entry)
        store.close()


def test_a_certificate_of_another_authority_or_host_is_refused(certificates: Path) -> None:
    with RedisServer(tls=certificates) as server:
        for url in (
            f"rediss://{HOST}:{server.port}?ssl_ca_certs={certificates}/other.pem",
            f"rediss://{HOST}:{server.port}",
            f"valkeys://localhost:{server.port}?ssl_ca_certs={certificates}/ca.pem",
        ):
            store = open_store(url)
            with pytest.raises(TierUnavailable, match="ssl_ca_certs"):
                put(store, made(1))
            store.close()


def test_a_server_with_tls_is_named_to_a_client_without(certificates: Path) -> None:
    with RedisServer(tls=certificates) as server:
        store = open_store(f"redis://{HOST}:{server.port}")
        with pytest.raises(TierUnavailable, match="rediss://"):
            get(store, key_of(1))
        store.close()


@pytest.mark.parametrize("who", ["", ":wrong@", "tensord:wrong@", "nobody:secret@"])
def test_wrong_credentials_are_refused_and_never_shown(who: str) -> None:
    with RedisServer("--requirepass", "secret", "--user", "tensord", "on", ">right", "~tensord-*", "+@all") as server:
        store = open_store(f"redis://{who}{HOST}:{server.port}")
        for call in (lambda: get(store, key_of(1)), lambda: put(store, made(1)), lambda: heads(store, [b""])):
            with pytest.raises(TierRefused, match="put the user and password into the URL") as raised:
                call()
            assert f"redis://{HOST}:{server.port}" in str(raised.value)
            assert "wrong" not in str(raised.value).replace("WRONGPASS", "").lower() or not who
            assert "secret" not in str(raised.value)
        store.close()
        assert "wrong" not in store.address


def test_a_password_file_is_read_for_each_new_connection(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    with RedisServer("--requirepass", "second") as server:
        store = open_store(f"valkey://{HOST}:{server.port}?password_file={secret}")
        with pytest.raises(TierRefused, match="password_file cannot be read"):
            get(store, key_of(1))
        device = open_store(f"valkey://{HOST}:{server.port}?password_file=/dev/zero")
        with pytest.raises(TierRefused, match=r"password_file cannot be read: .*not a regular file"):
            get(device, key_of(1))
        device.close()
        secret.write_text("first\n")
        with pytest.raises(TierRefused, match="refuses the user"):
            get(store, key_of(1))
        secret.write_text("second\n")
        assert get(store, key_of(1)) is None
        store.close()


def test_objects_live_for_the_urls_expiry_or_their_own_shorter_time(backend: Redis) -> None:
    for option, low_ms, high_ms in (("", 86_000_000, 86_400_000), ("?expiry=10m", 500_000, 600_000)):
        store = open_store(backend.url + option)
        put(store, made(1), made(2, lives_s=300.0), made(3, lives_s=1e7))
        assert low_ms < int(backend.direct.pttl(name_of(key_of(1)))) <= high_ms
        assert 200_000 < int(backend.direct.pttl(name_of(key_of(2)))) <= 300_000
        assert low_ms < int(backend.direct.pttl(name_of(key_of(3)))) <= high_ms
        store.close()
    store = open_store(backend.url + "?expiry=none")
    put(store, made(1), made(4, lives_s=-1.0))
    assert backend.direct.pttl(name_of(key_of(1))) == -1
    assert not backend.direct.exists(name_of(key_of(4)))
    store.close()


def test_a_claim_ends_by_itself(backend: Redis) -> None:
    store = backend.open()
    assert claims(store, key_of(1), b"one", 0.05)
    until(lambda: claims(store, key_of(1), b"two", 60.0), "the claim to end")
    assert store.unclaim(key_of(1), b"one") is False, "the claim belongs to another owner by now"
    assert 0 < int(backend.direct.pttl(f"tensord-1:claim:{key_of(1).hex()}")) <= 60_000
    store.close()


def test_a_claim_tells_how_long_ago_it_began(backend: Redis) -> None:
    one, two = backend.open(), backend.open()
    assert claims(one, key_of(1), b"one", 60.0)
    backend.direct.pexpire(f"tensord-1:claim:{key_of(1).hex()}", 20_000)
    other = two.claim(key_of(1), b"two", 90.0)
    assert other is not None and not other.mine and other.age_s == pytest.approx(50.0, abs=10.1)
    assert claims(one, key_of(1), b"one", 60.0), "it begins anew"
    other = two.claim(key_of(1), b"two", 90.0)
    assert other is not None and other.age_s < 20.0
    one.close()
    two.close()


def test_a_connection_that_the_server_has_ended_is_replaced(backend: Redis) -> None:
    store = backend.open()
    put(store, made(1))
    backend.direct.client_kill_filter(_type="normal", skipme=True)
    assert get(store, key_of(1)) is not None
    store.close()


@pytest.mark.parametrize(
    "says",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$abc\r\n", b"*1\r\n", b"$99999999999999999\r\n"],
)
def test_a_server_that_is_no_redis_is_named_or_left_when_its_time_is_over(says: bytes) -> None:
    with socket.socket() as listening:
        listening.bind((HOST, 0))
        listening.listen()
        port = listening.getsockname()[1]

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection, suppress(OSError):  # of a client that has gone
                    connection.sendall(b"-ERR\r\n" * 2)  # to CLIENT SETINFO
                    connection.sendall(says)
                    while connection.recv(65536):
                        pass

        server = threading.Thread(target=serve)
        server.start()
        store = open_store(f"redis://{HOST}:{port}", 0.5)
        with pytest.raises(TierUnavailable, match=f"redis://{HOST}:{port}"):
            store.get_into(key_of(1), memoryview(bytearray(1000)))
        store.close()
        listening.shutdown(socket.SHUT_RDWR)
        server.join()


def test_without_redis_py_the_extra_is_named() -> None:
    program = """
import sys
sys.modules["redis"] = None
from tensord.daemon.remote_stores.urls import open_store
from tensord.errors import BadConfiguration
try:
    open_store("valkey://host")
except BadConfiguration as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "pip install 'tensord[valkey]'" in said


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://", "names no host: write redis://HOST:PORT"),
        ("valkey:///0", "names no host: write valkey://HOST:PORT"),
        ("redis://host:port", "cannot be read"),
        ("redis://host:70000", "cannot be read"),
        ("redis://host:0", "port 0 is none"),
        ("redis://host/first", "the database 'first' must be a number"),
        ("redis://host/3?cluster=yes", "a cluster has only database 0, not 3"),
        ("redis://host?expiry=soon", "expiry = 'soon' must be a duration such as 10m"),
        ("redis://host?expiry=0", "from 1s to 10 years, or none"),
        ("redis://host?ssl_ca_certs=/ca.pem", "unknown option 'ssl_ca_certs'"),
        ("rediss://host?ssl_ca_certs=ca.pem", "must be an absolute path"),
        ("redis://:secret@host?password_file=/p", "leave one out"),
        ("redis://u:secret@host?expire=1h", "the options are cluster, expiry, password_file"),
    ],
)
def test_a_wrong_url_is_refused_with_what_to_write(url: str, says: str) -> None:
    with pytest.raises(BadConfiguration) as raised:
        open_store(url)
    assert says in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("..", "cannot be reached"),
        ("no-such-host.invalid", "cannot be reached"),
        (f"{HOST}:1", "check that a server runs there"),
    ],
)
def test_an_address_that_cannot_be_reached_is_named(host: str, says: str) -> None:
    store = open_store(f"redis://{host}")
    with pytest.raises(TierUnavailable, match=says):
        put(store, made(1))
    store.close()


@pytest.mark.parametrize(
    ("of", "says"), [("?cluster=yes", "leave cluster=yes out of the URL"), ("/9999", "a lower number as the path")]
)
def test_what_a_server_does_not_have_is_said_with_what_to_write(of: str, says: str) -> None:
    with RedisServer() as server:
        store = open_store(f"redis://{HOST}:{server.port}{of}")
        with pytest.raises(TierRefused, match=says):
            heads(store, [key_of(1)])
        store.close()
