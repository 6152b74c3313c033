"""The definition of a setting: its bounds, its default and its kind, which is how its values are written.

Owns: what can be said of any setting, how a value is read and shown, and what is said of a wrong one. Does not own the
list of settings (sections.py, config.py), nor the sources of values (sources.py).

A setting is a field of a frozen dataclass, made by `setting(...)`; the string below it is its description. Its key is
its dotted path in the tree. The names of the flag and of the variable are derived from the key:

    limits.clients_max      --limits-clients-max      TENSORD_LIMITS_CLIENTS_MAX

Invariant: the text of a value parses to the same value again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from decimal import Decimal
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from ...errors import BadConfiguration
from ...ipc.quantities import DURATION_WANTS, SIZE_WANTS, read_duration, read_size, show_duration, show_size
from ...shm.ring import segments
from ..governor.forms.limits import NeighbourPlace
from ..neighbours.registry import PORTS

HIDDEN: Final = "***"
SIZES_MAX: Final = 64
SIZES_BYTES_MAX: Final = 16 << 40
SERVERS_MAX: Final = 16

_ADDRESS: Final = re.compile(r"(?:(?P<host>[^\s:\[\]/]+)|\[(?P<host6>[0-9A-Fa-f:.%\w]+)\]):(?P<port>[0-9]{1,5})")
_SERVER: Final = re.compile(r"(?P<kind>[a-z]+)\s*=\s*http://(?P<place>[^\s/?#@]+)/?(?:\s+on\s+(?P<card>[^\s,]{1,64}))?")
PREFIX: Final = "TENSORD_"
_USER: Final = re.compile(r"//[^\s,]*@")


@dataclass(frozen=True)
class Kind:
    """The text form of values. `read` parses text or a TOML value, and raises ValueError. `wants`: accepted values.
    `secret`: a refused value is not shown."""

    wants: str
    read: Callable[[Any], Any]
    show: Callable[[Any], str] = str
    secret: bool = False


def choice(*names: str) -> Kind:
    def read(given: Any) -> str:
        if given not in names:
            raise ValueError
        return str(given)

    return Kind("one of " + ", ".join(names), read)


def host_and_port(text: str) -> tuple[str, int]:
    """Host and port of "127.0.0.1:9477", "metrics.example:9477" or "[::1]:9477". Raises ValueError."""
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        raise ValueError(text)
    return found["host"] or found["host6"], int(found["port"])


def is_loopback(place: NeighbourPlace) -> bool:
    """Whether a neighbour is on this host by its address alone. Other names are not resolved."""
    try:
        return place.host == "localhost" or ip_address(place.host).is_loopback
    except ValueError:
        return False


def _count(given: Any) -> int:
    if isinstance(given, float):
        raise ValueError
    return given if isinstance(given, int) else int(str(given).strip())


def _share(given: Any) -> float:
    text = str(given).strip()
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


def _switch(given: Any) -> bool:
    word = str(given).strip().lower()
    if word not in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        raise ValueError
    return word in ("true", "yes", "on", "1")


def _mode(given: Any) -> int:
    # TOML has already parsed a number in its own base (0o660). A text is octal, as for chmod.
    return given if isinstance(given, int) else int(str(given).strip().removeprefix("0o"), 8)


def _text(given: Any) -> str:
    if not isinstance(given, str) or not given or not given.isprintable():
        raise ValueError
    return given


def _instance(given: Any) -> str:
    segments.segment_name(str(given), "ring")
    return str(given)


def _address(given: Any) -> str:
    host_and_port(_text(given))
    return str(given)


def _loopback(given: Any) -> str:
    text = _text(given)
    if not text.startswith("/") and host_and_port(text)[0] not in ("127.0.0.1", "::1"):
        raise ValueError(text)
    return text


def _sizes(given: Any) -> tuple[tuple[str, int], ...]:
    """Sizes by name; the name is empty for a size without one."""
    pairs = [part.rpartition("=") for part in str(given).split(",")]
    found = {name.strip(): read_size(size.strip()) for name, _, size in pairs}
    named = all(name.strip() or not equals for name, equals, _ in pairs)
    if not named or len(found) < len(pairs) or len(found) > SIZES_MAX or max(found.values()) > SIZES_BYTES_MAX:
        raise ValueError
    return tuple(sorted(found.items()))


def _show_sizes(value: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{name}={show_size(size)}" if name else show_size(size) for name, size in value)


def _servers(given: Any) -> tuple[NeighbourPlace, ...]:
    parts = given if isinstance(given, list) else str(given).split(",")
    found = tuple(_server(str(part).strip()) for part in parts)
    if not found or len(found) > SERVERS_MAX or len({place.name for place in found}) < len(found):
        raise ValueError
    return found


def _server(text: str) -> NeighbourPlace:
    found = _SERVER.fullmatch(text)
    if found is None or found["kind"] not in PORTS:
        raise ValueError(text)
    place = found["place"]
    has_port = re.fullmatch(r"(\[[^\]]*\]|[^:]*):[0-9]+", place) is not None
    host, port = host_and_port(place if has_port else f"{place}:{PORTS[found['kind']]}")
    return NeighbourPlace(found["kind"], host, port, found["card"] or "")


def _show_servers(value: tuple[NeighbourPlace, ...]) -> str:
    return ", ".join(
        f"{place.kind}=http://{f'[{place.host}]' if ':' in place.host else place.host}:{place.port}"
        + (f" on {place.card}" if place.card else "")
        for place in value
    )


def _url(given: Any) -> str:
    if not isinstance(given, str) or not given.isprintable() or "://" not in given:
        raise ValueError
    return given.strip()


def without_password(url: str) -> str:
    """The URL as it is shown."""
    try:
        password = urlsplit(url).password
    except ValueError:
        return HIDDEN
    return url if not password else url.replace(f":{password}@", f":{HIDDEN}@", 1)


SIZE: Final = Kind(SIZE_WANTS, read_size, show_size)
DURATION: Final = Kind(DURATION_WANTS, read_duration, show_duration)
COUNT: Final = Kind("a whole number", _count)
SHARE: Final = Kind("a share such as 0.5 or 50%", _share, lambda value: f"{Decimal(repr(value)):f}")
SWITCH: Final = Kind("true or false", _switch, lambda value: "true" if value else "false")
MODE: Final = Kind("an octal file mode such as 0660", _mode, lambda value: f"{value:04o}")
TEXT: Final = Kind("text", _text)
PATH: Final = Kind("an absolute path", lambda given: Path(_text(given)))
INSTANCE: Final = Kind("a name of 1 to 32 of a-z, 0-9, _ and -, beginning with a letter or digit", _instance)
ADDRESS: Final = Kind("HOST:PORT such as 127.0.0.1:9477 or [::1]:9477", _address)
LOOPBACK: Final = Kind("127.0.0.1:PORT, [::1]:PORT or the absolute path of a Unix socket", _loopback)
URL: Final = Kind("a URL such as dir:///mnt/tensord or valkey://HOST:PORT", _url, without_password, secret=True)
SIZES: Final = Kind(
    "a size such as 72GiB, or up to 64 of NAME=SIZE separated by commas, each at most 16TiB", _sizes, _show_sizes
)
SERVERS: Final = Kind(
    f"up to {SERVERS_MAX} of KIND=http://HOST:PORT separated by commas, each perhaps with ` on CARD`; "
    f"KIND is one of {', '.join(PORTS)}",
    _servers,
    _show_servers,
)


@dataclass(frozen=True)
class Setting:
    """The properties of a setting. `default`: MISSING if it is computed while loading; None if the setting may be none.
    `derived`: how a default that is not fixed is computed, in words."""

    kind: Kind
    default: Any = MISSING
    low: Any = None
    high: Any = None
    reload: bool = False
    derived: str = ""

    @property
    def optional(self) -> bool:
        return self.default is None

    def parse(self, key: str, given: Any, source: str) -> Any:
        """The value of the text or TOML value `given`. Raises BadConfiguration."""
        if self.optional and isinstance(given, str) and given.strip().lower() == "none":
            return None
        try:
            if isinstance(given, bool) and self.kind is not SWITCH:
                raise ValueError
            value = self.kind.read(given)
        except (ValueError, OverflowError):
            raise self.refusal(key, given, source) from None
        # `not value >= low` in place of `value < low`, so that a NaN is refused too.
        too_low = self.low is not None and not value >= self.low
        if too_low or (self.high is not None and not value <= self.high):
            raise self.refusal(key, given, source)
        return value

    def refusal(self, key: str, given: Any, source: str) -> BadConfiguration:
        # Also a value that is no URL by the rules may have a user and a password.
        shown = HIDDEN if self.kind.secret else _USER.sub(f"//{HIDDEN}@", repr(given))
        return BadConfiguration(f"{key} = {shown} ({source}): {self.wants}")

    @property
    def wants(self) -> str:
        named = ("at least", self.low), ("at most", self.high)
        bounds = " and ".join(f"{word} {self.kind.show(bound)}" for word, bound in named if bound is not None)
        wants = f"must be {self.kind.wants}" + (f", {bounds}" if bounds else "")
        return wants + (", or none" if self.optional else "")

    def show(self, value: Any) -> str:
        return "none" if value is None else self.kind.show(value)


def setting(kind: Kind, default: Any = MISSING, low: Any = None, high: Any = None, **more: Any) -> Any:
    """A field with a Setting of these properties."""
    return field(default=default, metadata={"setting": Setting(kind, default, low, high, **more)})


def flag_of(key: str) -> str:
    return "--" + re.sub(r"[._]", "-", key)


def variable_of(key: str) -> str:
    return PREFIX + key.replace(".", "_").upper()
