"""Reads the values of settings from flags, TENSORD_* variables and a TOML file.

Owns: the reading of each source. Does not own the parsing of values (settings.py), nor the precedence of sources
(config.py).

Invariant: no unknown name passes in silence. An unknown flag or key is refused, with the nearest known name. An unknown
variable is ignored and named: Kubernetes sets TENSORD_PORT for a Service called tensord, clients read TENSORD_VLLM_*.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from ...errors import BadConfiguration
from .settings import PREFIX, SWITCH, Setting, flag_of, variable_of

_CLOSE: Final = 0.75
"""The least similarity (difflib's ratio) of an unknown name and a known one that is suggested for it."""

Given: TypeAlias = dict[str, tuple[Any, str]]
"""key -> (value as written, source in words)."""


def unknown(what: str, given: str, known: Iterable[str], besides: str = "") -> BadConfiguration:
    """The error for an unknown name. It suggests a known one that is similar; their common prefix `besides` is not
    compared."""
    rest = {name.removeprefix(besides): name for name in known}
    near = difflib.get_close_matches(given.removeprefix(besides), list(rest), n=1, cutoff=_CLOSE)
    hint = f"; did you mean {rest[near[0]]!r}?" if near else "; `tensord --help` lists all of them"
    return BadConfiguration(f"{what} {given!r}{hint}")


def from_flags(argv: Sequence[str], known: Mapping[str, Setting], besides: Sequence[str] = ()) -> Given:
    """Reads flags: `--x V` or `--x=V`, and for switches `--x` and `--no-x`. `besides`: flags that are no settings, and
    are suggested for similar ones."""
    keys = {flag_of(key): key for key in known}
    offs = {"--no-" + flag[2:]: key for flag, key in keys.items() if known[key].kind is SWITCH}
    found: Given = {}
    words = iter(range(len(argv)))
    for at in words:
        flag, equals, value = argv[at].partition("=")
        if not flag.startswith("--"):
            before = argv[at - 1] if at else ""
            switch = f"; {before} is a switch: write it alone, or --no-{before[2:]}" if before in keys else ""
            raise BadConfiguration(f"unexpected argument {argv[at]!r}: settings are given as --name value{switch}")
        source = f"flag {flag}"
        if flag in offs and not equals:
            found[offs[flag]] = (False, source)
        elif flag not in keys:
            raise unknown("unknown flag", flag, [*keys, *offs, *besides], "--")
        elif equals:
            found[keys[flag]] = (value, source)
        elif known[keys[flag]].kind is SWITCH:
            found[keys[flag]] = (True, source)
        elif at + 1 == len(argv) or argv[at + 1].startswith("--"):
            raise BadConfiguration(f"{flag} lacks its value: it {known[keys[flag]].wants}")
        else:
            found[keys[flag]] = (argv[next(words)], source)
    return found


def from_environ(
    environ: Mapping[str, str], known: Iterable[str], besides: Iterable[str]
) -> tuple[Given, tuple[str, ...]]:
    """Reads the TENSORD_ variables, except those in `besides`. An empty one counts as not set. Returns the settings,
    and a text for each unknown variable."""
    keys = {variable_of(key): key for key in known}
    found: Given = {}
    ignored = []
    for name, value in environ.items():
        if not name.startswith(PREFIX) or name in besides or not value:
            continue
        if name in keys:
            found[keys[name]] = (value, f"env {name}")
        else:
            ignored.append(str(unknown("unknown environment variable", name, keys, PREFIX)))
    return found, tuple(ignored)


def from_file(path: Path, known: Iterable[str]) -> Given:
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise BadConfiguration(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfiguration(f"{path} is not valid TOML: {error}") from error
    keys = set(known)
    tables = {key.rpartition(".")[0] for key in keys} - {""}
    found: Given = {}
    for name, value in document.items():
        if name in tables and not isinstance(value, dict):
            raise BadConfiguration(f"{path}: {name} = {value!r}: it is a table, written [{name}]")
        prefix, given = (f"{name}.", value) if name in tables else ("", {name: value})
        for key in given:
            if prefix + key not in keys:
                beside = {known for known in keys | tables if known.startswith(prefix)}
                raise unknown(f"{path}: unknown key", prefix + key, sorted(beside), prefix)
            found[prefix + key] = (given[key], f"file {path}")
    return found
