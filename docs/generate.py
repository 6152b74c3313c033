"""Writes the two pages of the documentation that are generated: configuration.md and api.md.

    python docs/generate.py                  writes both
    python docs/generate.py configuration    prints one

Owns: how settings and docstrings look as Markdown. Does not own: the settings (tensord.daemon) and the docstrings
(tensord). tests/public/test_generated.py refuses pages that are not as this program writes them.
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import tensord
from tensord import errors
from tensord.daemon.config.config import Config
from tensord.daemon.config.settings import Setting, flag_of, settings_of, variable_of

FOLDER: Final = Path(__file__).parent
SIGNATURE_WIDTH: Final = 110
SAMPLE: Final = "limits.clients_max"

GROUPS: Final = {
    "Clients and entries": "Client AsyncClient Namespace Put Lease Batch Claim Entry Reuse Reservation Spec RingReader",
    "Devices and pressure": (
        "DeviceCache DeviceLease Registration DeviceReservation Subscription ModeChange Mode Tier TierState "
        "Workflow AgentStepGraph AgentStep"
    ),
    "Prefix cache": "PrefixCache PrefixMatch PrefixPut Media NormalLayer RotatingLayer SharedLayer RecurrentLayer",
    "Encoder cache": "EncoderCacheManager EncoderRequest EncoderInput compute_encoder_budget",
    "Processor cache": "ProcessorCache Feature Reference",
    "Visual cache": "VisualCache VisualResult recommend_dp_mode Recommendation",
}
"""The public names in the order of the page; the errors have a section of their own."""

CONFIGURATION_INTRODUCTION: Final = f"""\
# Configuration

This page is generated from the settings of the daemon: `python docs/generate.py`.

The daemon needs no configuration. Each setting can be given in three ways. A flag wins over a variable, a variable over
the file, the file over the default:

| way | example |
|---|---|
| flag | `{flag_of(SAMPLE)} 64` |
| environment variable | `{variable_of(SAMPLE)}=64` |
| TOML file | `clients_max = 64` under `[limits]` |

`--config` names the file. Without it the file is `$TENSORD_CONFIG`, else the user's `~/.config/tensord/tensord.toml` or
the system's `/etc/tensord/tensord.toml`. `systemd/tensord.toml` is an example with every setting.

Sizes are bytes or texts such as `4GiB`. Durations are seconds or texts such as `10m`. `none` stands for no value. A
setting that is true or false has the two flags `--NAME` and `--no-NAME`.

A wrong value, an unknown flag and an unknown key in the file stop the daemon, with exit status 2 and the nearest known
name. An unknown `TENSORD_*` variable does not: the daemon logs a warning and ignores it. Kubernetes sets `TENSORD_PORT`
and more for a Service called tensord, and clients read variables such as `TENSORD_VLLM_PROCESSOR_CACHE`.

A setting with "yes" under "reload" changes in a running daemon: `systemctl reload tensord`, or SIGHUP. Any other
setting needs a restart. `tensorctl config check` shows the value and the source of every setting.
"""

API_INTRODUCTION: Final = """\
# API

This page is generated from the docstrings: `python docs/generate.py`. Each class and function is a name of `tensord`,
each error one of `tensord.errors`. All have types for type checkers. [Concepts](concepts.md) explains the words.
Examples begin with these lines:
"""


# ---- settings


def configuration_text() -> str:
    """The page of all settings, section by section."""
    lines = CONFIGURATION_INTRODUCTION.splitlines()
    sections = {name: of for name, of in typing.get_type_hints(Config).items() if isinstance(of, type)}
    table = None
    for key, setting, default in settings_of(Config):
        section, _, name = key.rpartition(".")
        if section != table:
            table = section
            said = inspect.getdoc(sections[section]) or "" if section else "Keys at the top of the file."
            lines += ["", f"## {section or 'General'}", "", said.split("\n\n")[0].replace("\n", " "), ""]
            lines += ["| setting | default | value | reload | meaning |", "|---|---|---|---|---|"]
        lines.append(row_of(name, setting, default))
    return "\n".join(lines) + "\n"


def row_of(name: str, setting: Setting, default: Any) -> str:
    """A setting's row."""
    shown = setting.derived or f"`{setting.show(default)}`"
    wants = setting.wants.removeprefix("must be ")
    cells = [f"`{name}`", shown, wants, "yes" if setting.reload else "", setting.doc[0].upper() + setting.doc[1:]]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "\\<") for cell in cells) + " |"


# ---- public names


def api_text() -> str:
    """The page of all public names: their signatures and docstrings."""
    named = [name for names in GROUPS.values() for name in names.split()]
    known = set(tensord.__all__) - {"__version__", "TensordError"}
    if set(named) != known:
        raise SystemExit(f"GROUPS of {__file__} and tensord.__all__ differ: {sorted(set(named) ^ known)}")
    lines = [
        *API_INTRODUCTION.splitlines(),
        "",
        *example_of(inspect.getdoc(tensord) or ""),
        "",
        *(f"- [{title}](#{title.lower().replace(' ', '-')}): " + links_of(names) for title, names in GROUPS.items()),
        "- [Errors](#errors)",
    ]
    for title, names in GROUPS.items():
        lines += ["", f"## {title}"]
        for name in names.split():
            lines += ["", *name_lines(name, getattr(tensord, name))]
    tree = re.sub(r"^(Owns|Invariants):(.|\n)*?(?=\n\n|\Z)", "", inspect.getdoc(errors) or "", flags=re.MULTILINE)
    lines += ["", "## Errors", "", *docstring_lines(tree)]
    return "\n".join(lines) + "\n"


def links_of(names: str) -> str:
    return ", ".join(f"[{name}](#{name.lower()})" for name in names.split())


