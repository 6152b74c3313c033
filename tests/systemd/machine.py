"""A machine with a real systemd for tests: private namespaces on this host, started in a fraction of a second. What a
test installs there stands in an overlay of the host's file system and goes with the machine. The network is the host's.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final, Self

from ..daemon_process import until

CHECKOUT: Final = Path(__file__).parents[2]
BOOT: Final = Path(__file__).with_name("boot.sh")
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
UNIT_PATH: Final = "/etc/systemd/system:/run/units:/usr/lib/systemd/system"
# No measurement: how long anything may take before a test gives up.
PATIENCE_S: Final = 60.0
_numbers = count()

_TARGETS: Final = ("basic", "sysinit", "sockets", "paths", "timers", "slices", "shutdown", "multi-user", "exit")
_JOURNALD: Final = ("journald.service", "journald.socket", "journald-dev-log.socket")
_TEST_TARGET: Final = """\
[Unit]
Description=the machine is up
Wants=systemd-journald.service systemd-journald.socket basic.target
AllowIsolate=yes
"""


def missing() -> str:
    """Why no machine can be booted here, or an empty string."""
    if os.geteuid() != 0:
        return "needs root, to make namespaces"
    for program in ("unshare", "nsenter", "pivot_root", "/lib/systemd/systemd", "/usr/bin/python3", "runuser"):
        if shutil.which(program) is None:
            return f"needs {program}"
    return "" if _cgroup2() is not None else "needs a cgroup v2 file system"


class Machine:
    """Use it in a `with`. `folder` is a folder for this machine alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._console = folder / "console.log"
        self._cgroup: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._one = 0

    def __enter__(self) -> Self:
        units = self._folder / "units"
        units.mkdir()
        for name in _TARGETS:
            (units / f"{name}.target").write_text(f"[Unit]\nDescription={name}\n")
        (units / "test.target").write_text(_TEST_TARGET)
        for name in ("exit.service", *_JOURNALD):
            shutil.copy(f"/lib/systemd/system/systemd-{name}", units)
        found = _cgroup2()
        assert found is not None, "missing() says why no machine can be booted"
        self._cgroup = found / f"tensord-test-{os.getpid()}-{next(_numbers)}"
        self._cgroup.mkdir()
        command, nothing = ["bash", *map(str, (BOOT, self._cgroup, units, CHECKOUT))], subprocess.DEVNULL
        with self._console.open("wb") as out:
            self._process = subprocess.Popen(command, stdin=nothing, stdout=out, stderr=out, start_new_session=True)
        try:
            self._wait_for_systemd()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        process, cgroup = self._process, self._cgroup
        assert process is not None and cgroup is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

        def gone() -> bool:
            # The cgroup is empty once the kernel has ended every process of the namespace.
            with suppress(OSError):
                for path, *_names in os.walk(cgroup, topdown=False):
                    os.rmdir(path)
            return not cgroup.exists()

        until(gone, f"the end of {cgroup}", PATIENCE_S)

    def command(self, *command: str, user: str = "") -> list[str]:
        """The command line that runs `command` within the machine, as root or as `user`."""
        # pip finds its packages where the host does. The rest of this process's environment stays here.
        environ = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("PIP_")]
        environ += [f"PATH={_PATH}", "LC_ALL=C.UTF-8", f"SYSTEMD_UNIT_PATH={UNIT_PATH}", "SYSTEMD_PAGER="]
        enter = ["nsenter", "-t", str(self._one), "--all", "env", "-i", *environ]
        return [*enter, *(("runuser", "-u", user, "--") if user else ()), *command]

    def run(self, *command: str, user: str = "", check: bool = True, text: str = "") -> str:
        """Runs a command within the machine, and gives its standard output. `text`: its standard input. Raises
        AssertionError with all that it printed if it failed, and `check` is set."""
        done = subprocess.run(
            self.command(*command, user=user), input=text, capture_output=True, text=True, timeout=600, cwd="/"
        )
        said = f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}"
        assert not check or done.returncode == 0, f"{said}\n{self.journal()}"
        return done.stdout if check else done.stdout + done.stderr

    def property(self, name: str, unit: str = "tensord.service") -> str:
        """One of a unit's properties, as `systemctl show` gives it."""
        return self.run("systemctl", "show", "--value", "--property", name, unit).strip()

    def journal(self, *arguments: str) -> str:
        """What the journal has of the service."""
        command = self.command("journalctl", "--no-pager", "-u", "tensord.service", *arguments)
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd="/").stdout

    def until(self, name: str, *wanted: str, unit: str = "tensord.service") -> str:
        """Waits until a unit's property is one of `wanted`, and gives it."""
        deadline = time.monotonic() + PATIENCE_S
        while (now := self.property(name, unit)) not in wanted:
            assert time.monotonic() < deadline, f"{unit}: {name} is {now}, expected {wanted}\n{self.journal()}"
            time.sleep(0.02)
        return now

    def until_running(self) -> str:
        """Waits until the service runs, and gives its process id; an empty string if systemd has given it up."""
        state = self.until("SubState", "running", "failed")
        return self.property("MainPID") if state == "running" else ""

    def until_not(self, pid: str) -> None:
        """Waits until the service's process is no longer `pid`."""
        until(lambda: self.property("MainPID") != pid, f"the end of process {pid}", PATIENCE_S)

    def _wait_for_systemd(self) -> None:
        process = self._process
        assert process is not None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

        def answers() -> bool:
            assert process.poll() is None, f"systemd ended:\n{self._console.read_text()}"
            for child in children.read_text().split():
                self._one = int(child)
                there = subprocess.run(self.command("test", "-S", "/run/systemd/private"), capture_output=True, cwd="/")
                if there.returncode == 0:
                    return True
            return False

        until(answers, f"systemd to answer; its console is {self._console}", PATIENCE_S)
        self.run("systemctl", "is-system-running", "--wait", check=False)


def _cgroup2() -> Path | None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, target, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(target)
    return None
