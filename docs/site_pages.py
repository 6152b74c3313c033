"""What the site adds to docs/: a page for each public name, tables of settings, metrics and commands, and the pages of
the root that docs/ leads to.

    docs/api.md names `Client` ─→ the page api/Client.md, from the docstring; the name becomes a link to it

Owns: which pages there are, and how docstrings are read. Does not own: the settings (mkdocs.yml), the docstrings, the
tables (reference.py).
mkdocs calls the functions as hooks, and griffe the extension.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs import reference

ROOT: Final = Path(__file__).parents[1]
API: Final = "api.md"
NAME: Final = re.compile(r"(?<=[| ])`(\w+)`(?= )")
"""A public name in the table of docs/api.md."""
OUTSIDE: Final = ("ARCHITECTURE.md", "CONTRIBUTING.md")
TABLES: Final = {
    "configuration.md": reference.settings,
    "metrics.md": reference.all_metrics,
    "tensorctl.md": reference.commands,
}
CALL_OF_CLIENT: Final = re.compile(r"^_\w+\(Client\.(\w+)")
"""What makes a call of AsyncClient, whose docstring is that of Client's."""
FIELDS: Final = ("NamedTuple", "StrEnum", "Struct")
"""Bases of classes whose attributes are shown without a docstring."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    rows = [line for line in (ROOT / "docs" / API).read_text().splitlines() if line.startswith("|")]
    for name in NAME.findall("\n".join(rows)):
        files.append(File.generated(config, f"api/{name}.md", content=f"::: tensord.{name}\n"))
    for name in OUTSIDE:
        text = (ROOT / name).read_text().replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads the links of a page to pages of the site. A file that is no page, such as a Dockerfile, is named only."""
    if page.file.src_uri == API:
        markdown = NAME.sub(r"[`\1`](api/\1.md)", markdown)
    if table := TABLES.get(page.file.src_uri):
        markdown += "\n".join(table())
    for name in OUTSIDE:
        markdown = markdown.replace(f"](../{name})", f"]({name})")
    return re.sub(r"\[([^]]*)\]\(\.\./([^)]*)\)", r"\1 (`\2`)", markdown)


class Docstrings(griffe.Extension):
    """Leaves out what is public only to the library's other modules, and reads examples as examples."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        self._visit(pkg)

    def _visit(self, of: griffe.Object) -> None:
        has_fields = isinstance(of, griffe.Class) and any(str(base) in FIELDS for base in of.bases)
        for name, member in list(of.members.items()):
            if isinstance(member, griffe.Alias):
                continue
            text = member.docstring.value if member.docstring else ""
            if name == "check_invariants" or re.search(r"\bFor\s+the\s+library\.", text):
                of.del_member(name)
                continue
            if member.docstring:
                member.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
            elif has_fields and isinstance(member, griffe.Attribute):
                member.docstring = griffe.Docstring("", parent=member)
            elif found := CALL_OF_CLIENT.search(source_of(member)):
                said = f"As [`Client.{found[1]}`][tensord.Client.{found[1]}], awaited."
                member.docstring = griffe.Docstring(said, parent=member)
            self._visit(member)


def source_of(member: griffe.Object) -> str:
    """What makes a member: the decorators of a function, the value of an attribute."""
    if isinstance(member, griffe.Function):
        return " ".join(str(each.value) for each in member.decorators)
    return str(member.value) if isinstance(member, griffe.Attribute) else ""
