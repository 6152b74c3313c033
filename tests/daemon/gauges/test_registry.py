"""The registry of gauges: what the configuration offers, and that every source is held by the conformance suite."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tensord.daemon.gauges import sources
from tensord.ipc.messages.modes import Tier

from .conformance import AnySource


@pytest.mark.parametrize(("tier", "name"), [(tier, name) for tier in Tier for name in sources.CHOICES[tier]])
def test_every_choice_has_its_sources_best_first_and_each_passes_the_conformance_suite(
    tier: Tier, name: str, tmp_path: Path
) -> None:
    opened = [source.name for source in sources.opened(tier, name, tmp_path, tmp_path / "gauges")]
    auto = ["host"] if tier is Tier.HOST else ["amd", "nvidia", "sysfs", "owners"]
    assert opened == {"auto": auto, "none": []}.get(name, [name])
    for each in opened:
        suites = vars(import_module(f".test_{each}", __package__)).values()
        mine = [suite for suite in suites if isinstance(suite, type) and issubclass(suite, AnySource)]
        assert any(suite is not AnySource and suite.tier is tier for suite in mine)
