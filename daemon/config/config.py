"""All settings of the daemon, as one frozen tree.

Owns: the settings above all tables, and the conditions between settings. Does not own the tables (sections.py), how a
value is written (settings.py), nor the sources of values (sources.py).

Flags have precedence over TENSORD_* variables, these over the TOML file, and the file over the defaults. `reload=True`
marks a setting that SIGHUP changes in a running daemon. Invariant: a Config is complete and consistent.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Mapping, Sequence
from itertools import combinations
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ...errors import BadConfiguration
from ...ipc import places
from ...shm.ring import cgroups, segments
from ..governor.forms.limits import Thresholds
from ..remote_stores.store import open_store
from ..replacement import POLICIES
from . import sections
from .sections import GIB, KIB, MIB, TIB, YEAR_S
from .settings import (
    COUNT,
    DURATION,
    INSTANCE,
    LOOPBACK,
    MODE,
    PATH,
    SIZE,
    SWITCH,
    TEXT,
    Setting,
    choice,
    is_loopback,
    setting,
)
from .sources import Given, from_environ, from_file, from_flags

CONFIG_VARIABLE: Final = "TENSORD_CONFIG"
SYSTEM_FILE: Final = Path("/etc/tensord/tensord.toml")
USER_FILE: Final = "tensord/tensord.toml"
RING_BYTES_MIN: Final = 1 * MIB
ENTRIES_MIN: Final = 4096
ENTRIES_MAX: Final = 1 << 28
BYTES_PER_ENTRY: Final = 64 * KIB
ASKING_FLAGS: Final = ("--help", "--version", "--check-config")
"""The flags that ask for a text instead of a daemon (usage.py)."""


@dataclasses.dataclass(frozen=True)
class Reload:
    """The result of a SIGHUP: `key`, `before` and `after` of the changed settings, and of those that need a restart."""

    config: Config
    applied: list[dict[str, str]]
    waiting: list[dict[str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All settings. `sources`: the source of each value. `ignored`: a text for each unknown TENSORD_* variable."""

    instance: str = setting(INSTANCE, derived="system for root or as a system service, else user-<uid>")
    """Name of the shared memory; one daemon serves an instance."""
    socket: Path = setting(
        PATH, derived="control.sock in $RUNTIME_DIRECTORY, /run/tensord, $XDG_RUNTIME_DIR/tensord or /tmp/tensord-<uid>"
    )
    """The control socket; not used if a service manager passes one."""
    status_socket: Path = setting(PATH, derived="status.sock beside the control socket")
    """The read-only status socket; not used if a service manager passes one; the socket for metrics is beside it."""
    socket_group: str | None = setting(TEXT, None)
    """Group of the sockets that the daemon creates; none: the daemon's own."""
    socket_mode: int = setting(MODE, 0o660, 0o600, 0o777)
    """File mode of the control socket; who may use it may read and write every entry."""
    status_mode: int = setting(MODE, 0o660, 0o600, 0o777)
    """File mode of the sockets that are read-only; 0666 shows keys, sizes, clients and settings to every user."""
    http: str | None = setting(LOOPBACK, None)
    """Where a read-only page for browsers is served; by TCP, every user of this host may read it; none: no page."""
    ring_bytes: int = setting(
        SIZE,
        low=RING_BYTES_MIN,
        high=16 * TIB,
        derived="the least of 4GiB, a quarter of the available memory and half of /dev/shm when the ring is created",
    )
    """Memory for payloads, taken from /dev/shm at the start; an existing ring grows or shrinks to this size."""
    max_entries: int = setting(
        COUNT, low=16, high=ENTRIES_MAX, derived="one for every 64KiB of the ring when it is created, at least 4096"
    )
    """The most entries; the index is created for this number and does not grow."""
    max_bytes: int | None = setting(SIZE, None, 1 * MIB, 16 * TIB, reload=True)
    """The most bytes of payloads; none: the whole ring."""
    max_tokens: int | None = setting(COUNT, None, 1, 1 << 48, reload=True)
    """The most encoder tokens, as clients count them; none: no limit."""
    default_ttl_s: float | None = setting(DURATION, None, 0.05, 10 * YEAR_S, reload=True)
    """Time from an entry's put or last touch to its expiry, unless the put sets another one; none: no expiry."""
    write_in_place: str = setting(choice("owner", "group", "off"), "owner")
    """Which clients may write payloads into the ring by themselves, without the daemon's copy. owner: those of the
    daemon's own user; group: also those whose primary group is its own; off: none. Such a client could damage the
    entries of others."""
    policy: str = setting(choice(*POLICIES), "hazard")
    """The replacement policy: which entries are evicted for new ones."""
    drop: bool = setting(SWITCH, False)
    """Remove the shared memory with all entries on SIGTERM as well as on SIGINT."""
    memory: sections.MemorySection
    limits: sections.LimitsSection
    quotas: sections.QuotasSection
    gauges: sections.GaugesSection
    pressure: sections.PressureSection
    device: sections.DeviceSection
    queueing: sections.QueueingSection
    neighbours: sections.NeighboursSection
    remote: sections.RemoteSection
    metrics: sections.MetricsSection
    log: sections.LogSection
    sources: Mapping[str, str] = dataclasses.field(compare=False, repr=False)
    ignored: tuple[str, ...] = dataclasses.field(compare=False, repr=False)

    @classmethod
    def load(cls, argv: Sequence[str], environ: Mapping[str, str]) -> Config:
        """The settings of a daemon started with `argv` (without the program's name) and `environ`. Raises
        BadConfiguration, which names the key, its value, the source and the allowed values."""
        known, uid = SETTINGS, os.geteuid()
        flags = from_flags(argv, {**known, "config": Setting(PATH, None)}, ASKING_FLAGS)
        path = _file(flags.pop("config", None), environ, uid)
        variables, ignored = from_environ(environ, known, besides={CONFIG_VARIABLE})
        given: Given = {**(from_file(path, known) if path else {}), **variables, **flags}
        values = {key: spec.default for key, spec in known.items()}
        values |= {key: known[key].parse(key, *written) for key, written in given.items()}
        for key, value in _derived(values, environ, uid).items():
            if values[key] is dataclasses.MISSING:
                values[key] = known[key].parse(key, value, "default")
        sources = {key: given[key][1] if key in given else "default" for key in known}
        return _checked(values, sources, ignored)

    @property
    def page_socket(self) -> Path | None:
        """The path in `http`; None if it is an address, or if no page is served."""
        return Path(self.http) if self.http is not None and self.http.startswith("/") else None

    def is_derived(self, key: str) -> bool:
        """True if the setting is not configured. Its value may then be different at each load."""
        return self.sources[key] == "default"

    def value(self, key: str) -> Any:
        return attrgetter(key)(self)

    def explain(self, decided: Mapping[str, tuple[Any, str]] = MappingProxyType({})) -> list[dict[str, Any]]:
        """A row for each setting: `key`, `value`, `source` and `reload`, as `--check-config` shows them. `decided`:
        (value, source) of settings that others than the configuration decide in a running daemon. A value that equals
        the configured one keeps the configuration's source."""
        rows = []
        for key, spec in SETTINGS.items():
            shown, source = spec.show(self.value(key)), self.sources[key]
            if key in decided and (decided_shown := spec.show(decided[key][0])) != shown:
                shown, source = decided_shown, decided[key][1]
            rows.append({"key": key, "value": shown, "source": source, "reload": spec.reload})
        return rows

    def reloaded(self, new: Config) -> Reload:
        """This configuration with those values of `new` that a running daemon can take over."""
        values, sources = {}, {}
        applied: list[dict[str, str]] = []
        waiting: list[dict[str, str]] = []
        for key, spec in SETTINGS.items():
            old, now = self.value(key), new.value(key)
            values[key] = old
            sources[key] = (new if spec.reload else self).sources[key]
            if old == now or (self.is_derived(key) and new.is_derived(key)):
                continue
            # A password is not shown, and may be all that has changed.
            before, after = spec.show(old), spec.show(now)
            row = {"key": key, "before": before, "after": after if after != before else f"{after} (another password)"}
            (applied if spec.reload else waiting).append(row)
            if spec.reload:
                values[key] = now
        return Reload(_checked(values, sources, self.ignored), applied, waiting)

    def _check(self) -> None:
        """Raises BadConfiguration if settings contradict each other."""
        for low, high in (
            ("limits.object_bytes_max", "ring_bytes"),
            ("limits.claim_s", "limits.claim_s_max"),
            ("gauges.sample_pressed_s", "gauges.sample_s"),
        ):
            # An existing ring keeps its size, whatever size would be derived now.
            if high == "ring_bytes" and self.is_derived(high):
                continue
            if self.value(low) is not None and self.value(low) > self.value(high):
                raise BadConfiguration(f"{self._described(low)}: must be at most {self._described(high)}")
        try:
            self.pressure.thresholds()
        except BadConfiguration as error:
            keys = [f"pressure.{field.name}" for field in dataclasses.fields(Thresholds)]
            given = ", ".join(self._described(key) for key in keys if self.sources[key] != "default")
            raise BadConfiguration(f"[pressure] {error}; given: {given}") from None
        if "file" in (self.gauges.device, self.gauges.host) and self.gauges.file is None:
            raise BadConfiguration(f"{self._described('gauges.file')}: name the file for gauges.device or gauges.host")
        if self.remote.url is not None:
            try:
                open_store(self.remote.url).close()
            except BadConfiguration as error:
                # Not its value, which may have a password.
                raise BadConfiguration(f"remote.url ({self.sources['remote.url']}): {error}") from None
        outside = [place.name for place in self.neighbours.servers or () if not is_loopback(place)]
        if outside and not self.neighbours.beyond_loopback:
            raise BadConfiguration(
                f"{self._described('neighbours.servers')}: {', '.join(outside)} is not on loopback: set "
                "neighbours.beyond_loopback = true if it is to be asked all the same"
            )
        sockets = ["socket", "status_socket"]
        if self.page_socket is not None:
            sockets.append("http")
        for first, second in combinations(sockets, 2):
            if str(self.value(first)) == str(self.value(second)):
                raise BadConfiguration(f"{self._described(second)}: must differ from {self._described(first)}")
        for key in (*sockets, "gauges.file"):
            path = os.fsencode(self.value(key) or "/")
            if not os.path.isabs(path):
                raise BadConfiguration(f"{self._described(key)}: must be an absolute path")
            if key in sockets and len(path) > places.SOCKET_PATH_BYTES_MAX:
                raise BadConfiguration(
                    f"{self._described(key)}: the path has {len(path)} bytes; a socket's path may have at most "
                    f"{places.SOCKET_PATH_BYTES_MAX}"
                )

    def _described(self, key: str) -> str:
        return f"{key} = {SETTINGS[key].show(self.value(key))} ({self.sources[key]})"


