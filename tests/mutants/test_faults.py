"""Each fault of `make mutants` has its place in the source."""

from __future__ import annotations

import pytest

from .__main__ import ROOT, source_of
from .faults import FAULTS, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.broken.replace(" ", "-"))
def test_a_fault_has_one_place(fault: Fault) -> None:
    text = source_of(fault, ROOT).read_text()
    compile(text.replace(fault.before, fault.after), "mutant", "exec")
    assert all((ROOT / name).exists() for name in fault.tests.split())
