"""Checks of the daemon and of the programs around it: versions, the configuration, its health, what it
measures, and values that cannot be stored. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ....ipc.messages.modes import HOST_GAUGE
from ..show.status import unstorable
from .finding import Finding, fail, ok, warn

_RECENT_S: Final = 3600.0
_SAME: Final = "install the same version on both sides, and restart the daemon: it keeps its entries"


def versions(client: str, daemon: str, protocol: int, daemon_protocol: int) -> Finding:
    """Whether tensorctl and the daemon have the same version and protocol."""
    text = f"tensorctl {client} of protocol {protocol}, daemon {daemon} of protocol {daemon_protocol}"
    if protocol != daemon_protocol:
        return fail("versions", text, _SAME)
    return ok("versions", text) if client == daemon else warn("versions", text, _SAME)


def clients(daemon: str, versions: Iterable[str]) -> Finding:
    """Whether all clients have the daemon's version. `versions`: one for each client; "" for a release that does not
    send its version."""
    found = Counter(versions)
    others = {version or "an older release": count for version, count in found.items() if version != daemon}
    if not others:
        return ok("clients", f"{found.total()} connected, all of version {daemon}")
    listed = ", ".join(f"{count} of {version}" for version, count in sorted(others.items()))
    return warn(
        "clients",
        f"{found.total()} connected, of which {listed}; the daemon has {daemon}",
        "`tensorctl clients --json` names them: install the daemon's version there, and start them again",
    )


def configuration(error: str | None, ignored: Sequence[str], *, served: bool) -> Finding:
    """Whether a daemon started here would accept its configuration. A running daemon may have another one.

    `ignored`: a text for each unknown variable.
    """
    if error is not None:
        report = warn if served else fail
        return report("configuration", error, "correct it; a running daemon keeps its present configuration")
    if ignored:
        return warn("configuration", "; ".join(ignored), "correct the misspelt; the daemon ignores them")
    return ok("configuration", "a daemon would start with it; `tensorctl config check` lists it")


def health(body: Mapping[str, Any]) -> list[Finding]:
    """The problems and notices that the daemon reports of itself."""
    told = [*body["problems"], *body["notices"]]
    remedy = "the daemon serves all the same; its log has more"
    return [warn("health", each, remedy) for each in told] or [ok("health", "the daemon reports no problem")]


def gauges(found: Sequence[Mapping[str, Any]], hardware: Mapping[str, bool]) -> Finding:
    """Whether the daemon can measure the tiers; its health tells which of its sources fail. `found`: the gauges in its
    status. `hardware`: by extra ("nvidia", "amd"), whether such a GPU is present."""
    text = ", ".join(f"{gauge['gauge']} by {gauge['source']}" for gauge in found) or "none"
    if any(gauge["source"] == "file" for gauge in found):
        return warn("gauges", f"{text}: no measurement", "set gauges.device and gauges.host")
    if not any(gauge["gauge"] == HOST_GAUGE for gauge in found):
        said = f"{text}; the ring will not shrink when the host is short of memory"
        return warn("gauges", said, "gauges.host = auto")
    present = [extra for extra, there in hardware.items() if there]
    if present and not any(gauge["gauge"] != HOST_GAUGE for gauge in found):
        install = f"pip install 'tensord[{present[0]}]' for the daemon; its log gives the reason"
        said = f"{text}; there is a GPU, and its memory use is unknown"
        return warn("gauges", said, f"gauges.device = auto, and {install}")
    return ok("gauges", text)


def values(reasons: Sequence[Mapping[str, Any]]) -> Finding:
    """Whether values of `get_or_compute` were lately refused for good. `reasons`: from the daemon's status."""
    recent = [each for each in reasons if each["ago_s"] < _RECENT_S]
    if not recent:
        return ok("values", "all computed values could be stored")
    said = "; ".join(unstorable(each) for each in recent)
    return warn(
        "values",
        f"every process computes these values itself, since they cannot be stored: {said}",
        "do what the reason says; until then each call of get_or_compute costs a computation",
    )
