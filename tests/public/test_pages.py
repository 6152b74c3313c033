"""Every code block of README.md and docs/ runs as printed, or is named with the reason why it does not."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from socket import AF_UNIX, SOCK_STREAM
from socket import socket as socket_of
from typing import Any
from urllib.parse import urlsplit

import pytest

import tensord
from tensord.client.ctl.app import cli
from tensord.daemon.config.usage import help_text
from tensord.ipc import places

from ..daemon_process import PATIENCE_S, Daemon
from .pages import ELSEWHERE, GPU, PAGES, ROOT, Block, blocks, commands, sees_a_gpu

BLOCKS = blocks()
PYTHON = {
    name: [each for each in BLOCKS if (each.page, each.language) == (name, "python")]
    for name in (str(page.relative_to(ROOT)) for page in PAGES)
}
COMMANDS = [command for block in BLOCKS if block.language not in ("python", "text") for command in commands(block)]

MISTAKES = {"statsu", "--ring-byte"}
"""What docs/operating.md shows of mistakes; tests/integration/test_arguments.py makes them."""


def is_run(block: Block) -> bool:
    """Whether it is run here and now."""
    return block.elsewhere is None or (block.elsewhere == GPU and sees_a_gpu())


@pytest.fixture
def socket(shared: Daemon, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of a daemon that has nothing, which is found as users' programs find theirs."""
    with tensord.Client(shared.socket) as client:
        client.clear()
    monkeypatch.setenv("TENSORD_SOCKET", str(shared.socket))
    return shared.socket


def run(page: str) -> dict[str, Any]:
    """Runs a page's blocks of Python; returns their names."""
    names: dict[str, Any] = {"__name__": page}
    for block in filter(is_run, PYTHON[page]):
        block.run(names)
    return names


def end(names: dict[str, Any]) -> None:
    """Ends the clients that the blocks of a page began."""
    for client in [found for found in names.values() if isinstance(found, tensord.Client)]:
        client.close()


@pytest.mark.parametrize("page", [page for page, found in PYTHON.items() if any(map(is_run, found))])
def test_the_python_of_a_page_runs_as_printed_with_an_empty_ring_and_a_full_one(page: str, socket: Path) -> None:
    for _ in ("misses", "hits"):
        names = run(page)
        end(names)


def test_every_block_that_is_not_python_is_named_with_where_it_is_run() -> None:
    assert {block.language for block in BLOCKS} <= {"", "python", "text"}
    assert [block for block in BLOCKS if block.language == "" and block.elsewhere is None] == []


@pytest.mark.parametrize(("page", "words"), list(ELSEWHERE), ids=str)
def test_a_block_that_is_named_is_one_of_its_page(page: str, words: str) -> None:
    assert [words in block.text for block in BLOCKS if block.page == page].count(True) == 1


def test_the_extras_that_pip_is_asked_for_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    install = re.compile(r"^pip install ['\"]?(?:tensord|\.)\[(\w+)\]")
    asked = [found[1] for command in COMMANDS if (found := install.match(command))]
    assert asked
    assert set(asked) <= set(extras)


def test_the_targets_that_make_is_asked_for_exist() -> None:
    words = [word for command in COMMANDS if command.startswith("make ") for word in shlex.split(command)[1:]]
    in_ci = re.findall(r"^make ([^&\n]*)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert words
    assert in_ci
    words += [word for line in in_ci for word in line.split()]
    subprocess.run(["make", "--dry-run", *words], cwd=ROOT, stdout=subprocess.DEVNULL, check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_flags_that_sentences_name_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for program, words in re.findall(r"`(tensorctl|tensord) ([^`]*)`", text):
        wanted = set(re.findall(r"(?<!\S)--?[a-z][\w-]*", words)) - MISTAKES - {"-h", "--help", "--version"}
        if program == "tensord":
            assert all(f"  {flag} " in help_text() or f"  {flag}," in help_text() for flag in wanted), words
            continue
        known = {option for each in cli.params for option in each.opts}
        named = [word for word in words.split() if word in cli.commands]
        if named:
            known |= {option for each in cli.commands[named[0]].params for option in each.opts}
        assert wanted <= known, words
        assert named or MISTAKES.intersection(words.split()) or words.startswith("-"), words


@pytest.mark.parametrize("command", sorted({each for each in COMMANDS if re.match(r"tensord\b", each)}))
def test_the_daemon_takes_the_flags_that_it_is_given(command: str, tmp_path: Path) -> None:
    program, *flags = shlex.split(command.removesuffix("&"))
    assert program == "tensord"
    checked = [sys.executable, "-m", "tensord.daemon", *flags, "--check-config"]
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    subprocess.run(checked, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize(("page", "answer"), [("/metrics", b"tensord_info{"), ("/readyz", b"ready\n")])
def test_the_curl_commands_of_the_docs_find_their_pages(shared: Daemon, page: str, answer: bytes) -> None:
    (words,) = (shlex.split(command) for command in COMMANDS if command.startswith("curl ") and command.endswith(page))
    path, url = words[words.index("--unix-socket") + 1], urlsplit(words[-1])
    assert Path(path) == places.SYSTEM_FOLDER / places.METRICS_NAME
    with socket_of(AF_UNIX, SOCK_STREAM) as asking:
        asking.settimeout(PATIENCE_S)
        asking.connect(str(shared.socket.with_name(places.METRICS_NAME)))
        asking.sendall(f"GET {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())
        answered = asking.makefile("rb").read()
    assert answered.startswith(b"HTTP/1.1 200 ")
    assert answer in answered
