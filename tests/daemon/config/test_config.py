from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import msgspec
import pytest

from tensord.daemon.config.config import SETTINGS, Config
from tensord.daemon.config.limits import wire_limits
from tensord.daemon.config.sections import LimitsSection
from tensord.daemon.config.settings import flag_of, variable_of
from tensord.daemon.config.usage import descriptions
from tensord.daemon.replacement import POLICIES
from tensord.errors import BadConfiguration

GIB = 1 << 30
NOWHERE = {"XDG_CONFIG_HOME": "/nowhere"}


def load(*argv: str, environ: dict[str, str] | None = None, uid: int = 1000, available_bytes: int = 64 * GIB) -> Config:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: uid)
        patch.setattr("tensord.shm.ring.cgroups.available_bytes", lambda: available_bytes)
        return Config.load(argv, {**NOWHERE, **(environ or {})})


def refused(*argv: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(BadConfiguration) as caught:
        load(*argv, environ=environ)
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tensord.toml"


def test_flags_win_over_variables_over_the_file_over_defaults(file: Path) -> None:
    file.write_text('max_entries = 100\npolicy = "hazard"\nmax_tokens = 7\n[limits]\nclients_max = 3')
    config = load(
        "--config", str(file), "--max-entries", "300",
        environ={"TENSORD_MAX_ENTRIES": "200", "TENSORD_POLICY": "lru"},
    )  # fmt: skip
    assert (config.max_entries, config.policy) == (300, "lru")
    assert (config.max_tokens, config.limits.clients_max) == (7, 3)
    assert config.limits.claim_s == LimitsSection().claim_s
    assert {row["key"]: row["source"] for row in config.explain()} == config.sources
    assert config.sources["max_entries"] == "flag --max-entries"
    assert config.sources["policy"] == "env TENSORD_POLICY"
    assert config.sources["limits.clients_max"] == f"file {file}"
    assert config.sources["limits.claim_s"] == "default"


def test_every_setting_can_be_written_as_it_is_shown() -> None:
    config = load()
    shown = {row["key"]: row["value"] for row in config.explain()}
    again = load(environ={variable_of(key): value for key, value in shown.items()})
    flagged = load(*(f"{flag_of(key)}={value}" for key, value in shown.items()))
    assert again == flagged == config
    assert all(source.startswith("env ") for source in again.sources.values())


def test_every_setting_has_a_bound_or_a_closed_set_of_values() -> None:
    paths = {"socket", "status_socket", "gauges.file"}
    own_bounds = {"device.baseline", "neighbours.servers", "remote.url"}
    unbounded = {"instance", "socket_group", "http", "metrics.listen", *own_bounds, *paths}
    described = descriptions()
    for key, said in SETTINGS.items():
        closed = said.kind.wants.startswith(("one of", "true or false"))
        assert closed or key in unbounded or (said.low is not None and said.high is not None), key
        assert described[key], key
        assert (said.default is dataclasses.MISSING) == bool(said.derived), key


def test_switches() -> None:
    assert load("--drop").drop and not load("--drop", "--no-drop").drop
    assert not load("--memory-prefault=off").memory.prefault and load(environ={"TENSORD_DROP": "yes"}).drop


def test_a_file_has_numbers_texts_and_settings_that_are_none(file: Path) -> None:
    file.write_text('ring_bytes = 1048576\ndefault_ttl_s = 1.5\nsocket_mode = 0o600\ndrop = true\nmax_bytes = "none"')
    config = load("--config", str(file))
    assert (config.ring_bytes, config.default_ttl_s, config.max_bytes) == (1 << 20, 1.5, None)
    assert (config.socket_mode, config.drop) == (0o600, True)
    assert load("--config", str(file), "--default-ttl-s", "none").default_ttl_s is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--ring-byte", "1"], "unknown flag '--ring-byte'; did you mean '--ring-bytes'?"),
        (["--clients-max", "1"], "did you mean '--limits-clients-max'?"),
        (["--nosuch", "1"], "unknown flag '--nosuch'; `tensord --help` lists all of them"),
        (["--max-entries"], "--max-entries lacks its value: it must be a whole number"),
        (["--max-entries", "--drop"], "--max-entries lacks its value"),
        (["4GiB"], "unexpected argument '4GiB'"),
        (["--remote-write", "false"], "--remote-write is a switch: write it alone, or --no-remote-write"),
        (["--max-entries", "many"], "max_entries = 'many' (flag --max-entries): must be a whole"),
        (["--max-entries", "3"], "at least 16 and at most 268435456"),
        (["--ring-bytes", "4QiB"], "must be a size in bytes such as 4GiB"),
        (["--ring-bytes", "-1"], "must be a size in bytes"),
        (["--ring-bytes", "none"], "must be a size in bytes"),
        (["--default-ttl-s", "0"], "at least 50ms and at most 3650d, or none"),
        (["--default-ttl-s", "10x"], "must be a duration such as 10m"),
        (["--quotas-limits-share-max", "nan"], "must be a share"),
        (["--quotas-limits-share-max", "150%"], "at most 1"),
        (["--pressure-normal", "0.9"], "[pressure] normal = 0.9 and pressure = 0.85 with a hysteresis of 0.02: each"),
        (["--pressure-emergency", "0.94"], "must be above the one before by more than the hysteresis, and at most 1"),
        (["--policy", "belady"], f"policy = 'belady' (flag --policy): must be one of {', '.join(POLICIES)}"),
        (["--socket-mode", "0999"], "must be an octal file mode such as 0660"),
        (["--socket-mode", "0060"], "at least 0600 and at most 0777"),
        (["--drop=perhaps"], "must be true or false"),
        (["--instance", "../x"], "must be a name of 1 to 32 of a-z"),
        (["--log-level", "loud"], "must be one of info, warning, error"),
        (["--socket", "here.sock"], "socket = here.sock (flag --socket): must be an absolute path"),
        (["--gauges-file", "here"], "gauges.file = here (flag --gauges-file): must be an absolute path"),
        (["--socket", "/" + "x" * 107], "the path has 108 bytes; a socket's path may have at most 107"),
        (["--status-socket", "/s", "--socket", "/s"], "must differ from socket = /s"),
        (["--status-socket", "/s", "--http", "/s"], "http = /s (flag --http): must differ from status_socket"),
        (["--http=/" + 199 * "x"], "the path has 200 bytes; a socket's path may have at most"),
        (
            ["--limits-claim-s", "1h"],
            "limits.claim_s = 1h (flag --limits-claim-s): must be at most limits.claim_s_max = 2m",
        ),
        (
            ["--limits-object-bytes-max", "2GiB", "--ring-bytes", "1GiB"],
            "--limits-object-bytes-max): must be at most ring_bytes = 1GiB (flag --ring-bytes)",
        ),
        (
            ["--pressure-normal", "0.02", "--pressure-hysteresis", "0.03"],
            "; given: pressure.normal = 0.02 (flag --pressure-normal), pressure.hysteresis = 0.03 (flag --pressure-hy",
        ),
    ],
)
def test_a_refused_flag_says_what_is_allowed(given: list[str], says: str) -> None:
    assert says in refused(*given)


