"""URLs of remote stores that are refused: each is told what to write, and shows no password."""

from __future__ import annotations

import pytest

from tensord.daemon.config.config import Config
from tensord.daemon.remote_stores.store import open_store
from tensord.errors import BadConfiguration


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("dir://mnt/tensord", "write dir:///PATH, with three slashes"),
        ("dir:", "write dir:///PATH, with three slashes"),
        ("dir:///mnt?bytes=many", "bytes = 'many' must be a size in bytes such as 4GiB"),
        ("dir:///mnt?bytes=0", "bytes = 0 must be at least 1MiB"),
        ("dir:///mnt?bytes=1", "bytes = 1 must be at least 1MiB"),
        ("dir:///mnt?size=1GiB", "unknown option 'size'; the options are bytes"),
        ("dir:///mnt?bytes=1&bytes=2", "'bytes' twice"),
        ("dir:///mnt/a#b", "write it as %23"),
        ("memcached://host", "memcached: is no kind of remote store; a URL begins with dir://"),
        ("/mnt/tensord", "no scheme: is no kind of remote store"),
        ("redis://[::1", "cannot be read"),
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
        ("mooncake://", "mooncake://MASTER:50051"),
        ("mooncake://user:secret@master", "without a path and a user"),
        ("mooncake://master/path", "without a path and a user"),
        ("mooncake://master?segment=lots", "segment = 'lots'"),
        ("mooncake://master?replicas=2", "unknown option 'replicas'"),
        ("mooncake://master?protocol=udp", "protocol = 'udp' must be tcp or rdma"),
    ],
)
def test_a_wrong_url_is_refused_with_what_to_write(url: str, says: str) -> None:
    with pytest.raises(BadConfiguration) as raised:
        open_store(url)
    assert says in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "valkey://user:hunter2/x@host",
        "valkey://user:hun?ter2@host:99999",
        "redis:/user:hunter2@host",
        "user:hunter2@host",
        "//user:hunter2@host",
        "redis://user:hunter2@ho\nst",
        "redis://u:hunter2@\u2100host",
    ],
)
def test_a_setting_that_is_refused_does_not_show_its_password(url: str) -> None:
    with pytest.raises(BadConfiguration) as refused:
        Config.load(["--remote-url", url], {})
    assert "hunter2" not in str(refused.value) and "ter2" not in str(refused.value)
