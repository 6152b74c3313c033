"""What SIGHUP does to a daemon that serves: what is refused changes nothing, and the manager hears that it is over."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tensord.daemon import app, reloading
from tensord.daemon.actors.messages import Reloaded
from tensord.daemon.config.config import Config
from tensord.daemon.process import logs
from tensord.errors import BadConfiguration


class Told:
    """An actor that hears what it is told and does nothing."""

    def __init__(self) -> None:
        self.inbox = self
        self.heard: list[object] = []
        self.verdicts: list[dict[str, Any]] = []

    def tell_now(self, message: object) -> None:
        if isinstance(message, Reloaded):
            self.verdicts.append(message.verdict)
        else:
            self.heard.append(message)


class Reloading:
    """A daemon as it is while it serves, under a manager."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "tensord.toml"
        self.file.touch()
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.bind(str(folder / "notify"))
        self.manager.setblocking(False)
        self.store, self.governor = Told(), Told()
        argv, environ = ["--config", str(self.file)], {"NOTIFY_SOCKET": str(folder / "notify")}
        self.config = Config.load(argv, {})
        self.daemon = app._Daemon(self.config, argv, environ)

    def reload(self, text: str) -> list[bytes]:
        """What the manager hears of a reload."""
        self.file.write_text(text)
        superblock = SimpleNamespace(limit_bytes=1 << 20, max_entries=16)
        memory = SimpleNamespace(superblock=superblock)
        self.daemon._reload(cast(Any, SimpleNamespace(memory=memory, store=self.store, governor=self.governor)))
        heard = []
        while True:
            try:
                heard.append(self.manager.recv(4096).split(b"\n")[0])
            except BlockingIOError:
                return heard

    @property
    def changed(self) -> list[object]:
        return [*self.store.heard, *self.governor.heard, *([] if self.daemon._config is self.config else ["config"])]


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(logs, "level", lambda _: None)
    reloading = Reloading(tmp_path)
    yield reloading
    reloading.daemon._notifier.close()
    reloading.manager.close()


def test_a_reload_reaches_store_and_governor(serving: Reloading) -> None:
    assert serving.reload("max_bytes = 1048576\n[pressure]\nnormal = 0.5\n") == [b"RELOADING=1", b"READY=1"]
    (store,), (governor,) = serving.store.heard, serving.governor.heard
    assert cast(Any, store).limits.max_bytes == 1 << 20
    assert cast(Any, store).limits.max_entries == 16, "what stands holds"
    assert cast(Any, governor).limits.thresholds.normal == 0.5


def test_a_reload_with_thresholds_that_do_not_go_together_changes_nothing_and_ends(serving: Reloading) -> None:
    text = "max_bytes = 1048576\n[pressure]\nnormal = 0.02\nhysteresis = 0.03\n"
    assert serving.reload(text) == [b"RELOADING=1", b"READY=1"]
    assert serving.changed == []


@pytest.mark.parametrize("limits", ["store_limits", "governor_limits"])
def test_a_reload_that_any_part_refuses_changes_no_other_part(
    serving: Reloading, monkeypatch: pytest.MonkeyPatch, limits: str
) -> None:
    def refuse(*_: object) -> None:
        raise BadConfiguration("this part wants none of it")

    monkeypatch.setattr(reloading, limits, refuse)
    assert serving.reload("max_bytes = 1048576\n") == [b"RELOADING=1", b"READY=1"]
    assert serving.changed == []


def test_every_reload_has_a_verdict(serving: Reloading) -> None:
    serving.reload("max_bytes = 1048576\n")
    serving.reload("max_bites = 1\n")
    accepted, refused = serving.store.verdicts
    assert (accepted["number"], accepted["refused"]) == (1, "")
    assert accepted["applied"] == [{"key": "max_bytes", "before": "none", "after": "1MiB"}]
    assert refused["number"] == 2 and "did you mean 'max_bytes'" in refused["refused"]
    assert refused["applied"] == []
