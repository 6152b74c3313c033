"""Checks of the governor's inputs and outputs: gauges, and the metrics socket. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....ipc.modes import HOST_GAUGE
from ..tables import age
from .finding import Finding, ok, warn

_MADE_UP = {"drill": "in a drill", "file": "read from a file"}


def gauges(
    found: Sequence[Mapping[str, Any]] | None,
    hardware: Mapping[str, bool],
    sources: Sequence[Mapping[str, Any]] = (),
    missing_cards: Sequence[Mapping[str, Any]] = (),
) -> Finding:
    """Whether the daemon can measure the tiers. `found`: the gauges in its status; None without a daemon. `hardware`:
    by extra ("nvidia", "amd"), whether such a GPU is present. `sources`: what each source of gauges does.
    `missing_cards`: the cards that settings name and that have no gauge."""
    check = "gauges"
    if found is None:
        return ok(check, "no daemon to ask")
    text = ", ".join(f"{gauge['gauge']} by {gauge['source']}" for gauge in found) or "none"
    broken = [
        f"source {each['source']} {each['state']} for {age(each['since_s'])}: {each['why']}"
        for each in sources
        if each["problem"]
    ]
    stale = [f"{gauge['gauge']}, read {age(gauge['age_s'])} ago" for gauge in found if gauge["stale"]]
    if stale:
        broken.append(f"cannot be read any more: {'; '.join(stale)}")
    if broken:
        return warn(
            check,
            f"{text}; {'; '.join(broken)}",
            "the daemon's log says why; until then last values are used, and no memory of such a device is reserved",
        )
    if missing_cards:
        named = "; ".join(f"{each['setting']} names {each['card']}" for each in missing_cards)
        return warn(
            check, f"{text}; {named}, and no card is called so", "name a card as its gauge is called, and reload"
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
