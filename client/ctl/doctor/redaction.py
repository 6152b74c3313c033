"""Takes from a text what tells of a site: keys, host names, network addresses, user names, home folders.

Owns: what is replaced, and by what. Does not own: the text. Pure: the names are arguments, or were learned from texts.

Invariants: equal keys have equal replacements within one Redaction, so that a report can still be followed. Addresses
of loopback and the address of all interfaces stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Final

_HEX: Final = re.compile(r"(?<![0-9a-zA-Z.])[0-9a-fA-F]{16,64}(?![0-9a-zA-Z])")
"""A key, the tag of a namespace, a digest. A whole number of 16 digits is replaced too; decimals stay."""
_HOMES: Final = re.compile(r"/(?:home|Users)/[^/\s\"',;:)\]}]+|/root(?=[/\s\"',;:)\]}]|$)")
_ADDRESS: Final = re.compile(
    r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}(?!\.?\d)|(?=[0-9a-fA-F]*:[0-9a-fA-F]*:)[0-9a-fA-F:.]+(?:%[\w-]+)?(?!\w))"
)
"""What may be an address of IPv4 or IPv6. Times, MAC and PCI addresses have the form too, and are none."""
_URL: Final = re.compile(r"(://)(?:[^\s/@\"'?#]+@)?([^\s/@\"'?#,:\[\]<>\\]+)")
_URL_USER: Final = re.compile(r"(?<=://)[^\s/@\"'?#]+(?=@)")
_DOMAIN: Final = r"(?:\.[a-z0-9-]+)*"
_NAME_AND_PORT: Final = re.compile(
    r"(?<![\w./-])(?:[a-z0-9-]+\.)+(?!py:)[a-z][a-z0-9-]+(?=:\d{1,5}(?!\d))", re.IGNORECASE
)


class Redaction:
    """Replaces names in texts.

    Args:
        hosts: names of hosts. Each is replaced with the domain that follows it; a domain of two labels or more also
            behind other names.
        users: names of people's accounts.
        homes: their home folders, beside those in /home and /root.
    """

    def __init__(self, hosts: Iterable[str] = (), users: Iterable[str] = (), homes: Iterable[str] = ()) -> None:
        self._digests: dict[str, str] = {}
        self._hosts: set[str] = set()
        self._host_names: list[re.Pattern[str]] = []
        self._add_hosts(hosts)
        self._users = [re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])") for name in _longest_first(users)]
        self._homes = [home for home in _longest_first(homes) if len(home) > 1]

    def learn(self, text: str) -> None:
        """From now on also replaces the hosts of the URLs in this text, wherever they stand."""
        self._add_hosts(found[2] for found in _URL.finditer(text) if not _is_address(found[2]))

    def __call__(self, text: str) -> str:
        """The text without these names."""
        for home in self._homes:
            text = text.replace(home, "<home>")
        text = _HOMES.sub("<home>", text)
        text = _URL_USER.sub("<user>", text)
        for name in self._host_names:
            text = name.sub("<host>", text)
        text = _NAME_AND_PORT.sub("<host>", text)
        for name in self._users:
            text = name.sub("<user>", text)
        text = _ADDRESS.sub(_address, text)
        return _HEX.sub(self._digest, text)

    def _add_hosts(self, names: Iterable[str]) -> None:
        self._hosts |= {name.lower() for name in names} - {"", "localhost"}
        domains = {domain for name in self._hosts if "." in (domain := name.partition(".")[2])}
        self._host_names = [
            re.compile(rf"(?<![\w.-]){before}{re.escape(name)}{_DOMAIN}(?![\w-])", re.IGNORECASE)
            for before, found in ((r"(?:[a-z0-9-]+\.)*", domains), ("", self._hosts))
            for name in _longest_first(found)
        ]

    def _digest(self, found: re.Match[str]) -> str:
        return self._digests.setdefault(found[0].lower(), f"<digest {len(self._digests) + 1}>")


def _longest_first(names: Iterable[str]) -> list[str]:
    return sorted({name for name in names if name}, key=len, reverse=True)


def _address(found: re.Match[str]) -> str:
    whole = found[0]
    for text in (whole, whole.rstrip(".:")):
        if _is_address(text):
            address = ip_address(text)
            stays = address.is_loopback or address.is_unspecified
            return whole if stays else f"<address>{whole[len(text) :]}"
    return whole


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
