"""The keys of `ec_connector_extra_config` and `kv_connector_extra_config` that begin with "tensord.", checked when the
engine starts.

Owns: their names, types and limits. Does not own: other keys. Invariants: an unknown key of tensord is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, Self

from ....errors import BadConfiguration
from ....ipc.messages.modes import LEVELS, Mode
from ....shm.ring.layout import RING_BYTES_MAX

PREFIX: Final = "tensord."
SLEEPS_AT: Final = ("", *(mode.value for mode in LEVELS[LEVELS.index(Mode.PRESSURE) :]))
"""The values of `sleep_at`; "": never."""


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _up_to(most: float, kind: type = float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, kind) and 0 <= value <= most


_CHECKS: Final[Mapping[str, tuple[str, Callable[[Any], bool]]]] = {
    "socket": ("a path that can be printed", lambda value: _is_text(value) and value != ""),
    "revision": ("text that can be printed", _is_text),
    "tenant": ("text that can be printed", _is_text),
    "sleep_at": (f"one of {', '.join(map(repr, SLEEPS_AT))}", SLEEPS_AT.__contains__),
    "sleep_idle_s": ("seconds from 0 to 86400", _up_to(86400)),
    "wait_s_max": ("seconds from 0 to 60", _up_to(60)),
    "canary": ("a share from 0 to 1", _up_to(1)),
    "registered_bytes_max": (f"a number of bytes from 0 to {RING_BYTES_MAX}", _up_to(RING_BYTES_MAX, int)),
}
"""What each value must be."""


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """The settings that both connectors have. docs/vllm.md says what they mean.

    `WHERE` is the setting of vLLM's that has the keys. Keys of other connectors are ignored, except keys of tensord
    without their prefix.
    """

    WHERE: ClassVar[str] = ""

    socket: str | None = None
    revision: str = ""
    tenant: str = ""
    sleep_at: str = ""
    sleep_idle_s: float = 30.0

    @classmethod
    def read(cls, extra_config: Mapping[str, Any]) -> Self:
        """Reads and checks the settings.

        Raises:
            BadConfiguration: an unknown key of tensord, a key of tensord without its prefix, or an invalid value.
        """
        known = [PREFIX + field.name for field in fields(cls)]
        found: dict[str, Any] = {}
        for key, value in extra_config.items():
            name = key.removeprefix(PREFIX)
            if key in known:
                what, is_valid = _CHECKS[name]
                if not is_valid(value):
                    raise BadConfiguration(f"{key}={value!r} must be {what}")
                found[name] = value
            elif PREFIX + key in known:
                raise BadConfiguration(f"{key!r} in {cls.WHERE} has no effect: write {PREFIX}{key}")
            elif "tensord" in key.lower():
                raise BadConfiguration(f"{key!r} in {cls.WHERE} is unknown; there are {', '.join(known)}")
        return cls(**found)


@dataclass(frozen=True, kw_only=True)
class Settings(SharedSettings):
    """The EC connector's settings."""

    WHERE = "ec_connector_extra_config"

    wait_s_max: float = 2.0
    canary: float = 1e-4


@dataclass(frozen=True, kw_only=True)
class KVSettings(SharedSettings):
    """The settings of the KV connector. Keys of vLLM's offloading connector, as `blocks_per_chunk`, keep their
    meaning."""

    WHERE = "kv_connector_extra_config"

    registered_bytes_max: int = 32 << 30
