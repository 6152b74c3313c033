"""A Mooncake master for tests, in the network namespace of this process: it and its clients listen on all addresses."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Self

from .server_process import ServerProcess


def program() -> Path | None:
    """The master's program; None if Mooncake is not installed."""
    spec = find_spec("mooncake")
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin).parent / "mooncake_master"
    return found if found.exists() else None


class MooncakeMaster(ServerProcess):
    """A master at `address`.

    Args:
        prefix: what it is run under.
    """

    def __init__(self, folder: Path, *, address: str = "127.0.0.1", port: int = 50051, prefix: list[str] | None = None):
        self.address = f"{address}:{port}"
        about = [f"-rpc_address={address}", f"-rpc_port={port}", f"-metrics_port={port + 1}"]
        # It says in its log that it serves, whatever it is told of logs.
        command = ["env", "-u", "GLOG_minloglevel", str(program()), *about, "-enable_metric_reporting=false"]
        super().__init__(folder, [*(prefix or []), *command])
        self._starts = 0

    def start(self) -> Self:
        self._starts += 1
        return super().start()

    def serves(self) -> bool:
        return self.log.count("Task cleanup thread started") == self._starts
