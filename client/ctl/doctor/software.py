"""Checks of software: versions on all sides, packages, the configuration, the last end, the clock, the GPUs' bindings.
Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .finding import Finding, fail, ok, warn

PYTHON_MIN: Final = (3, 11)
STEP_S_MIN: Final = 1.0
"""A smaller difference of the clocks is a measurement between two readings."""
# The installer refuses older versions of required packages. These are printed because bug reports need them.
PACKAGES: Final = ("numpy", "msgpack", "msgspec", "uvloop", "xxhash", "torch")


@dataclass(frozen=True, slots=True)
class Binding:
    """A binding that reads a GPU's memory: its package, and the result of trying it. `devices` None: it cannot be
    used."""

    name: str
    package: str
    extra: str
    version: str | None
    devices: int | None = None
    error: str = ""


def versions(client: str, daemon: str | None, protocol: int, daemon_protocol: int | None) -> Finding:
    """Whether tensorctl and the daemon have the same version and protocol."""
    check = "versions"
    if daemon is None or daemon_protocol is None:
        return ok(check, f"tensorctl {client}, protocol {protocol}; no daemon to compare with")
    text = f"tensorctl {client}, daemon {daemon}"
    if abs(protocol - daemon_protocol) == 1:
        return warn(
            check,
            f"{text}: they speak protocols {protocol} and {daemon_protocol}, of which they use the former; clients "
            "write no payload in place",
            "install the same version on both sides, and restart the daemon: it keeps its entries",
        )
    if protocol != daemon_protocol:
        return fail(
            check,
            f"{text}: they speak protocols {protocol} and {daemon_protocol}",
            "install the same version on both sides, and restart the daemon: it keeps its entries",
        )
    if client != daemon:
        return warn(
            check,
            f"{text}, both of protocol {protocol}",
            "install the same version on both sides, and restart the daemon: it keeps its entries",
        )
    return ok(check, f"{text}, protocol {protocol}")


def clients(daemon: str | None, versions: Iterable[str]) -> Finding:
    """Whether all clients have the daemon's version. `versions`: one for each client; "" for a release that does not
    send its version."""
    check = "clients"
    if daemon is None:
        return ok(check, "no daemon to ask")
    found = Counter(versions)
    others = {version or "an older release": count for version, count in found.items() if version != daemon}
    if not others:
        return ok(check, f"{found.total()} connected, all of version {daemon}")
    listed = ", ".join(f"{count} of {version}" for version, count in sorted(others.items()))
    return warn(
        check,
        f"{found.total()} connected, of which {listed}; the daemon has {daemon}",
        "`tensorctl clients --json` names them: install the daemon's version there, and start them again",
    )


def last_end(former: Mapping[str, Any] | None, journal: Sequence[str], *, served: bool = True) -> Finding:
    """How the daemon before this one ended. `journal`: the service manager's lines about it. `served`: a daemon
    answers."""
    check = "last end"
    if not served:
        return ok(check, "no daemon to ask; `journalctl -u tensord` tells of the last one")
    if not former or former["end"] in ("none", "unknown"):
        return ok(check, "nothing is known of a daemon before this one")
    who = f"the daemon before (epoch {former['epoch']})"
    if former["end"] == "stopped":
        return ok(check, f"{who} was stopped")
    said = f"; the journal says: {' / '.join(journal)}" if journal else ""
    if former["end"] == "failed":
        return warn(check, f"{who} failed: {former['why']}{said}", "`journalctl -u tensord` has the lines before it")
    return warn(
        check,
        f"{who} was killed, or the machine stopped it: it recorded no end{said}",
        "`journalctl -u tensord` and `journalctl -k` tell who: the OOM killer, a watchdog, or a signal",
    )


def clock(stepped_s: float | None) -> Finding:
    """Whether somebody set the wall clock since the daemon started. Positive: it was set forward."""
    check = "clock"
    if stepped_s is None:
        return ok(check, "no daemon to ask")
    if abs(stepped_s) < STEP_S_MIN:
        return ok(check, "the wall clock was not set since the daemon started")
    return warn(
        check,
        f"the wall clock was set {'forward' if stepped_s > 0 else 'back'} by {abs(stepped_s):.0f} s since the daemon "
        "started: the times of its log before and after do not fit together",
        "nothing for tensord: times to live go by another clock. See that the host's clock is synchronised",
    )


def python(version: tuple[int, ...], packages: Mapping[str, str | None]) -> Finding:
    """The versions of the interpreter and of the main packages."""
    here = ".".join(map(str, version))
    listed = ", ".join(f"{name} {there or 'absent'}" for name, there in packages.items())
    if version[:2] < PYTHON_MIN:
        wanted = ".".join(map(str, PYTHON_MIN))
        return fail("python", f"Python {here}, {listed}", f"Python {wanted} or newer")
    return ok("python", f"Python {here}, {listed}")


def configuration(error: str | None, ignored: Sequence[str], *, served: bool) -> Finding:
    """Whether a daemon started here would accept its configuration. A running daemon may have another one.

    `ignored`: a text for each unknown variable.
    """
    if error is None and ignored:
        return warn("configuration", "; ".join(ignored), "correct the misspelt; the daemon ignores them")
    if error is None:
        return ok("configuration", "a daemon would start with it; `tensorctl config check` lists it")
    report = warn if served else fail
    return report("configuration", error, "correct it; a running daemon keeps its present configuration")


def gpus(bindings: Sequence[Binding], hardware: Mapping[str, bool]) -> list[Finding]:
    """One finding for each binding. `hardware`: by extra ("nvidia", "amd"), whether such a GPU is present."""
    findings = []
    for binding in bindings:
        check = f"gpu ({binding.name})"
        needed = hardware.get(binding.extra, False)
        if binding.devices:
            findings.append(ok(check, f"{binding.package} {binding.version} sees {binding.devices}"))
        elif binding.version is None:
            findings.append(_absent(check, binding, needed=needed))
        else:
            why = binding.error or "it sees none"
            text = f"{binding.package} {binding.version} is installed, but finds no GPU: {why}"
            remedy = "install the driver and its library, or give this user access to the device"
            findings.append(warn(check, text, remedy) if needed else ok(check, text))
    return findings


def _absent(check: str, binding: Binding, *, needed: bool) -> Finding:
    text = f"{binding.package} is not installed"
    if not needed:
        return ok(check, f"{text}, and no GPU needs it")
    return warn(check, f"{text}, but there is a GPU", f"pip install 'tensord[{binding.extra}]'")
