"""What stands in `ec_connector_extra_config`: the keys that begin with "tensord.", checked when the engine starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...errors import BadConfiguration

PREFIX: Final = "tensord."
WAIT_S_MOST: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The connector's settings. Keys of others are left to them, but for those that are ours without their prefix.

    Args:
        socket: `tensord.socket`, the daemon's control socket; without it as `Client` finds it.
        wait_s_max: `tensord.wait_s_max`, seconds a request is put off at most while another engine encodes its picture.
        revision: `tensord.revision`, a name for the weights, instead of a fingerprint of their files. Engines that give
            the same one are believed to have the same.
        tenant: `tensord.tenant`, a salt: engines with different ones share nothing.
        canary: `tensord.canary`, the share of hits that is encoded all the same and compared with what was found, as is
            the first of each namespace; 0 compares none.
    """

    socket: str | None = None
    wait_s_max: float = 2.0
    revision: str = ""
    tenant: str = ""
    canary: float = 1e-4

    @classmethod
    def read(cls, extra_config: Mapping[str, Any]) -> Settings:
        """Reads them.

        Raises:
            BadConfiguration: an unknown key of ours, one of ours without its prefix, or a value that it cannot have.
        """
        known = cls.__dataclass_fields__
        for name in extra_config:
            bare = re.sub(r"^tensord[._-]*", "", name.lower()).replace("-", "_")
            if not name.startswith(PREFIX) and bare in known:
                raise BadConfiguration(f"{name} in ec_connector_extra_config has no effect: write {PREFIX}{bare}")
        ours = {name.removeprefix(PREFIX): value for name, value in extra_config.items() if name.startswith(PREFIX)}
        for name in ours:
            if name not in known:
                names = ", ".join(f"{PREFIX}{field}" for field in known)
                raise BadConfiguration(f"{PREFIX}{name} in ec_connector_extra_config is unknown; there are {names}")
        for name in ("socket", "revision", "tenant"):
            if name in ours and not isinstance(ours[name], str):
                raise BadConfiguration(f"{PREFIX}{name}={ours[name]!r} must be a string")
        wait_s_max = _number(ours, "wait_s_max", cls.wait_s_max, WAIT_S_MOST, "seconds")
        return cls(**{**ours, "wait_s_max": wait_s_max, "canary": _number(ours, "canary", cls.canary, 1.0, "a share")})


def _number(given: Mapping[str, Any], name: str, default: float, most: float, what: str) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise BadConfiguration(f"{PREFIX}{name}={value!r} must be {what} from 0 to {most:g}")
    return float(value)
