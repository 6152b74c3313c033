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


def settings(path: Path) -> dict[str, list[str]]:
    """What a unit sets, by name; comments and sections are left out."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


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


@pytest.mark.parametrize("unit", ["tensord.service", "user/tensord.service"])
def test_a_stop_or_a_crash_loses_neither_sockets_nor_ring_nor_uids(unit: str) -> None:
    found = settings(FOLDER / unit)
    assert found.get("RemoveIPC", ["no"]) == ["no"]
    assert found["RuntimeDirectoryPreserve"] == ["yes"]
    assert not {"DynamicUser", "PrivateUsers", "PrivateIPC"} & set(found)
    assert found["Type"] == ["notify"]
    assert "WatchdogSec" in found
    assert found["ExecReload"] == [f"{found['ExecStart'][0].rpartition('/')[0]}/tensorctl reload"]


@pytest.mark.parametrize("folder", ["", "user"])
def test_the_timer_tries_again_after_the_limit_of_starts_has_ended(folder: str) -> None:
    service, timer = (settings(FOLDER / folder / f"tensord{kind}") for kind in (".service", "-retry.timer"))
    assert service["RestartPreventExitStatus"] == ["2"]
    assert service["OnFailure"] == ["tensord-retry.timer"]
    assert timer["Unit"] == ["tensord.service"]
    assert timer["PartOf"] == ["tensord.socket"], "a stop for good stops the timer too"
    assert int(timer["OnActiveSec"][0].removesuffix("s")) > int(service["StartLimitIntervalSec"][0])


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


@needs_systemd
@pytest.mark.skipif(os.geteuid() != 0, reason="systemd-tmpfiles gives folders to users as root")
def test_user_and_folders_are_made_as_described(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    root = f"--root={tmp_path}"
    for tool, *flags in (("systemd-sysusers",), ("systemd-tmpfiles", "--create")):
        drop = tmp_path / "usr" / "lib" / (tool.removeprefix("systemd-") + ".d")
        drop.mkdir(parents=True)
        kind = tool.removeprefix("systemd-")
        shutil.copy(FOLDER / f"{kind}.d" / "tensord.conf", drop)
        done = run(tool, *flags, root, runtime=tmp_path)
        assert done.returncode == 0, done.stderr
    passwd = (tmp_path / "etc" / "passwd").read_text()
    uid = int(next(line for line in passwd.splitlines() if line.startswith("tensord:")).split(":")[2])
    made = (tmp_path / "run" / "tensord").stat()
    assert (made.st_uid, made.st_mode & 0o777) == (uid, 0o755)
    assert (tmp_path / "etc" / "tensord").stat().st_uid == 0
