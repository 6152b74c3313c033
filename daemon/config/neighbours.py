"""The configuration table [neighbours]: servers on the host that are no clients, and are asked to give memory back.

Owns: its settings and bounds, and how a neighbour is written. Does not own the kinds of neighbours
(`daemon.neighbours`), nor when they are asked (the governor's core).
"""

from __future__ import annotations

import dataclasses
import re
from ipaddress import ip_address
from typing import Any, Final

from ..governor.forms.limits import NeighbourPlace
from ..neighbours.registry import PORTS
from .settings import DURATION, SWITCH, Kind, host_and_port, setting

SERVERS_MAX: Final = 16
_SERVER: Final = re.compile(r"(?P<kind>[a-z]+)\s*=\s*http://(?P<place>[^\s/?#@]+)/?(?:\s+on\s+(?P<card>[^\s,]{1,64}))?")


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


def _show(value: tuple[NeighbourPlace, ...]) -> str:
    return ", ".join(
        f"{place.kind}=http://{f'[{place.host}]' if ':' in place.host else place.host}:{place.port}"
        + (f" on {place.card}" if place.card else "")
        for place in value
    )


def is_loopback(place: NeighbourPlace) -> bool:
    """Whether a neighbour is on this host by its address alone. Other names are not resolved."""
    try:
        return place.host == "localhost" or ip_address(place.host).is_loopback
    except ValueError:
        return False


SERVERS: Final = Kind(
    f"up to {SERVERS_MAX} of KIND=http://HOST:PORT separated by commas, each perhaps with ` on CARD`; "
    f"KIND is one of {', '.join(PORTS)}",
    _servers,
    _show,
)


@dataclasses.dataclass(frozen=True)
class NeighboursSection:
    """Servers that are no clients, and are asked to give memory of a card back when `tensorctl room` needs it."""

    servers: tuple[NeighbourPlace, ...] | None = setting(
        SERVERS,
        """the servers in the order in which they are asked; without a card, a server is asked for every card; none: no
        server is ever asked""",
        None,
        optional=True,
        reload=True,
    )
    answer_s: float = setting(
        DURATION,
        "time in which a server must have said that it is idle, and answered the request to free its memory",
        20.0,
        low=0.05,
        high=600.0,
        reload=True,
    )
    beyond_loopback: bool = setting(
        SWITCH, "allow servers whose address is not localhost, 127.0.0.0/8 or ::1", False, reload=True
    )
