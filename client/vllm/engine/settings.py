"""The keys of `ec_connector_extra_config` and `kv_connector_extra_config` that begin with "tensord.", checked when the
engine starts.

Owns: their names, types and limits. Does not own: other keys. Invariants: an unknown key of tensord is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ....errors import BadConfiguration
from ....ipc.messages.modes import LEVELS, Mode
from ....shm.ring.layout import RING_BYTES_MAX

PREFIX: Final = "tensord."
WAIT_S_MOST: Final = 60.0
IDLE_S_MOST: Final = 86400.0
SLEEPS_AT: Final = ("", *(mode.value for mode in LEVELS[LEVELS.index(Mode.PRESSURE) :]))
"""The values of `sleep_at`; "": never."""


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """The settings that both connectors have.

    Args:
        socket: `tensord.socket`, the daemon's control socket; by default found as by `Client`.
        revision: `tensord.revision`, a name for the weights instead of a fingerprint of their files. Engines with the
            same revision must have the same weights; tensord does not check this.
        tenant: `tensord.tenant`, a salt. Engines with different tenants share nothing.
        sleep_at: `tensord.sleep_at`, the mode of the engine's card from which on the engine sleeps while it is idle:
            "pressure", "critical" or "emergency"; "" for never. It wakes up for its next request. Needs vLLM's
            `enable_sleep_mode`.
        sleep_idle_s: `tensord.sleep_idle_s`, the seconds without a request after which the engine counts as idle.
    """

    socket: str | None = None
    revision: str = ""
    tenant: str = ""
    sleep_at: str = ""
    sleep_idle_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class Settings(SharedSettings):
    """The EC connector's settings. Keys of other connectors are ignored, except keys of tensord without their prefix.

    Args:
        wait_s_max: `tensord.wait_s_max`, the most seconds for which a request waits while another engine encodes its
            input.
        canary: `tensord.canary`, the share of hits that are encoded anyway and compared with the stored output. The
            first hit of each namespace is compared too. 0 compares none.
    """

    wait_s_max: float = 2.0
    canary: float = 1e-4

    @classmethod
    def read(cls, extra_config: Mapping[str, Any]) -> Settings:
        """Reads and checks the settings.

        Raises:
            BadConfiguration: an unknown key of tensord, a key of tensord without its prefix, or an invalid value.
        """
        ours = _read(extra_config, list(cls.__dataclass_fields__), "ec_connector_extra_config")
        wait_s_max = _number(ours, "wait_s_max", cls.wait_s_max, WAIT_S_MOST, "seconds")
        return cls(**{**ours, "wait_s_max": wait_s_max, "canary": _number(ours, "canary", cls.canary, 1.0, "a share")})


@dataclass(frozen=True, kw_only=True)
class KVSettings(SharedSettings):
    """The settings of the KV connector.

    Keys of vLLM's offloading connector, as `blocks_per_chunk`, keep their meaning.

    Args:
        registered_bytes_max: `tensord.registered_bytes_max`, the most bytes of the ring that each worker registers with
            its GPU's driver, which page-locks them. 0 registers nothing: blocks are then copied through a buffer.
    """

    registered_bytes_max: int = 32 << 30

    @classmethod
    def read(cls, extra_config: Mapping[str, Any]) -> KVSettings:
        """Reads and checks the settings.

        Raises:
            BadConfiguration: as for `Settings.read`.
        """
        ours = _read(extra_config, list(cls.__dataclass_fields__), "kv_connector_extra_config")
        _check_bytes(ours, "registered_bytes_max")
        return cls(**ours)


def _read(extra_config: Mapping[str, Any], fields: Sequence[str], where: str) -> dict[str, Any]:
    """The values of tensord's keys by field. The texts among them are checked."""
    known = [PREFIX + field for field in fields]
    for name in extra_config:
        if name not in known:
            _check_foreign(name, known, where)
    ours = {name.removeprefix(PREFIX): extra_config[name] for name in known if name in extra_config}
    if ours.get("sleep_at", "") not in SLEEPS_AT:
        modes = ", ".join(map(repr, SLEEPS_AT))
        raise BadConfiguration(f"{PREFIX}sleep_at={ours['sleep_at']!r} must be one of {modes}")
    if "sleep_idle_s" in ours:
        ours["sleep_idle_s"] = _number(ours, "sleep_idle_s", 0.0, IDLE_S_MOST, "seconds")
    for name in ("socket", "revision", "tenant"):
        value = ours.get(name, "")
        if not isinstance(value, str):
            raise BadConfiguration(f"{PREFIX}{name}={value!r} must be a string")
        if not value.isprintable():
            raise BadConfiguration(f"{PREFIX}{name}={value!r} must be text that can be printed")
    if ours.get("socket") == "":
        raise BadConfiguration(f"{PREFIX}socket='' names no socket: leave it out, or name the daemon's")
    return ours


def _check_foreign(name: str, known: Sequence[str], where: str) -> None:
    """Checks that an unknown key is another connector's. `where`: the setting of vLLM's with the keys.

    Raises:
        BadConfiguration: the key contains "tensord", or is a known key without the prefix.
    """
    if PREFIX + name in known:
        raise BadConfiguration(f"{name!r} in {where} has no effect: write {PREFIX}{name}")
    if "tensord" in name.lower():
        raise BadConfiguration(f"{name!r} in {where} is unknown; there are {', '.join(known)}")


def _number(given: Mapping[str, Any], name: str, default: float, most: float, what: str) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise BadConfiguration(f"{PREFIX}{name}={value!r} must be {what} from 0 to {most:g}")
    return float(value)


def _check_bytes(given: Mapping[str, Any], name: str) -> None:
    value = given.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= RING_BYTES_MAX:
        raise BadConfiguration(f"{PREFIX}{name}={value!r} must be a number of bytes from 0 to {RING_BYTES_MAX}")
