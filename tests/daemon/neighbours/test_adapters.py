"""The questions to neighbours that speak the documented interface, or do not: what each ends with, and when."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tensord.daemon.governor.forms.limits import NeighbourPlace
from tensord.daemon.neighbours.registry import PORTS, ask
from tensord.testing import FakeCard

from .servers import GIB, Misdeed, StandIn, StandInComfy, StandInOllama, StandInVllm, cut_off, flood, hang, instead

EVERY: list[type[StandIn]] = [StandInOllama, StandInComfy, StandInVllm]
PATIENCE_S = 30.0


@pytest.fixture
def card(tmp_path: Path) -> FakeCard:
    return FakeCard(tmp_path / "cards", "0000:65:00.0", 80 * GIB)


def asked(server: StandIn, answer_s: float = PATIENCE_S) -> tuple[str, str]:
    return ask(NeighbourPlace(server.kind, "127.0.0.1", server.port), answer_s)


def test_ollama_unloads_every_model_on_the_card_and_no_other(card: FakeCard) -> None:
    with StandInOllama(card, 9 * GIB) as server:
        assert asked(server) == ("done", "")
        assert server.card.held_bytes == 0 and list(server.models) == ["in-ram"]
        assert server.requests[1] == ("POST", "/api/generate", {"model": "llama3:8b", "keep_alive": 0, "stream": False})
        assert asked(server) == ("busy", "it has no model on a card")


def test_comfyui_is_asked_to_free_when_its_queue_is_empty_only(card: FakeCard) -> None:
    with StandInComfy(card, 9 * GIB) as server:
        server.running = 3
        assert asked(server) == ("busy", "3 prompts run or wait")
        assert server.paths == ["GET /queue"]
        server.running = 0
        assert asked(server) == ("done", "")
        assert server.paths[-1] == "POST /free"


def test_an_idle_vllm_is_put_to_sleep_once(card: FakeCard) -> None:
    with StandInVllm(card, 9 * GIB) as server:
        assert asked(server) == ("done", "")
        assert server.sleeps and server.card.held_bytes == 0
        assert asked(server) == ("busy", "it sleeps already")
        assert server.paths.count("POST /sleep?level=1") == 1


def test_a_vllm_without_the_endpoints_says_how_to_start_it(card: FakeCard) -> None:
    with StandInVllm(card, 9 * GIB, dev_mode=False) as server:
        outcome, why = asked(server)
        assert outcome == "failed" and "VLLM_SERVER_DEV_MODE=1" in why


RUNNING, WAITING, AT = "vllm:num_requests_running", "vllm:num_requests_waiting", "1764170000000"
UNKNOWN = "failed", "whether it is idle is unknown"


@pytest.mark.parametrize(
    ("metrics", "outcome", "why"),
    [
        (f'{RUNNING}{{engine="0"}} 1.0\n{WAITING}{{engine="0"}} 0.0\n', "busy", "1 request runs or waits"),
        (f'{RUNNING}{{engine="0"}} 0.0\n{WAITING}{{engine="0"}} 2.0\n', "busy", "2 requests run or wait"),
        (f'{RUNNING}{{engine="0 }}"}} 1.0 {AT}\n{WAITING}{{engine="0 }}"}} 0.0 {AT}\n', "busy", "1 request runs"),
        (f'{RUNNING}{{engine="0 }}"}} 0.0 {AT}\n{WAITING}{{engine="0 }}"}} 0.0 {AT}\n', "done", ""),
        ("other 0.0\n", *UNKNOWN),
        (f'{RUNNING}{{engine="0"}} 0.0\n', *UNKNOWN),
        (f'{WAITING}{{engine="0"}} 0.0\n', *UNKNOWN),
        (f"{RUNNING} nan\n{WAITING} 0.0\n", *UNKNOWN),
        (f"{RUNNING} -1\n{WAITING} 1\n", *UNKNOWN),
        (f'{RUNNING}{{engine="0"}} 0.0\n{RUNNING}{{engine="1"}} 0.0\n{WAITING}{{engine="0"}} 0.0\n', *UNKNOWN),
    ],
)
def test_a_vllm_is_put_to_sleep_only_if_all_its_engines_count_no_request(
    card: FakeCard, metrics: str, outcome: str, why: str
) -> None:
    """The time of a count, at its end, is not taken for the count."""
    with StandInVllm(card, 9 * GIB) as server:
        server.metrics = metrics
        told = asked(server)
        assert told[0] == outcome and why in told[1]
        assert server.sleeps == (outcome == "done")


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (cut_off, "was cut off, 7 bytes before its end"),
        (flood, "answers with more than"),
        (instead(b"\x00\x1b[2J\xff rubbish"), "BadStatusLine"),
        (instead(b"HTTP/1.1 302 Found\r\nLocation: /elsewhere"), "HTTP 302"),
        (instead(b"HTTP/1.1 500 out of\x07 luck"), "HTTP 500 out of? luck"),
    ],
    ids=["cut off", "flood", "rubbish", "redirect", "refuse"],
)
def test_whatever_a_server_answers_is_a_failure_in_one_printable_line(card: FakeCard, act: Misdeed, why: str) -> None:
    with StandInVllm(card, GIB) as server:
        server.instead = lambda handler: act(handler, server)
        outcome, said = asked(server)
        assert outcome == "failed" and why in said
        assert said.isprintable() and len(said) <= 200
        assert len(server.requests) == 1


def test_a_server_that_hangs_is_left_when_its_time_is_over(card: FakeCard) -> None:
    with StandInComfy(card, GIB) as server:
        server.instead = lambda handler: hang(handler, server)
        assert asked(server, 0.3) == ("failed", "no answer to /queue within 0.3 s")


def test_where_no_server_listens_that_is_said() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        outcome, why = ask(NeighbourPlace("ollama", *silent.getsockname()), PATIENCE_S)
    assert outcome == "failed" and "refused" in why


def test_every_kind_of_neighbour_has_a_stand_in() -> None:
    assert sorted(PORTS) == sorted(each.kind for each in EVERY)
