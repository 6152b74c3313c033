"""When a mode is entered, and when it is left: rises at once, falls by two samples, and every fall ends."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tensord.daemon.governor.forms.thresholds import Thresholds
from tensord.daemon.governor.modes.modes import TierMode
from tensord.errors import BadConfiguration
from tensord.ipc.messages.modes import Mode

BEGINS = {Mode.NORMAL: 0.70, Mode.PRESSURE: 0.85, Mode.CRITICAL: 0.92, Mode.EMERGENCY: 0.96}
LEFT = {Mode.NORMAL: 0.68, Mode.PRESSURE: 0.83, Mode.CRITICAL: 0.90, Mode.EMERGENCY: 0.94}
IN = {Mode.RELAXED: 0.3, Mode.NORMAL: 0.75, Mode.PRESSURE: 0.87, Mode.CRITICAL: 0.94, Mode.EMERGENCY: 0.99}


def at(level: Mode, thresholds: Thresholds | None = None) -> TierMode:
    tier = TierMode(thresholds or Thresholds())
    tier.sample(IN[level])
    assert tier.level is tier.mode is level
    return tier


def levels(tier: TierMode, *shares: float) -> list[Mode]:
    found = []
    for share in shares:
        tier.sample(share)
        found.append(tier.level)
    return found


@pytest.mark.parametrize("share", [math.nan, -0.01, -math.inf])
def test_an_invalid_share_never_means_an_empty_tier(share: float) -> None:
    tier = at(Mode.EMERGENCY)
    for _ in range(3):
        with pytest.raises(AssertionError):
            tier.sample(share)
    assert tier.level is Mode.EMERGENCY


def test_without_hysteresis_a_threshold_still_belongs_to_its_level() -> None:
    tier = at(Mode.PRESSURE, Thresholds(hysteresis=0.0))
    assert levels(tier, 0.85, 0.85, 0.85) == [Mode.PRESSURE] * 3
    below = math.nextafter(0.85, 0)
    assert levels(tier, below, below) == [Mode.PRESSURE, Mode.NORMAL]


# ---- thresholds


@pytest.mark.parametrize(
    ("settings_", "said"),
    [
        ({"normal": 0.9}, "normal = 0.9 and pressure = 0.85 with a hysteresis of 0.02: each must be above"),
        ({"pressure": 0.95}, "pressure = 0.95 and critical = 0.92"),
        ({"critical": 0.97}, "critical = 0.97 and emergency = 0.96"),
        ({"critical": 0.94}, "critical = 0.94 and emergency = 0.96"),
        ({"emergency": 1.01}, "emergency = 1.01 .* at most 1"),
        ({"emergency": math.nan}, "emergency = nan"),
        ({"emergency": math.inf}, "emergency = inf"),
        ({"pressure": math.nan}, "pressure = nan"),
        ({"normal": math.nan}, "normal = nan"),
        ({"normal": 0.0, "hysteresis": 0.0}, "normal = 0 with a hysteresis of 0: it must be above 0"),
        ({"normal": -0.1}, "normal = -0.1"),
        ({"normal": 0.01}, "normal = 0.01 with a hysteresis of 0.02: .* would never end"),
        ({"hysteresis": -0.01}, "hysteresis = -0.01: give a share of at least 0"),
        ({"hysteresis": math.nan}, "hysteresis = nan"),
        ({"hysteresis": 0.04}, "critical = 0.92 and emergency = 0.96 with a hysteresis of 0.04"),
        ({"hysteresis": 1.0}, "hysteresis = 1"),
    ],
)
def test_thresholds_out_of_order_are_refused_by_name(settings_: dict[str, float], said: str) -> None:
    with pytest.raises(BadConfiguration, match=said):
        Thresholds(**settings_)


def test_thresholds_at_their_limits_are_taken() -> None:
    assert levels(TierMode(Thresholds(0.02, 0.05, 0.5, 1.0, 0.02)), 1.0, 0.0, 0.0)[-1] is Mode.RELAXED
    Thresholds(1e-6, 2e-6, 3e-6, 4e-6, 0.0)


def test_new_thresholds_hold_from_the_next_sample_on() -> None:
    tier = at(Mode.NORMAL)
    tier.change_thresholds(Thresholds(0.2, 0.4, 0.6, 0.8))
    assert tier.level is Mode.NORMAL
    assert levels(tier, 0.75) == [Mode.CRITICAL]
    tier.sample(0.5)
    tier.change_thresholds(Thresholds())
    assert levels(tier, 0.5, 0.5) == [Mode.CRITICAL, Mode.RELAXED], "samples before speak for nothing any more"


points = st.one_of(
    st.integers(0, 1100),
    st.sampled_from([round(s * 1000) + d for s in (*BEGINS.values(), *LEFT.values()) for d in (-1, 0, 1)]),
)


class AgainstThresholds(RuleBasedStateMachine):
    """Each threshold by itself, in exact fractions: entered at once, left by two samples in a row below."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = TierMode(Thresholds())
        self.samples: list[Fraction] = []
        self.entered = dict.fromkeys(BEGINS, False)

    @rule(permille=points)
    def sample(self, permille: int) -> None:
        self.tier.sample(permille / 1000)
        self.samples.append(Fraction(permille, 1000))
        for level, begins in BEGINS.items():
            exact = Fraction(str(begins))
            if self.samples[-1] >= exact:
                self.entered[level] = True
            elif len(self.samples) > 1 and max(self.samples[-2:]) <= exact - Fraction(2, 100):
                self.entered[level] = False

    @rule(workflow=st.booleans())
    def change_workflow(self, workflow: bool) -> None:
        self.tier.workflow = workflow

    @invariant()
    def the_level_is_the_highest_that_was_entered_and_not_left(self) -> None:
        entered = [level for level, held in self.entered.items() if held]
        assert entered == list(BEGINS)[: len(entered)], "levels are entered from below"
        assert self.tier.level is (entered or [Mode.RELAXED])[-1]
        aware = self.tier.workflow and self.tier.level in (Mode.NORMAL, Mode.PRESSURE)
        assert self.tier.mode is (Mode.WORKFLOW_AWARE if aware else self.tier.level)
        assert self.tier.pressed == (Mode.PRESSURE in entered)


TestAgainstThresholds = AgainstThresholds.TestCase
TestAgainstThresholds.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
