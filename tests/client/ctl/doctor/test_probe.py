from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tensord.client.ctl.doctor import probe
from tensord.client.ctl.doctor.probe import probed

from ....daemon_process import PATIENCE_S


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "package_version", lambda package: None if package == "torch" else "1.0")


def _python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_a_missing_binding_is_not_tried() -> None:
    (found,) = probed(["torch"], _python("raise SystemExit(1)"))
    assert (found.version, found.devices, found.error) == (None, None, "")


def test_the_last_line_is_the_answer_whatever_a_library_prints_before() -> None:
    code = 'print(\'loading...\'); print(\'{"devices": 3, "error": ""}\')'
    (found,) = probed(["nvml"], _python(code))
    assert (found.devices, found.error) == (3, "")


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import os; os.kill(os.getpid(), 11)", "ended with -11"),
        ("raise KeyError('lib')", "ended with 1"),
        ("print('no json')", "ended with 0"),
        ("print('[]')", "ended with 0"),
        ("import time; time.sleep(60)", "no answer within"),
    ],
)
def test_a_binding_that_crashes_hangs_or_prints_noise_is_reported_and_does_no_harm(code: str, told: str) -> None:
    (found,) = probed(["rsmi"], _python(code), wait_s=PATIENCE_S if "sleep" not in code else 0.2)
    assert found.devices is None
    assert told in found.error


# What the real ones raise, at import or when they are started.
FAULTS = [
    ("pynvml", "nvml", "raise KeyError('libnvidia-ml.so.1')", "KeyError: 'libnvidia-ml.so.1'"),
    ("pynvml", "nvml", "def nvmlInit(): raise RuntimeError('no driver')", "RuntimeError: no driver"),
    ("pyrsmi", "rsmi", "raise SystemExit(3)", "SystemExit: 3"),
    ("pyrsmi", "rsmi", "import os; os.dup2(1, 2); print('noise'); raise ImportError('libamd')", "ImportError: libamd"),
    ("torch", "torch", "raise OSError('libcudart\\nnot found')", "OSError: libcudart not found"),
]


@pytest.mark.parametrize(("module", "name", "code", "told"), FAULTS)
def test_any_error_of_a_binding_is_an_answer(tmp_path: Path, module: str, name: str, code: str, told: str) -> None:
    (tmp_path / f"{module}.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "tensord.client.ctl.doctor.probe", name],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert json.loads(done.stdout) == {"devices": None, "error": told}


def test_a_library_that_counts_gpus_but_cannot_read_them_is_not_usable(tmp_path: Path) -> None:
    (tmp_path / "pyrsmi").mkdir()
    (tmp_path / "pyrsmi/__init__.py").touch()
    (tmp_path / "pyrsmi/rocml.py").write_text(
        "def smi_initialize(): pass\n"
        "def smi_shutdown(): pass\n"
        "def smi_get_device_count(): return 2\n"
        "def smi_get_device_memory_total(number): return -1\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "tensord.client.ctl.doctor.probe", "rsmi"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "cannot read their memory" in json.loads(done.stdout)["error"]
