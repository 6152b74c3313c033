"""The keys of `--hicache-storage-backend-extra-config` that begin with "tensord.", checked when the storage is made.

Owns: their names, types and limits. Does not own: SGLang's keys. Invariants: an unknown key of tensord is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Self

from ...errors import BadConfiguration

PREFIX: Final = "tensord."


@dataclass(frozen=True, kw_only=True)
class StorageSettings:
    """The storage's settings.

    Args:
        socket: `tensord.socket`, the daemon's control socket; by default found as by `Client`.
        model: `tensord.model`, the folder with the weights that the engine loads. Default: the engine's model path.
        revision: `tensord.revision`, a name for the weights instead of a fingerprint of their files. Engines with the
            same revision must have the same weights; tensord does not check this.
        tenant: `tensord.tenant`, a salt. Engines with different tenants share nothing.
    """

    socket: str | None = None
    model: str = ""
    revision: str = ""
    tenant: str = ""

    @classmethod
    def read(cls, extra_config: Mapping[str, Any] | None) -> Self:
        """Reads and checks the settings.

        Raises:
            BadConfiguration: an unknown key of tensord, or a value that is not printable text.
        """
        known = [PREFIX + field.name for field in fields(cls)]
        ours = {}
        for name, value in (extra_config or {}).items():
            if name not in known:
                if "tensord." in name.lower():
                    raise BadConfiguration(
                        f"{name!r} in the storage backend's extra config is unknown; there are {', '.join(known)}"
                    )
                continue
            if not isinstance(value, str) or not value or not value.isprintable():
                raise BadConfiguration(
                    f"{name}={value!r} must be text that can be printed; leave it out for the default"
                )
            ours[name.removeprefix(PREFIX)] = value
        return cls(**ours)
