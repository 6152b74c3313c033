"""Escapes what a terminal would obey, for texts that clients have a part in.

Owns: the escape. Does not own: the log and the metrics, which use it.
"""

from __future__ import annotations


def escaped(text: str, backslash: str = "\\") -> str:
    """The text with an escape for each character that is not printable: control characters, and marks that change the
    direction of writing. `backslash`: how an escape begins."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else backslash + each.encode("unicode_escape", "surrogatepass").decode()[1:]
        for each in text
    )


def escaped_lines(metrics: bytes) -> bytes:
    """Each line of a metrics text escaped. A backslash in a label's value is written as two."""
    return "\n".join(escaped(line, "\\\\") for line in metrics.decode().split("\n")).encode()
