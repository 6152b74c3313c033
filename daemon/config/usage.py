"""The texts that `tensord` prints without serving: help, version, the check of a configuration; and the example file.

Owns: these texts, and the flags that ask for them. Does not own the settings (config.py). `python -m
tensord.daemon.config.usage` prints the example file systemd/tensord.toml.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Final

from tensord import __version__

from .config import SETTINGS, TABLES, Config
from .settings import COUNT, SHARE, SWITCH, Setting, flag_of, variable_of

WIDTH: Final = 100
CHECK: Final = "--check-config"
AS_JSON: Final = "--json"
_SAMPLE = "limits.clients_max"
_DERIVED: Final = {
    "instance": "system",
    "socket": "/run/tensord/control.sock",
    "status_socket": "/run/tensord/status.sock",
    "ring_bytes": "4GiB",
    "max_entries": "65536",
}
"""The values in the example file of settings without a fixed default."""


def asked(argv: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """The text that a command line asks for; None if it asks for a daemon. `--check-config` names each ignored variable
    on standard error, and raises BadConfiguration for an invalid configuration."""
    if "--help" in argv or "-h" in argv:
        return help_text()
    if "--version" in argv:
        return f"tensord {__version__}\n"
    if CHECK in argv:
        settings = [word for word in argv if word not in (CHECK, AS_JSON)]
        config = Config.load(settings, environ)
        sys.stderr.writelines(f"tensord: {text}; it is ignored\n" for text in config.ignored)
        return check_text(config, as_json=AS_JSON in argv)
    return None


def help_text() -> str:
    lines = [
        "Usage: tensord [--config FILE] [--NAME VALUE]...",
        "",
        "Serves a ring of shared memory for tensors. Runs in the foreground until SIGTERM or SIGINT.",
        "Each setting can be a flag, an environment variable or a key of the TOML file. For example,",
        f"{flag_of(_SAMPLE)}, {variable_of(_SAMPLE)} and clients_max in [limits] are one setting.",
        "",
        "  --help, --version    print this text or the version, and end",
        "  --check-config       print every setting with its source, and end; with --json as JSON",
        "  --config FILE        the TOML file; also TENSORD_CONFIG",
        "",
    ]
    said = descriptions()
    for key, spec in SETTINGS.items():
        switch = spec.kind is SWITCH
        lines.append(f"  {flag_of(key)}" + (f", --no-{flag_of(key)[2:]}" if switch else " VALUE"))
        lines += _wrapped(f"{said[key]} (default: {spec.derived or spec.show(spec.default)})", "        ")
    return "\n".join(lines) + "\n"


def check_text(config: Config, as_json: bool = False) -> str:
    rows = config.explain()
    if as_json:
        return json.dumps(rows, indent=2) + "\n"
    key_width, value_width = (max(len(row[name]) for row in rows) for name in ("key", "value"))
    return "".join(f"{row['key']:<{key_width}}  {row['value']:<{value_width}}  {row['source']}\n" for row in rows)


def example_text() -> str:
    """The example TOML file: every setting, commented, with its default."""
    lines = [
        "# tensord: all settings, commented out, with their defaults. Uncomment a line to change a setting.",
        '# Sizes are bytes or texts such as "4GiB". Times are seconds or texts such as "10m".',
        '# "none" turns an optional setting off. Flags and TENSORD_* variables have precedence over this file.',
        "# Settings marked (reload) can change in a running daemon: systemctl reload tensord.",
        "# `tensord --check-config` shows the current value of each setting and its source.",
    ]
    table, said = "", descriptions()
    for key, spec in SETTINGS.items():
        into, _, name = key.rpartition(".")
        if into != table:
            lines += ["", f"[{into}]"]
            table = into
        mark = " (reload)" if spec.reload else ""
        note = f" Default: {spec.derived}." if spec.derived else ""
        lines += ["", *_wrapped(f"{said[key]}{mark}.{note}", "# ")]
        lines += _wrapped(f"It {spec.wants}.", "# ")
        lines.append(f"#{name} = {_toml(key, spec)}")
    return "\n".join(lines) + "\n"


def descriptions() -> dict[str, str]:
    """The description of every setting by its key: the string below the field, without its full stop."""
    found = {}
    for prefix, table in (("", Config), *((f"{name}.", table) for name, table in TABLES.items())):
        (declared,) = ast.parse(inspect.getsource(table)).body
        assert isinstance(declared, ast.ClassDef)
        for field, below in zip(declared.body, declared.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                text = " ".join(ast.literal_eval(below.value).split())
                found[prefix + ast.unparse(field.target)] = text.removesuffix(".")
    return found


def _toml(key: str, spec: Setting) -> str:
    if spec.default is dataclasses.MISSING:
        return json.dumps(_DERIVED[key])
    shown = spec.show(spec.default)
    bare = spec.kind in (COUNT, SHARE, SWITCH) and not spec.optional
    return shown if bare else json.dumps(shown)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)


if __name__ == "__main__":
    sys.stdout.write(example_text())
