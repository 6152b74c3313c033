"""What values of settings may be, and how they are shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensord.daemon.config.config import Config
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


@pytest.mark.parametrize(
    "text",
    ["", "9477", ":9477", "::1:9477", "[::1]", "[::1", "a:b", "a:70000", "a b:1", "http://a:1", "a:1/x", "a:-1", "a:٣"],
)
def test_a_text_that_is_not_an_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the caller words the complaint
        ADDRESS.read(text)


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


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ollama",
        "ollama=127.0.0.1:11434",
        "ollama=https://127.0.0.1:11434",
        "ollama=http://user@127.0.0.1:11434",
        "ollama=http://127.0.0.1:11434/api",
        "ollama=http://127.0.0.1:99999",
        "whisper=http://127.0.0.1:1",
        "ollama=http://127.0.0.1:1, ollama=http://127.0.0.1:1",
        ", ".join(f"ollama=http://127.0.0.1:{port}" for port in range(1, 18)),
    ],
)
def test_what_is_no_list_of_servers_is_refused_and_the_form_named(text: str) -> None:
    with pytest.raises(BadConfiguration, match=r"neighbours\.servers.*KIND=http://HOST:PORT"):
        servers(text)


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
