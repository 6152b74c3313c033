"""The registry of gauges: what the configuration offers, and that every source is held by the conformance suite."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tensord.daemon.gauges.sources import registry
from tensord.daemon.gauges.sources.offers import OFFERS, Offer, Opening
from tensord.ipc.messages.modes import Tier

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


@pytest.mark.parametrize("tier", Tier)
def test_auto_stands_for_sources_in_a_fixed_order_and_none_for_nothing(tier: Tier) -> None:
    offers = registry.offered(tier)
    assert registry.choices(tier)[0] == "auto" and registry.choices(tier)[-1] == "none"
    names = [source.name for source in registry.opened(tier, "auto", Opening())]
    assert names == [each.name for each in offers if each.auto is not None]
    assert len({each.auto for each in offers if each.auto is not None}) == len(names), "two have the same place"
    assert registry.opened(tier, "none", Opening()) == []


def test_a_vendors_own_library_is_believed_rather_than_what_others_say() -> None:
    names = [source.name for source in registry.opened(Tier.DEVICE, "auto", Opening())]
    known = [name for name in names if name in ("amd", "nvidia", "sysfs", "owners")]
    assert known == ["amd", "nvidia", "sysfs", "owners"]
