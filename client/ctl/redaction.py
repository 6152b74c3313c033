"""Takes from a text what tells of a site: keys, host names, user names, home folders.

Owns: what is replaced, and by what. Does not own: the text. Pure: the names are arguments.

Invariants: equal keys have equal replacements within one Redaction, so that a report can still be followed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_HEX: Final = re.compile(r"(?<![0-9a-zA-Z.])[0-9a-fA-F]{16,64}(?![0-9a-zA-Z])")
"""A key, the tag of a namespace, a digest. A whole number of 16 digits is replaced too; decimals stay."""
_HOMES: Final = re.compile(r"/(?:home|Users)/[^/\s\"',;:)\]}]+|/root(?=[/\s\"',;:)\]}]|$)")
_IPV4: Final = re.compile(r"(?<![\d.])(?!127\.|0\.0\.0\.0)\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")


class Redaction:
    """Replaces names in texts.

    Args:
        hosts: names of the host.
        users: names of people's accounts.
        homes: their home folders, beside those in /home and /root.
    """

    def __init__(self, hosts: Iterable[str] = (), users: Iterable[str] = (), homes: Iterable[str] = ()) -> None:
        self._digests: dict[str, str] = {}
        self._names = [
            (re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])"), what)
            for what, names in (("<host>", hosts), ("<user>", users))
            for name in sorted(set(names), key=len, reverse=True)
            if name
        ]
        self._homes = [home for home in sorted(set(homes), key=len, reverse=True) if len(home) > 1]

    def __call__(self, text: str) -> str:
        """The text without these names."""
        for home in self._homes:
            text = text.replace(home, "<home>")
        text = _HOMES.sub("<home>", text)
        for name, what in self._names:
            text = name.sub(what, text)
        text = _IPV4.sub("<address>", text)
        return _HEX.sub(self._digest, text)

    def _digest(self, found: re.Match[str]) -> str:
        return self._digests.setdefault(found[0].lower(), f"<digest {len(self._digests) + 1}>")
