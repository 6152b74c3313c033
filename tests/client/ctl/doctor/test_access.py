from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tensord.client.ctl.doctor import access
from tensord.client.ctl.doctor.access import Caller, FileStat
from tensord.client.ctl.doctor.finding import Level
from tensord.client.ctl.leftovers import Leftover, LeftoverSegment
from tensord.errors import DaemonUnavailable, LimitReached, SocketForbidden

PATH = Path("/run/tensord/control.sock")
FOLDER = FileStat(PATH.parent, stat.S_IFDIR | 0o755, 100, 100, "tensord")
SOCKET = FileStat(PATH, stat.S_IFSOCK | 0o660, 100, 100, "tensord")
MEMBER = Caller(1000, "ann", frozenset({1000, 100}), frozenset({"ann", "tensord"}))
STRANGER = Caller(1001, "bob", frozenset({1001}), frozenset({"bob"}))


def test_members_of_the_socket_s_group_its_owner_and_root_are_let_in() -> None:
    for caller in (MEMBER, Caller(100, "tensord", frozenset()), Caller(0, "root", frozenset())):
        assert access.socket("control", PATH, SOCKET, FOLDER, caller).level is Level.OK


def test_a_user_without_access_is_shown_which_group_to_join() -> None:
    found = access.socket("control", PATH, SOCKET, FOLDER, STRANGER)
    assert found.level is Level.FAIL
    assert found.remedy.startswith("usermod -aG tensord bob")


def test_a_user_who_joined_the_group_after_login_is_asked_to_log_in_again() -> None:
    found = access.socket("control", PATH, SOCKET, FOLDER, Caller(1000, "ann", frozenset({1000}), MEMBER.groups))
    assert found.level is Level.FAIL
    assert found.remedy.startswith("log in again")


def test_joining_a_group_is_not_advised_where_the_group_has_no_access_either() -> None:
    alone = FileStat(PATH, stat.S_IFSOCK | 0o600, 100, 100, "tensord")
    roots = FileStat(PATH, stat.S_IFSOCK | 0o660, 0, 0, "root")
    assert access.socket("control", PATH, roots, FOLDER, STRANGER).remedy.startswith("socket_mode = 0660 and socket_g")
    found = access.socket("control", PATH, alone, FOLDER, STRANGER)
    assert found.level is Level.FAIL
    assert "socket_mode" in found.remedy


def test_an_owner_without_the_right_is_not_helped_by_everybody_s() -> None:
    odd = FileStat(PATH, stat.S_IFSOCK | 0o006, 1000, 100, "tensord")
    assert access.socket("status", PATH, odd, FOLDER, MEMBER).level is Level.FAIL


def test_a_socket_that_everybody_may_use_is_warned_of_where_it_can_change_things() -> None:
    public = FileStat(PATH, stat.S_IFSOCK | 0o666, 100, 100, "tensord")
    assert access.socket("control", PATH, public, FOLDER, STRANGER).level is Level.WARN
    assert access.socket("status", PATH, public, FOLDER, STRANGER).level is Level.OK


def test_a_folder_that_cannot_be_entered_or_that_everybody_may_write_to_fails() -> None:
    closed = FileStat(PATH.parent, stat.S_IFDIR | 0o700, 100, 100, "tensord")
    assert "may not enter" in access.socket("control", PATH, None, closed, STRANGER).text
    public = FileStat(PATH.parent, stat.S_IFDIR | 0o777, 100, 100, "tensord")
    assert access.socket("control", PATH, SOCKET, public, MEMBER).level is Level.FAIL
    sticky = FileStat(PATH.parent, stat.S_IFDIR | 0o1777, 100, 100, "tensord")
    assert access.socket("control", PATH, SOCKET, sticky, MEMBER).level is Level.OK


def test_a_missing_socket_fails() -> None:
    assert "/run/tensord is not there" in access.socket("control", PATH, None, None, MEMBER).text
    assert "control.sock is not there" in access.socket("control", PATH, None, FOLDER, MEMBER).text
    plain = FileStat(PATH, stat.S_IFREG | 0o660, 100, 100, "tensord")
    assert "not a socket" in access.socket("control", PATH, plain, FOLDER, MEMBER).text


def test_a_socket_that_does_not_answer_fails_with_the_reason() -> None:
    assert access.reachable("status", None).level is Level.OK
    gone = access.reachable("status", DaemonUnavailable("no daemon at /x"))
    assert (gone.level, gone.text) == (Level.FAIL, "no daemon at /x")
    assert "journalctl" in gone.remedy
    full = access.reachable("status", LimitReached("status_connections_max is 16"))
    assert full.level is Level.FAIL and full.remedy == "the daemon runs; close connections, or raise the limit"
    assert "above" in access.reachable("control", SocketForbidden("no")).remedy


@pytest.mark.parametrize(
    ("texts", "removes"),
    [
        ([], True),
        (["[Login]\n#RemoveIPC=no\n"], True),
        (["[Login]\nRemoveIPC=no\n"], False),
        (["[Login]\nRemoveIPC = off\n"], False),
        (["[Other]\nRemoveIPC=no\n"], True),
        (["[Login]\nRemoveIPC=no\n", "[Login]\nKillUserProcesses=yes\n"], False),
        (["[Login]\nRemoveIPC=no\n", "[Login]\nRemoveIPC=yes\n"], True),
        (["[Login]\nRemoveIPC=no\nRemoveIPC=yes\n"], True),
        (["[Login]\nRemoveIPC=no\n", "no section = %(here)s\n"], False),
    ],
)
def test_logind_s_last_word_counts_and_without_one_it_deletes(texts: list[str], removes: bool) -> None:
    assert access.removes_ipc(texts) is removes


def test_only_a_user_s_own_daemon_loses_its_memory_at_logout() -> None:
    usual = {"uid": 1000, "system_uid_max": 999, "has_logind": True, "lingers": False, "removes": True}
    assert access.logout(**usual).level is Level.WARN  # type: ignore[arg-type]
    for changed in ({"uid": 999}, {"uid": 0}, {"has_logind": False}, {"lingers": True}, {"removes": False}):
        assert access.logout(**{**usual, **changed}).level is Level.OK  # type: ignore[arg-type]


def test_memory_that_no_daemon_serves_is_named_with_its_remedy() -> None:
    def left(instance: str, served: bool | None) -> Leftover:
        return Leftover(instance, (LeftoverSegment(f"/tensord.{instance}.ring", 3 << 20, 7),), served)

    (none,) = access.leftover([left("running", True)], None)
    assert none.level is Level.OK
    (mine,) = access.leftover([left("dead", False), left("running", True)], None)
    assert mine.level is Level.WARN
    assert "3.00 MiB" in mine.text
    assert "tensorctl purge --instance dead" in mine.remedy
    (unknown,) = access.leftover([left("theirs", None)], None)
    assert unknown.level is Level.OK
    assert "only that user" in unknown.text
    (served,) = access.leftover([left("theirs", None)], "theirs")
    assert "no shared memory without" in served.text


def test_files_of_other_users_under_an_instances_names_are_reported_though_a_daemon_serves_it() -> None:
    ring, lane = LeftoverSegment("/tensord.mine.ring", 3 << 20, 7), LeftoverSegment("/tensord.mine.lane.1", 4096, 8)
    (found,) = access.leftover([Leftover("mine", (ring, lane), True)], "mine")
    assert found.level is Level.WARN
    assert "tensord.mine.lane.1 (uid 8)" in found.text and "tensord.mine.ring" not in found.text
    assert "/dev/shm" in found.remedy
