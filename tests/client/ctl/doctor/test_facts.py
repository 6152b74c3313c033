from __future__ import annotations

from pathlib import Path

from tensord.client.ctl.doctor import facts


def _write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_linger_and_logind_and_gpus_are_files(tmp_path: Path) -> None:
    assert not facts.lingers(0, tmp_path)
    _write(tmp_path / "var/lib/systemd/linger/root")
    assert facts.lingers(0, tmp_path)
    assert not facts.lingers(4_000_000_000, tmp_path)
    assert facts.logind_configuration(tmp_path) == ""
    assert not any(facts.hardware(tmp_path).values())
    _write(tmp_path / "dev/kfd")
    assert facts.hardware(tmp_path) == {"nvidia": False, "amd": True}


def test_this_machine_has_memory_and_files_have_modes(tmp_path: Path) -> None:
    room = facts.room(1 << 20, 0, None)
    assert 0 < room.available_bytes <= room.memory_bytes
    assert 0 < room.shm_free_bytes <= room.shm_total_bytes
    assert facts.mode(tmp_path) == tmp_path.stat().st_mode
    assert facts.mode(tmp_path / "nothing") == 0
