"""The build hook of the wheel: the machine it is for, in its tag.

The code is Python alone, but its memory ordering and its system calls are those of Linux on x86-64. `any` would let pip
install it where it cannot work, and package registries refuse `linux_x86_64`. A manylinux tag says all of it: Linux
with glibc (2.17, as most packages are built for), on x86-64.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TAG = "py3-none-manylinux_2_17_x86_64"


class MachineTag(BuildHookInterface[Any]):
    """Tags the wheel, and refuses to build one elsewhere."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        here = (sys.platform, platform.machine())
        if here != ("linux", "x86_64"):
            raise RuntimeError(
                f"tensord runs on Linux on x86-64 only, and this is {' on '.join(here)}: nothing is built"
            )
        if version == "standard":
            build_data["pure_python"] = False
            build_data["tag"] = TAG
