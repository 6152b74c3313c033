"""The registry of gauges: what the configuration offers, and that every source is held by the conformance suite."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tensord.daemon.gauges import registry
from tensord.daemon.gauges.offers import OFFERS, Offer, Opening
from tensord.ipc.modes import Tier

from .conformance import AnySource

EACH = pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: f"{offer.tier.value}-{offer.name}")


@EACH
def test_every_source_passes_the_conformance_suite(offer: Offer) -> None:
    module = import_module(f".test_{offer.name}", __package__)
    suites = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, AnySource)]
    assert any(each is not AnySource and each.tier is offer.tier for each in suites)


@EACH
def test_a_source_has_the_name_by_which_it_is_chosen(offer: Offer, tmp_path: Path) -> None:
    source = offer.make(Opening(tmp_path, tmp_path / "gauges"))
    assert source.name == offer.name
    source.close()


def test_auto_stands_for_the_best_sources_first() -> None:
    assert registry.choices(Tier.DEVICE) == ["auto", "amd", "nvidia", "sysfs", "owners", "file", "none"]
    assert registry.choices(Tier.HOST) == ["auto", "file", "none"]
    names = [source.name for source in registry.opened(Tier.DEVICE, "auto", Opening())]
    assert names == ["amd", "nvidia", "sysfs", "owners"]
    assert registry.opened(Tier.DEVICE, "none", Opening()) == []