def test_an_unknown_variable_as_kubernetes_and_clients_set_is_ignored_and_named_with_the_nearest_known_one() -> None:
    unknown = ("TENSORD_RINGBYTES", "TENSORD_PORT", "TENSORD_PORT_9477_TCP_ADDR", "TENSORD_VLLM_PROCESSOR_CACHE")
    environ = dict.fromkeys(unknown, "tcp://10.0.0.1:9477")
    config = load(environ={**environ, "TENSORD_POLICY": "lru", "TENSORD_DROP": "", "TENSORD_X": ""})
    assert config.policy == "lru"
    assert config.ignored[0] == "unknown environment variable 'TENSORD_RINGBYTES'; did you mean 'TENSORD_RING_BYTES'?"
    assert [text.split("'")[1] for text in config.ignored] == list(unknown)
    assert config.reloaded(load()).config.ignored == config.ignored


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ring_byte = 1", "unknown key 'ring_byte'; did you mean 'ring_bytes'?"),
        ("[limits]\nclient_max = 1", "unknown key 'limits.client_max'; did you mean 'limits.cl"),
        ("clients_max = 1", "unknown key 'clients_max'; did you mean 'limits.clients_max'?"),
        ("[limit]\nclients_max = 1", "unknown key 'limit'; did you mean 'limits'?"),
        ("[quotas]\nlanes_share_max = 1", "'quotas.lanes_share_max'; did you mean 'quotas.limits_share_max'?"),
        ("[device]\ndevices_max = 1", "unknown key 'device.devices_max'; `tensord --help` lists all of them"),
        ("limits = 5", "limits = 5: it is a table, written [limits]"),
        ("ring_bytes = true", "ring_bytes = True (file "),
        ("max_entries = 100.5", "max_entries = 100.5 (file "),
        ("max_entries = {}", "max_entries = {} (file "),
        ("drop = 1.5", "must be true or false"),
        ("socket = 5", "must be an absolute path"),
        ('socket_group = ""', "must be text, or none"),
        ("default_ttl_s = inf", "at most 3650d"),
        ("default_ttl_s = true", "must be a duration"),
        ("socket_mode = 660", "at least 0600 and at most 0777"),  # decimal: 01224
        ("a = ", "is not valid TOML"),
        ("\xff", "is not valid TOML"),
    ],
)
def test_a_refused_file_is_named_with_the_key(file: Path, text: str, says: str) -> None:
    file.write_text(text, "latin-1")
    said = refused("--config", str(file))
    assert says in said
    assert str(file) in said


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    assert f"{missing} cannot be read: No such file" in refused("--config", str(missing))
    assert "cannot be read" in refused(environ={"TENSORD_CONFIG": str(missing)})
    assert "cannot be read: Is a directory" in refused("--config", str(tmp_path))


