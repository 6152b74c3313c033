"""What values of settings may be, and how they are shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensord.daemon.config.config import SETTINGS, Config
from tensord.daemon.config.limits import governor_limits
from tensord.daemon.config.settings import ADDRESS, COUNT, MODE, SHARE, SIZES, SWITCH, Kind, Setting, host_and_port
from tensord.daemon.governor.forms.limits import NeighbourPlace
from tensord.errors import BadConfiguration


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        *((COUNT, "0x10"), (COUNT, ""), (SHARE, "half"), (MODE, "rw-r-----"), (SWITCH, "2")),
        *((COUNT, True), (SHARE, True), (MODE, True), (SIZES, True)),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(kind: Kind, given: object) -> None:
    with pytest.raises(BadConfiguration, match="must be"):
        Setting(kind, 1).parse("key", given, "test")


LOOPBACK_ONLY = r"must be 127\.0\.0\.1:PORT, \[::1\]:PORT or the absolute path of a Unix socket, or none"
REFUSED = {
    "metrics.listen": (r"metrics\.listen.*HOST:PORT", [
        *("", "9477", ":9477", "::1:9477", "[::1]", "[::1", "a:b", "a:70000", "a b:1", "http://a:1", "a:1/x", "a:-1"),
        "a:٣",
    ]),
    "http": (LOOPBACK_ONLY, [
        *("0.0.0.0:80", "[::]:80", "10.0.0.1:80", "localhost:80", "host.example:80", "127.0.0.1", "127.0.0.1:65536"),
        *(":80", "9478", "page.sock", "127.0.0.1:80 ", "http://127.0.0.1:80", "", "/with\nline"),
    ]),
    "device.baseline": (r"device\.baseline", [
        *("", "a=", "=1GiB", "a=1GiB, a=2GiB", "17TiB", "a=b"),
        ",".join(f"c{n}=1" for n in range(65)),
    ]),
    "neighbours.servers": (r"neighbours\.servers.*KIND=http://HOST:PORT", [
        *("", "ollama", "ollama=127.0.0.1:11434", "ollama=https://127.0.0.1:11434", "whisper=http://127.0.0.1:1"),
        *("ollama=http://user@127.0.0.1:11434", "ollama=http://127.0.0.1:11434/api", "ollama=http://127.0.0.1:99999"),
        "ollama=http://127.0.0.1:1, ollama=http://127.0.0.1:1",
        ", ".join(f"ollama=http://127.0.0.1:{port}" for port in range(1, 18)),
    ]),
}  # fmt: skip


@pytest.mark.parametrize(("key", "text"), [(key, text) for key, (_, texts) in REFUSED.items() for text in texts])
def test_a_text_of_another_form_is_refused_and_the_form_named(key: str, text: str) -> None:
    says, _ = REFUSED[key]
    with pytest.raises(BadConfiguration, match=says):
        Config.load([f"--{key.replace('.', '-')}={text}"], {})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("127.0.0.1:9477", ("127.0.0.1", 9477)),
        ("[::1]:9477", ("::1", 9477)),
        ("metrics.example:0", ("metrics.example", 0)),
    ],
)
def test_addresses(text: str, value: tuple[str, int]) -> None:
    assert host_and_port(text) == value
    assert ADDRESS.read(text) == text


def test_a_page_is_for_this_host() -> None:
    for taken in ("127.0.0.1:9478", "[::1]:0", "/run/tensord/page.sock", None):
        assert Config.load([f"--http={taken or 'none'}"], {}).http == taken


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("72GiB", (("", 72 << 30),)),
        ("0000:65:00.0=72GiB, 0000:66:00.0=1GiB", (("0000:65:00.0", 72 << 30), ("0000:66:00.0", 1 << 30))),
        ("1GiB, a=2GiB", (("", 1 << 30), ("a", 2 << 30))),
        ("none", None),
    ],
)
def test_a_baseline_is_one_size_for_all_devices_or_one_for_each(text: str, sizes: object) -> None:
    assert Config.load(["--device-baseline", text], {}).device.baseline == sizes
    setting = SETTINGS["device.baseline"]
    assert setting.parse("device.baseline", setting.show(sizes), "test") == sizes


def servers(*words: str) -> tuple[NeighbourPlace, ...]:
    return governor_limits(Config.load(["--neighbours-servers", *words], {})).neighbours


def test_servers_keep_their_order_and_have_usual_ports() -> None:
    assert governor_limits(Config.load([], {})).neighbours == servers("none") == ()
    assert servers("ollama=http://localhost, vllm=http://127.8.9.10:8001/ on 0000:65:00.0,comfyui = http://[::1]") == (
        NeighbourPlace("ollama", "localhost", 11434),
        NeighbourPlace("vllm", "127.8.9.10", 8001, "0000:65:00.0"),
        NeighbourPlace("comfyui", "::1", 8188),
    )


def test_the_file_may_have_a_list_and_what_is_shown_reads_the_same(tmp_path: Path) -> None:
    file = tmp_path / "tensord.toml"
    file.write_text('[neighbours]\nservers = ["vllm=http://[::1]:8000 on MIG-1", "ollama=http://127.0.0.1"]\n')
    config = Config.load(["--config", str(file)], {})
    shown = {row["key"]: row["value"] for row in config.explain()}["neighbours.servers"]
    assert shown == "vllm=http://[::1]:8000 on MIG-1, ollama=http://127.0.0.1:11434"
    assert servers(shown) == config.neighbours.servers


@pytest.mark.parametrize("host", ["10.0.0.7", "gpu-2.example", "0.0.0.0", "[fe80::1]", "127.0.0.1.example"])
def test_servers_beyond_loopback_need_to_be_allowed(host: str) -> None:
    with pytest.raises(BadConfiguration, match=r"is not on loopback: set neighbours\.beyond_loopback = true"):
        servers(f"ollama=http://{host}:11434")
    assert len(servers(f"ollama=http://{host}:11434", "--neighbours-beyond-loopback")) == 1


@pytest.mark.parametrize(
    "text", ["ollama=http://ann:sesame@localhost", "http://:ses/ame@[::1]:80, ollama=http://ses@me@a"]
)
def test_a_refused_server_is_named_without_its_user_and_password(text: str) -> None:
    with pytest.raises(BadConfiguration, match=r"//\*\*\*@") as refused:
        servers(text)
    assert "ses" not in str(refused.value) and "ann" not in str(refused.value)
