"""Checks of the governor's inputs and outputs: gauges, and the metrics socket. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....ipc.modes import HOST_GAUGE
from .finding import Finding, ok, warn

_MADE_UP = {"drill": "in a drill", "file": "read from a file"}


def gauges(found: Sequence[Mapping[str, Any]] | None, hardware: Mapping[str, bool]) -> Finding:
    """Whether the daemon can measure the tiers. `found`: the gauges in its status; None without a daemon. `hardware`:
    by extra ("nvidia", "amd"), whether such a GPU is present."""
    check = "gauges"
    if found is None:
        return ok(check, "no daemon to ask")
    text = ", ".join(f"{gauge['gauge']} by {gauge['source']}" for gauge in found) or "none"
    stale = [gauge["gauge"] for gauge in found if gauge["stale"]]
    if stale:
        return warn(
            check,
            f"{text}; cannot be read any more: {', '.join(stale)}",
            "the daemon's log says why; until then their last values are used",
        )
    made_up = [f"{gauge['gauge']} is {_MADE_UP[gauge['source']]}" for gauge in found if gauge["source"] in _MADE_UP]
    if made_up:
        said = f"{', '.join(made_up)}: no measurement"
        return warn(check, said, "end the drill, or set gauges.device and gauges.host")
    if not any(gauge["gauge"] == HOST_GAUGE for gauge in found):
        return warn(check, f"{text}; the ring will not shrink when the host is short of memory", "gauges.host = auto")
    missing = [extra for extra, there in hardware.items() if there]
    if missing and not any(gauge["gauge"] != HOST_GAUGE for gauge in found):
        return warn(
            check,
            f"{text}; there is a GPU, and its memory use is unknown",
            f"gauges.device = auto, and pip install 'tensord[{missing[0]}]' for the daemon; its log gives the reason",
        )
    return ok(check, text)


def metrics(path: Path | None, error: str | None) -> Finding:
    """Whether metrics can be read at `path`, beside the control socket. `error`: the reason if not."""
    check = "metrics"
    if path is None:
        return ok(check, "no daemon to ask")
    if error is None:
        return ok(check, f"{path} answers")
    return warn(
        check,
        f"{path}: {error}",
        "metrics.socket is their path; metrics.mode and socket_group decide who may read them; docs/metrics.md",
    )
