"""Checks what would be released: `make release-check` builds the sdist and the wheel, and uses both as a user does.

    python ops/release_check.py dist

1. The version: CHANGELOG.md begins with it, and if git has a tag of it, the tag is this commit.
2. sdist and wheel are built into the folder given; `twine check --strict` and `check-wheel-contents` accept them.
3. The wheel, and then the sdist, is installed into a new virtual environment, without this checkout.
4. There both programs say the version, and the program of README.md runs twice with a daemon of this environment: as a
   miss, and as a hit.

Owns: the order of the checks, and the environments, which end with it. Exit status 1, and the reason, if something is
wrong.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
INSTALL_S: Final = 900.0
COMMAND_S: Final = 120.0
START_S: Final = 60.0
PIP: Final = ("-m", "pip", "--disable-pip-version-check", "--no-input", "-q", "install")
WAIT: Final = "import sys, tensord; sys.exit(not tensord.Client().wait_connected(float(sys.argv[1])))"


class Wrong(Exception):
    """What keeps the release back."""


def run(*words: str | Path, cwd: Path, within_s: float = COMMAND_S, environ: Mapping[str, str] | None = None) -> str:
    """What a command prints.

    Raises:
        Wrong: it failed, or did not end in `within_s` seconds.
    """
    command = " ".join(str(word) for word in words)
    try:
        done = subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, timeout=within_s)
    except subprocess.TimeoutExpired:
        raise Wrong(f"{command}: not done after {within_s:g} s") from None
    if done.returncode:
        raise Wrong(f"{command}: exit status {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def version() -> str:
    """The version of the checkout, from its one owner.

    Raises:
        Wrong: CHANGELOG.md does not begin with it, or a tag of it is another commit.
    """
    (found,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "tensord" / "__init__.py").read_text(), re.MULTILINE)
    heading = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    if heading != found:
        raise Wrong(
            f"CHANGELOG.md begins with {heading!r}, and tensord/__init__.py has {found!r}: give both one version"
        )
    if (ROOT / ".git").exists() and run("git", "tag", "--list", f"v{found}", cwd=ROOT).strip():
        tagged, here = (run("git", "rev-parse", f"{name}^{{commit}}", cwd=ROOT) for name in (f"v{found}", "HEAD"))
        if tagged != here:
            raise Wrong(f"v{found} is tagged at {tagged[:12]}, and this is {here[:12]}: raise the version")
    return str(found)


def built(version: str, folder: Path) -> tuple[Path, Path]:
    """The wheel and the sdist, checked. Those of a former run in `folder` are replaced."""
    for former in (*folder.glob("*.whl"), *folder.glob("*.tar.gz")):
        former.unlink()
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT, within_s=INSTALL_S)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    for archive in (wheel, sdist):
        if not archive.name.startswith(f"tensord-{version}"):
            raise Wrong(f"{archive.name} is not of version {version}")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=folder)
    # W002: a unit of the host and one of a user may be equal.
    run(sys.executable, "-m", "check_wheel_contents", "--toplevel", "tensord", "--ignore", "W002", wheel, cwd=folder)
    return wheel, sdist


def installed(archive: Path, folder: Path) -> Path:
    """The programs' folder of a new environment in `folder` that has only the archive and what it needs."""
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    constraints = ROOT / "constraints.txt"
    run(folder / "bin" / "python", *PIP, "-c", constraints, archive, cwd=folder.parent, within_s=INSTALL_S)
    return folder / "bin"


def program() -> str:
    """The program of README.md."""
    (found,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return str(found)


@contextmanager
def daemon(programs: Path, folder: Path) -> Iterator[dict[str, str]]:
    """A daemon with sockets in `folder`, an instance of its own and a small ring. Gives the environment of its clients.

    Raises:
        Wrong: no client can attach to it.
    """
    environ = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "TENSORD_SOCKET": str(folder / "control.sock"),
        "TENSORD_STATUS_SOCKET": str(folder / "status.sock"),
        "TENSORD_INSTANCE": f"release-{os.getpid()}",
        "TENSORD_RING_BYTES": "16MiB",
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([programs / "tensord"], cwd=folder, env=environ, stdout=log, stderr=log)
    try:
        try:
            run(programs / "python", "-c", WAIT, str(START_S), cwd=folder, within_s=2 * START_S, environ=environ)
        except Wrong as error:
            raise Wrong(f"{error}\nthe daemon's log:\n{(folder / 'log').read_text()}") from None
        yield environ
    finally:
        # Frees the ring.
        process.send_signal(signal.SIGINT)
        process.wait(COMMAND_S)


def used(programs: Path, version: str, folder: Path) -> None:
    """Runs both programs and the program of README.md."""
    for name in ("tensord", "tensorctl"):
        told = run(programs / name, "--version", cwd=folder).strip()
        if told != f"{name} {version}":
            raise Wrong(f"{name} --version says {told!r}, and not {version}")
    (folder / "program.py").write_text(program())
    with daemon(programs, folder) as environ:
        printed = [run(programs / "python", "program.py", cwd=folder, environ=environ) for _ in ("a miss", "a hit")]
        status = run(programs / "tensorctl", "status", "--json", cwd=folder, environ=environ)
    stored = json.loads(status)["store"]["puts"].get("stored", 0)
    if len(set(printed)) != 1 or stored != 1:
        raise Wrong(f"the program of README.md ran twice, printed {printed}, and stored {stored} entries, not 1")


def main() -> int:
    """Checks the release, and says what was checked."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        found = version()
        archives = built(found, folder)
        print(f"built and checked: {', '.join(archive.name for archive in archives)}", flush=True)
        for archive in archives:
            with tempfile.TemporaryDirectory(prefix="tensord-") as place:
                programs = installed(archive, Path(place) / "environment")
                used(programs, found, Path(place))
            print(f"installed and used in a new environment: {archive.name}", flush=True)
    except Wrong as error:
        print(f"release-check: {error}", file=sys.stderr)
        return 1
    print(f"tensord {found} can be released: tag it v{found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