TABLES: Final[Mapping[str, type[Any]]] = {
    name: kind
    for name, kind in typing.get_type_hints(Config).items()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
}
"""The tables of the configuration by their names."""
SETTINGS: Final[Mapping[str, Setting]] = {
    prefix + field.name: field.metadata["setting"]
    for prefix, table in (("", Config), *((f"{name}.", table) for name, table in TABLES.items()))
    for field in dataclasses.fields(table)
    if "setting" in field.metadata
}
"""All settings by their keys, in order."""


def _checked(values: Mapping[str, Any], sources: Mapping[str, str], ignored: tuple[str, ...]) -> Config:
    given: dict[str, dict[str, Any]] = {name: {} for name in ("", *TABLES)}
    for key, value in values.items():
        table, _, name = key.rpartition(".")
        given[table][name] = value
    tables = {name: table(**given[name]) for name, table in TABLES.items()}
    config = Config(**given[""], **tables, sources=sources, ignored=ignored)
    config._check()
    return config


def _file(flag: tuple[Any, str] | None, environ: Mapping[str, str], uid: int) -> Path | None:
    """The TOML file to read: a named file, which must exist, or the default file if it exists."""
    if flag is not None:
        return Path(flag[0])
    if environ.get(CONFIG_VARIABLE):
        return Path(environ[CONFIG_VARIABLE])
    home, folder = environ.get("HOME"), environ.get("XDG_CONFIG_HOME")
    if places.daemon_folder(environ, uid) == places.SYSTEM_FOLDER:
        usual = SYSTEM_FILE
    elif home or folder:
        usual = Path(folder or f"{home}/.config", USER_FILE)
    else:
        return None
    try:
        # `exists` raises for some errors, and returns False for others.
        return usual if usual.exists() else None
    except OSError as error:
        raise BadConfiguration(
            f"cannot look for the configuration {usual}: {error.strerror}; set HOME to a folder of this user, or "
            f"{CONFIG_VARIABLE} to a file"
        ) from None


def _derived(values: Mapping[str, Any], environ: Mapping[str, str], uid: int) -> dict[str, Any]:
    folder = places.daemon_folder(environ, uid)
    usual = "system" if folder == places.SYSTEM_FOLDER else f"user-{uid}"
    if values["instance"] not in (usual, dataclasses.MISSING):
        # A second instance must not use the sockets of the first one.
        folder /= values["instance"]
    socket = values["socket"]
    status_folder = folder if socket is dataclasses.MISSING else socket.parent
    room_bytes = min(4 * GIB, cgroups.available_bytes() // 4, segments.shm_free_bytes() // 2)
    ring_bytes = max(RING_BYTES_MIN, room_bytes // MIB * MIB)
    given_bytes = ring_bytes if values["ring_bytes"] is dataclasses.MISSING else values["ring_bytes"]
    return {
        "instance": usual,
        "socket": str(folder / places.CONTROL_NAME),
        "status_socket": str(status_folder / places.STATUS_NAME),
        "ring_bytes": ring_bytes,
        # A larger index makes lookups slower, because they touch more pages, without ever being filled.
        "max_entries": min(max(ENTRIES_MIN, given_bytes // BYTES_PER_ENTRY), ENTRIES_MAX),
    }
