from __future__ import annotations

from tensord.client.ctl.doctor import software
from tensord.client.ctl.doctor.finding import Level, fail, findings_text, ok, warn
from tensord.client.ctl.doctor.software import Binding
from tensord.client.ctl.tables import WIDTH


def test_a_protocol_that_is_not_understood_fails_and_the_one_before_warns() -> None:
    assert software.versions("1.0", "1.0", 1, 1).level is Level.OK
    assert software.versions("1.1", "1.0", 1, 1).level is Level.WARN
    assert software.versions("1.1", "1.0", 2, 1).level is Level.WARN
    assert software.versions("1.2", "1.0", 3, 1).level is Level.FAIL
    assert software.versions("1.0", None, 1, None).level is Level.OK


def test_python_that_is_too_old_fails() -> None:
    assert software.python((3, 11, 0), {"numpy": "2", "torch": None}).level is Level.OK
    assert "torch absent" in software.python((3, 11, 0), {"torch": None}).text
    assert software.python((3, 10, 9), {}).level is Level.FAIL


def test_a_wrong_configuration_fails_unless_a_daemon_runs_with_another() -> None:
    assert software.configuration(None, [], served=False).level is Level.OK
    assert software.configuration(None, ["TENSORD_PORT"], served=False).level is Level.WARN
    assert software.configuration("ring_bites", [], served=False).level is Level.FAIL
    assert software.configuration("ring_bites", [], served=True).level is Level.WARN


NVML = Binding("nvml", "nvidia-ml-py", "nvidia", "12.0", 2)


def test_a_binding_that_sees_gpus_is_ok() -> None:
    (found,) = software.gpus([NVML], {"nvidia": True})
    assert (found.level, found.text) == (Level.OK, "nvidia-ml-py 12.0 sees 2")


def test_a_missing_binding_matters_where_there_is_a_gpu() -> None:
    absent = Binding("nvml", "nvidia-ml-py", "nvidia", None)
    assert software.gpus([absent], {"nvidia": False})[0].level is Level.OK
    (found,) = software.gpus([absent], {"nvidia": True})
    assert found.level is Level.WARN
    assert "pip install 'tensord[nvidia]'" in found.remedy


def test_a_binding_that_cannot_be_used_is_reported_with_the_reason() -> None:
    broken = Binding("rsmi", "pyrsmi", "amd", "1.1", None, "KeyError: 'ROCM_PATH'")
    assert "KeyError" in software.gpus([broken], {"amd": False})[0].text
    assert software.gpus([broken], {"amd": False})[0].level is Level.OK
    assert software.gpus([broken], {"amd": True})[0].level is Level.WARN
    blind = Binding("nvml", "nvidia-ml-py", "nvidia", "12.0", 0)
    assert software.gpus([blind], {"nvidia": True})[0].level is Level.WARN


def test_findings_fit_100_columns_and_are_summed_up() -> None:
    lines = findings_text([ok("a", "x"), warn("long name", "word " * 40, "do " * 50), fail("c", "y", "z")]).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[0] == "OK    a          x"
    assert lines[-1] == "1 OK, 1 WARN, 1 FAIL"
    assert any(line.strip() == "-> z" for line in lines)
