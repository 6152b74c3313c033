"""Where values come from: flags over TENSORD_* variables over a TOML file.

Owns: the reading of each source. Does not own: what a value means (settings.py), nor which
source wins (config.py).

Invariant: a name that is not known is refused, with the nearest that is; nothing is ever ignored.
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
"""How much two names have in common, as difflib counts it, for one to be offered for the other."""

Given: TypeAlias = dict[str, tuple[Any, str]]
"""key -> (what was written, the source in words)."""


def unknown(what: str, given: str, known: Iterable[str], besides: str = "") -> BadConfiguration:
    """A complaint about a name that is not known, with one that is, if it is close.

    `besides`: what all names begin with, which makes none of them closer.
    """
    rest = {name.removeprefix(besides): name for name in known}
    near = difflib.get_close_matches(given.removeprefix(besides), list(rest), n=1, cutoff=_CLOSE)
    said = f"; did you mean {rest[near[0]]!r}?" if near else "; `tensord --help` lists all of them"
    return BadConfiguration(f"{what} {given!r}{said}")


def from_flags(argv: Sequence[str], known: Mapping[str, Setting]) -> Given:
    """What was given as `--x V` or `--x=V`, and for switches `--x` and `--no-x`."""
    keys = {flag_of(key): key for key in known}
    offs = {"--no-" + flag[2:]: key for flag, key in keys.items() if known[key].kind is SWITCH}
    found: Given = {}
    words = iter(range(len(argv)))
    for at in words:
        flag, equals, value = argv[at].partition("=")
        if not flag.startswith("--"):
            raise BadConfiguration(f"unexpected argument {argv[at]!r}: settings are given as --name value")
        source = f"flag {flag}"
        if flag in offs and not equals:
            found[offs[flag]] = (False, source)
        elif flag not in keys:
            raise unknown("unknown flag", flag, keys, "--")
        elif equals:
            found[keys[flag]] = (value, source)
        elif known[keys[flag]].kind is SWITCH:
            found[keys[flag]] = (True, source)
        elif at + 1 == len(argv) or argv[at + 1].startswith("--"):
            raise BadConfiguration(f"{flag} lacks its value: it {known[keys[flag]].wants}")
        else:
            found[keys[flag]] = (argv[next(words)], source)
    return found


def from_environ(environ: Mapping[str, str], known: Iterable[str], besides: Iterable[str]) -> Given:
    """What the TENSORD_ variables give, but for those in `besides`; an empty one is not set."""
    keys = {variable_of(key): key for key in known}
    found: Given = {}
    for name, value in environ.items():
        if not name.startswith(PREFIX) or name in besides or not value:
            continue
        if name not in keys:
            raise unknown("unknown environment variable", name, keys, PREFIX)
        found[keys[name]] = (value, f"env {name}")
    return found


def from_file(path: Path, known: Iterable[str]) -> Given:
    """What a TOML file gives."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadConfiguration(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfiguration(f"{path} is no TOML: {error}") from error
    keys = set(known)
    tables = {key.rpartition(".")[0] for key in keys} - {""}
    found: Given = {}

    def walk(table: Mapping[str, Any], prefix: str) -> None:
        for name, value in table.items():
            key = prefix + name
            if key in tables:
                if not isinstance(value, dict):
                    raise BadConfiguration(f"{path}: {key} = {value!r}: it is a table, written [{key}]")
                walk(value, key + ".")
            elif key not in keys:
                beside = {known for known in keys | tables if known.startswith(prefix)}
                raise unknown(f"{path}: unknown key", key, sorted(beside), prefix)
            else:
                found[key] = (value, f"file {path}")

    walk(document, "")
    return found
