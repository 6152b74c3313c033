"""The units are checked by systemd's own tools, the example configuration against the settings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tensord.daemon.config.config import SETTINGS, Config
from tensord.daemon.config.usage import example_text

FOLDER = Path(__file__).parents[2] / "systemd"
SYSTEM_UNITS = (
    "tensord.service",
    "tensord.socket",
    "tensord-status.socket",
    "tensord-metrics.socket",
    "tensord-retry.timer",
)
EXPOSURE_MAX = 1.5

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def run(*command: str | Path, runtime: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "LC_ALL": "C", "XDG_RUNTIME_DIR": str(runtime)}
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)


def installed(folder: Path, into: Path) -> list[Path]:
    """Copies of a folder's units whose programs are one that is there, as after an installation."""
    into.mkdir()
    for name in SYSTEM_UNITS:
        text = (folder / name).read_text()
        (into / name).write_text(re.sub(r"(?m)^(Exec(?:Start|Reload))=.*", rf"\1={sys.executable}", text))
    return [into / name for name in SYSTEM_UNITS]


@needs_systemd
@pytest.mark.parametrize(("folder", "scope"), [(".", "--system"), ("user", "--user")])
def test_the_units_verify_clean(tmp_path: Path, folder: str, scope: str) -> None:
    units = installed(FOLDER / folder, tmp_path / "units")
    done = run("systemd-analyze", "verify", "--man=no", scope, *units, runtime=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def exposure(service: Path, runtime: Path) -> float:
    done = run("systemd-analyze", "security", "--offline=true", "--no-pager", service, runtime=runtime)
    found = re.search(r"Overall exposure level for tensord\.service: ([\d.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    return float(found[1])


@needs_systemd
def test_the_service_exposes_little(tmp_path: Path) -> None:
    service = installed(FOLDER, tmp_path / "units")[0]
    assert exposure(service, tmp_path) < EXPOSURE_MAX
    bare = re.sub(r"(?m)^(SystemCall|Restrict|Protect).*\n", "", service.read_text())
    service.write_text(bare)
    assert exposure(service, tmp_path) > EXPOSURE_MAX


def test_the_example_configuration_names_every_setting() -> None:
    assert (FOLDER / "tensord.toml").read_text() == example_text(), (
        "write it anew: python -m tensord.daemon.config.usage > systemd/tensord.toml"
    )


def test_every_line_of_the_example_can_be_uncommented(tmp_path: Path) -> None:
    text = re.sub(r"(?m)^#(\w+ = )", r"\1", (FOLDER / "tensord.toml").read_text())
    file = tmp_path / "tensord.toml"
    file.write_text(text)
    config = Config.load(["--config", str(file)], {"RUNTIME_DIRECTORY": "/run/tensord"})
    assert set(config.sources.values()) == {f"file {file}"}
    for key, setting in SETTINGS.items():
        if key not in ("instance", "socket", "status_socket", "ring_bytes", "max_entries"):
            assert config.value(key) == setting.default, key