def test_the_users_file_is_found_by_itself(tmp_path: Path) -> None:
    file = tmp_path / "tensord" / "tensord.toml"
    file.parent.mkdir()
    file.write_text("max_entries = 77")
    assert load(environ={"XDG_CONFIG_HOME": str(tmp_path)}).max_entries == 77
    (tmp_path / ".config").symlink_to(tmp_path)
    environ = {"XDG_CONFIG_HOME": "", "HOME": str(tmp_path)}
    assert load(environ=environ).max_entries == 77


@pytest.mark.parametrize(
    ("argv", "environ", "uid", "instance", "control", "status"),
    [
        ([], {}, 1000, "user-1000", "/tmp/tensord-1000/control.sock", "/tmp/tensord-1000/status.sock"),
        ([], {"XDG_RUNTIME_DIR": "/run/user/7"}, 7, "user-7", "/run/user/7/tensord/control.sock", None),
        ([], {}, 0, "system", "/run/tensord/control.sock", "/run/tensord/status.sock"),
        # A system service, whatever its uid.
        ([], {"RUNTIME_DIRECTORY": "/run/tensord"}, 990, "system", "/run/tensord/control.sock", None),
        (["--instance=b"], {}, 5, "b", "/tmp/tensord-5/b/control.sock", "/tmp/tensord-5/b/status.sock"),
        ([], {"TENSORD_SOCKET": "/a/c.sock"}, 5, "user-5", "/a/c.sock", "/a/status.sock"),
    ],
)
def test_daemons_of_users_of_the_system_and_of_several_instances_do_not_meet(
    argv: list[str], environ: dict[str, str], uid: int, instance: str, control: str, status: str | None
) -> None:
    config = load(*argv, environ=environ, uid=uid)
    assert (config.instance, str(config.socket)) == (instance, control)
    assert status is None or str(config.status_socket) == status


def test_the_ring_takes_a_quarter_of_a_small_machine_and_4_gib_of_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensord.shm.ring.segments.shm_free_bytes", lambda: 1 << 50)
    assert load(available_bytes=64 * GIB).ring_bytes == 4 * GIB
    assert load(available_bytes=2 * GIB).ring_bytes == GIB // 2
    assert load(available_bytes=1).ring_bytes == 1 << 20
    monkeypatch.setattr("tensord.shm.ring.segments.shm_free_bytes", lambda: 64 << 20)
    assert load(available_bytes=64 * GIB).ring_bytes == 32 << 20


def test_a_reload_takes_what_may_change_and_names_what_needs_a_restart(file: Path) -> None:
    file.write_text("max_entries = 100\n[log]\nlevel = 'info'")
    running = load("--config", str(file))
    file.write_text("max_entries = 200\nmax_tokens = 9\n[log]\nlevel = 'error'")
    reload = running.reloaded(load("--config", str(file)))
    assert [tuple(row.values()) for row in reload.applied] == [
        ("max_tokens", "none", "9"),
        ("log.level", "info", "error"),
    ]
    assert reload.waiting == [{"key": "max_entries", "before": "100", "after": "200"}]
    assert (reload.config.max_entries, reload.config.max_tokens) == (100, 9)
    assert reload.config.log.level == "error"
    assert reload.config.sources["max_tokens"] == f"file {file}"


def test_a_reload_that_does_not_fit_what_is_running_is_refused() -> None:
    running = load("--ring-bytes", "1GiB")
    larger = load("--ring-bytes", "4GiB", "--limits-object-bytes-max", "2GiB")
    with pytest.raises(BadConfiguration, match=r"object_bytes_max = 2GiB .* ring_bytes = 1GiB"):
        running.reloaded(larger)


def test_a_reload_of_another_password_needs_a_restart_and_shows_neither() -> None:
    running, new = (load("--remote-url", f"redis://ann:{word}@localhost:1") for word in ("first", "second"))
    reload = running.reloaded(new)
    shown = "redis://ann:***@localhost:1"
    assert reload.waiting == [{"key": "remote.url", "before": shown, "after": f"{shown} (another password)"}]
    assert reload.config.remote == running.remote


def test_a_reload_reports_no_change_of_derived_sizes() -> None:
    running = load(available_bytes=64 * GIB)
    reload = running.reloaded(load(available_bytes=2 * GIB))
    assert (reload.applied, reload.waiting) == ([], [])
    assert reload.config.ring_bytes == running.ring_bytes


def test_a_restart_is_not_refused_because_less_memory_is_free_than_when_the_ring_was_made() -> None:
    assert load("--limits-object-bytes-max", "2GiB", available_bytes=2 * GIB).limits.object_bytes_max == 2 * GIB


@pytest.mark.parametrize("pick", ["low", "high"])
def test_no_limit_can_be_set_that_a_client_would_not_believe(pick: str) -> None:
    """A Welcome out of the wire's bounds would turn every client away."""
    limits = {
        f"--{flag_of(key)[2:]}": getattr(said, pick) for key, said in SETTINGS.items() if key.startswith("limits.")
    }
    config = load(*(f"{flag}={most}" for flag, most in limits.items()), "--ring-bytes=16TiB")
    told = wire_limits(config, config.ring_bytes)
    assert msgspec.convert(msgspec.structs.asdict(told), type(told)) == told
