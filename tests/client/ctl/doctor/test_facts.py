from __future__ import annotations

import os
from pathlib import Path

from tensord.client.ctl.doctor import facts


def _write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_machine_s_range_of_system_users_counts(tmp_path: Path) -> None:
    assert facts.system_uid_max(tmp_path) == 999
    _write(tmp_path / "etc/login.defs", "#SYS_UID_MAX 1\nSYS_UID_MAX\t\t 499\n")
    assert facts.system_uid_max(tmp_path) == 499


def test_linger_and_logind_and_gpus_are_files(tmp_path: Path) -> None:
    assert not facts.lingers(0, tmp_path)
    _write(tmp_path / "var/lib/systemd/linger/root")
    assert facts.lingers(0, tmp_path)
    assert not facts.lingers(4_000_000_000, tmp_path)
    assert not facts.has_logind(tmp_path)
    _write(tmp_path / "run/systemd/seats/seat0")
    assert facts.has_logind(tmp_path)
    assert not any(facts.hardware(tmp_path).values())
    _write(tmp_path / "dev/kfd")
    assert facts.hardware(tmp_path) == {"nvidia": False, "amd": True}


def test_this_machine_has_memory_and_this_process_a_user(tmp_path: Path) -> None:
    room = facts.room(1 << 20, 0, None)
    assert 0 < room.available_bytes <= room.memory_bytes
    assert 0 < room.shm_free_bytes <= room.shm_total_bytes
    assert facts.caller().uid == os.geteuid()
    found = facts.node(tmp_path)
    assert found is not None
    assert found.uid == os.geteuid()
    assert facts.node(tmp_path / "nothing") is None
