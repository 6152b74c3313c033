"""All replacement policies by name, for the configuration.

Owns: the import of every module of this package, by which each policy registers itself (`Replacement`). Does not own
the policies. No module of this package imports this one.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Final

from ...errors import BadConfiguration
from .replacement import Replacement

for _module in iter_modules([str(Path(__file__).parent)]):
    import_module(f".{_module.name}", __package__)

POLICIES: Final[dict[str, type[Replacement]]] = dict(sorted(Replacement.registered.items()))


def by_name(name: str) -> Replacement:
    """Makes a new, empty policy.

    Raises:
        BadConfiguration: no policy has that name; the message lists the names that exist.
    """
    policy = POLICIES.get(name)
    if policy is None:
        raise BadConfiguration(f"policy = {name!r} is not a policy; choose one of {', '.join(POLICIES)}")
    return policy()