def name_lines(name: str, of: Any) -> Iterator[str]:
    """The section of a function or a class."""
    yield f"### {name}"
    yield ""
    if isinstance(of, type) and issubclass(of, enum.Enum):
        yield from docstring_lines(inspect.getdoc(of) or "")
        yield ""
        yield "Values: " + ", ".join(f'`{each.name}` = `"{each.value}"`' for each in of) + "."
        return
    if not inspect.isclass(of) or "__init__" in vars(of) or constructor_of(of):
        yield from signature_lines(name, of)
        yield ""
    yield from docstring_lines(inspect.getdoc(of) or "")
    if inspect.isclass(of):
        for member, call in members_of(of):
            yield ""
            yield f"#### {name}.{member}"
            yield ""
            if isinstance(call, property):
                yield f"Property{returned(call)}."
            else:
                yield from signature_lines(member, call)
            yield ""
            yield from docstring_lines(inspect.getdoc(call) or "")


def constructor_of(of: type[object]) -> bool:
    """Whether a class is made from its fields: a dataclass, a named tuple or a message."""
    return hasattr(of, "__dataclass_fields__") or hasattr(of, "__struct_fields__") or hasattr(of, "_fields")


def members_of(of: type[object]) -> Iterator[tuple[str, Any]]:
    """The public calls and properties of a class that are written in tensord, those of its bases last."""
    seen: set[str] = set()
    for base in of.__mro__:
        if not base.__module__.startswith("tensord."):
            continue
        for name, found in vars(base).items():
            call = found.__func__ if isinstance(found, classmethod | staticmethod) else found
            if name.startswith("_") or name in seen or not isinstance(call, FunctionType | property):
                continue
            seen.add(name)
            if name != "check_invariants" and not INTERNAL.search(inspect.getdoc(call) or ""):
                yield name, call


class Plain(str):
    """An annotation that is shown as it is written, without quotes."""

    def __repr__(self) -> str:
        return str(self)


def signature_lines(name: str, of: Callable[..., Any]) -> Iterator[str]:
    """A call's signature as a block of code."""
    signature = inspect.signature(of)
    parameters = [
        each.replace(annotation=plain(each.annotation)) for each in signature.parameters.values() if each.name != "self"
    ]
    returns = signature.empty if inspect.isclass(of) else plain(signature.return_annotation)
    # Python 3.13 leaves "typing." out by itself.
    text = name + str(signature.replace(parameters=parameters, return_annotation=returns)).replace("typing.", "")
    prefix = "async " if inspect.iscoroutinefunction(of) else ""
    yield "```python"
    yield from textwrap.wrap(prefix + text, SIGNATURE_WIDTH, subsequent_indent="    ", break_long_words=False)
    yield "```"


def plain(annotation: Any) -> Any:
    return Plain(annotation) if isinstance(annotation, str) else annotation


def returned(of: property) -> str:
    annotation = inspect.signature(of.fget).return_annotation if of.fget else ""
    return f", `{annotation}`" if isinstance(annotation, str) and annotation else ""


# ---- docstrings

SECTION: Final = re.compile(r"^(Args|Returns|Raises|Example|Attributes|Invariants?):?$")
ENTRY: Final = re.compile(r"^([\w*]+(?:, [\w*]+)*): (.*)$")
INTERNAL: Final = re.compile(r"\bFor\s+the\s+library\.")
"""What the docstring of a call says that is public only to the library's other modules."""


def docstring_lines(text: str) -> Iterator[str]:
    """A docstring as Markdown."""
    title, block = "", []
    for line in [*text.splitlines(), "Args:"]:
        found = SECTION.match(line)
        if not found:
            block.append(line)
            continue
        yield from section_lines(title, block)
        title, block = found[1], []


def section_lines(title: str, block: list[str]) -> Iterator[str]:
    while block and not block[-1].strip():
        block.pop()
    if not block:
        return
    body = textwrap.dedent("\n".join(block)).splitlines()
    if not title:
        yield from fenced_where_indented(body)
        return
    yield ""
    yield f"**{title}**"
    yield ""
    if title == "Example":
        yield from ["```pycon", *body, "```"]
    elif title in ("Args", "Raises", "Attributes"):
        yield from entry_lines(body)
    else:
        yield from body


def entry_lines(body: list[str]) -> list[str]:
    """The entries of a section as a list, each with its continuation lines joined; other text after a blank line."""
    lines: list[str] = []
    for indented in body:
        line = indented.strip()
        if found := ENTRY.match(indented):
            lines.append(f"- `{found[1]}`: {found[2]}")
        elif not line or not lines or not lines[-1]:
            lines.append(line)
        else:
            lines[-1] += f" {line}"
    return lines


def fenced_where_indented(body: list[str]) -> Iterator[str]:
    """Text with its indented passages (trees, formulas) as blocks."""
    inside = False
    for at, line in enumerate(body):
        opens = line.startswith("    ") and (inside or at == 0 or not body[at - 1].strip())
        closes = inside and bool(line.strip()) and not line.startswith("    ")
        if opens and not inside:
            inside = True
            yield "```text"
        elif closes:
            inside = False
            yield "```"
            yield ""
        if line.strip() or not inside:
            yield line.removeprefix("    ") if inside else line
    if inside:
        yield "```"


def example_of(text: str) -> list[str]:
    """The example of a docstring."""
    body = textwrap.dedent(text.split("Example:\n", 1)[1].split("\n\n")[0])
    return ["```pycon", *body.splitlines(), "```"]


PAGES: Final = {"configuration": configuration_text, "api": api_text}

if __name__ == "__main__":
    for page in sys.argv[1:]:
        sys.stdout.write(PAGES[page]())
    if not sys.argv[1:]:
        for page, text in PAGES.items():
            (FOLDER / f"{page}.md").write_text(text())
