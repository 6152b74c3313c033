"""Checks of software: versions on both sides, packages, the configuration, the GPUs' bindings. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .finding import Finding, fail, ok, warn

PYTHON_MIN: Final = (3, 11)
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
