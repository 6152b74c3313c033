"""Every benchmark and every example is run by `make smoke`, and a failure is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import smoke
from smoke import COMMANDS, ROOT, Command

NO_COMMANDS = {"benchmarks/smoke.py"}


def test_every_script_is_among_the_commands() -> None:
    scripts = {
        str(path.relative_to(ROOT))
        for folder in ("benchmarks", "examples")
        for path in (ROOT / folder).glob("*.py")
        if 'if __name__ == "__main__":' in path.read_text()
    }
    assert scripts - NO_COMMANDS == {command.script for command in COMMANDS}


def script(folder: Path, text: str) -> Command:
    (folder / "script.py").write_text(text)
    # An absolute path takes the place of the checkout's.
    return Command(str(folder / "script.py"))


def test_a_command_that_fails_is_shown_with_its_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke.main([], (script(tmp_path, "print('as far as here'); raise ValueError('and no further')"),)) == 1
    told = capsys.readouterr()
    assert "FAILED" in told.out
    assert "as far as here" in told.err and "ValueError: and no further" in told.err
