"""The registry of gauges: what the configuration offers, and that every source is held by the conformance suite."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tensord.daemon.gauges import sources
from tensord.ipc.messages.modes import Tier

from .conformance import AnySource


@pytest.mark.parametrize(("tier", "name"), [(tier, name) for tier in Tier for name in (*sources.offered(tier), "file")])
def test_every_source_has_its_name_and_passes_the_conformance_suite(tier: Tier, name: str, tmp_path: Path) -> None:
    chosen = "auto" if name == "host" else name
    (source,) = sources.opened(tier, chosen, tmp_path, tmp_path / "gauges")
    assert source.name == name
    source.close()
    module = import_module(f".test_{name}", __package__)
    suites = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, AnySource)]
    assert any(each is not AnySource and each.tier is tier for each in suites)


def test_a_vendors_own_library_is_believed_rather_than_what_others_say() -> None:
    opened = {tier: [source.name for source in sources.opened(tier, "auto")] for tier in Tier}
    assert opened == {Tier.DEVICE: ["amd", "nvidia", "sysfs", "owners"], Tier.HOST: ["host"]}
    assert [sources.opened(tier, "none") for tier in Tier] == [[], []]
    assert sources.choices(Tier.HOST) == ["auto", "file", "none"]
