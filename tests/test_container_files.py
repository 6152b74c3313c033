"""The container files: their linters accept them, the image can be built from what its context has, and the commands in
them share entries between containers of which only the sockets' folder is shared. No container engine runs here.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tensord.ipc.quantities import read_size

from .daemon_process import PATIENCE_S, until
from .public.pages import ROOT

OPS: Final = ROOT / "ops"
NAMESPACES: Final = ("unshare", "--pid", "--ipc", "--net", "--mount", "--fork", "--kill-child")
INSIDE: Final = 'mount -t tmpfs -o "size=$1,mode=1777" tmpfs /dev/shm && mount -t proc proc /proc && shift && exec "$@"'
RING_BYTES: Final = 16 << 20


def program(name: str) -> str:
    """A linter of the test's environment."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed: the extra `test` has it")
    return found


def documents(name: str) -> list[Any]:
    yaml = pytest.importorskip("yaml", reason="the extra `test` has it")
    return list(yaml.safe_load_all((OPS / name).read_text()))


@pytest.mark.parametrize(
    ("linter", "words"),
    [
        ("hadolint", ["Dockerfile"]),
        ("check-jsonschema", ["--builtin-schema", "vendor.compose-spec", "compose.yaml"]),
        ("kubernetes-validate", ["--strict", "kubernetes.yaml"]),
    ],
)
def test_the_linter_of_each_file_has_nothing_to_say_against_it(linter: str, words: list[str]) -> None:
    done = subprocess.run([program(linter), *words], cwd=OPS, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_is_built_from_what_its_context_has(tmp_path: Path) -> None:
    """The wheel of the context, which the image installs, is the wheel of the checkout."""
    pytest.importorskip("hatchling", reason="the extra `test` has it")
    lines = (OPS / "Dockerfile.dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert "*" in lines and "constraints.txt" in kept
    for name in kept:
        source, into = ROOT / name, tmp_path / name
        into.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, into, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, into, follow_symlinks=False)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.suffix for path in (tmp_path / "dist").iterdir()] == [".whl"]


def test_dev_shm_has_room_for_the_ring_and_the_clients_and_the_container_for_dev_shm() -> None:
    compose, *_ = documents("compose.yaml")
    daemon = compose["services"]["daemon"]
    shm_bytes, memory_bytes = (docker_bytes(daemon[name]) for name in ("shm_size", "mem_limit"))
    clients = len(compose["services"]) - 1
    assert ring_bytes_of(daemon["command"]) + clients * (64 << 20) + (16 << 20) < shm_bytes < memory_bytes
    (pod,) = (each["spec"]["template"]["spec"] for each in documents("kubernetes.yaml") if each["kind"] == "DaemonSet")
    (container,) = pod["containers"]
    (shm,) = (each["emptyDir"]["sizeLimit"] for each in pod["volumes"] if "emptyDir" in each)
    limit = container["resources"]["limits"]["memory"]
    assert ring_bytes_of(container["command"]) + 4 * (64 << 20) < read_size(f"{shm}B") < read_size(f"{limit}B")


def docker_bytes(text: str) -> int:
    """The sizes of compose: powers of 1024, by one letter."""
    return read_size(f"{text[:-1]}{text[-1].upper()}iB")


def ring_bytes_of(command: list[str]) -> int:
    return read_size(command[command.index("--ring-bytes") + 1])


def small(command: list[str]) -> list[str]:
    """The daemon's command with a ring for tests, in this environment."""
    program, *words = command
    assert program == "tensord"
    words[words.index("--ring-bytes") + 1] = str(RING_BYTES)
    return [sys.executable, "-m", "tensord.daemon", *words]


@contextmanager
def contained(command: list[str], folder: Path, user: str, shm: int = 64 << 20) -> Iterator[subprocess.Popen[str]]:
    """A command in namespaces like a container's, without a network, as `user` (UID:GID), in a /dev/shm of its own."""
    uid, gid = user.split(":")
    # The tests' Python may lie where only root can read. Connecting to a socket takes more than reading.
    may_read = (
        "--inh-caps=-all,+dac_read_search",
        "--ambient-caps=+dac_read_search",
        "--bounding-set=-all,+dac_read_search",
    )
    become = ("setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--no-new-privs", *may_read)
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TENSORD_SOCKET": str(folder / "control.sock")}
    process = subprocess.Popen(
        [*NAMESPACES, "sh", "-euc", INSIDE, "sh", str(shm), *become, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            # The first process of the namespaces, whose change of user has undone --kill-child.
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for child in children:
                os.kill(int(child), signal.SIGKILL)
            if not children:
                process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the sockets, which the image makes and everybody may enter."""
    made = Path("/run") / f"tensord-test-{os.getpid()}"
    made.mkdir(mode=0o755)
    os.chown(made, 990, 990)
    yield made
    shutil.rmtree(made)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make namespaces")
def test_the_clients_of_the_compose_file_and_of_the_pod_share_what_one_of_them_computed(folder: Path) -> None:
    services = documents("compose.yaml")[0]["services"]
    image = (OPS / "Dockerfile").read_text()
    (gid,) = re.findall(r"--gid (\d+) tensord \\", image)
    (pod,) = (each["spec"] for each in documents("kubernetes.yaml") if each["kind"] == "Pod")
    assert [str(group) for group in pod["securityContext"]["supplementalGroups"]] == [gid]
    shm = docker_bytes(services["daemon"]["shm_size"])
    told = []
    with contained(small(services["daemon"]["command"]), folder, f"990:{gid}", shm) as daemon:
        until(lambda: (folder / "control.sock").is_socket() or daemon.poll() is not None, "the daemon to listen")
        for name in ("first", "second"):
            service = services[name]
            script = OPS / service["command"][1].lstrip("/")
            with contained([sys.executable, str(script)], folder, service["user"]) as client:
                assert client.stdout is not None
                told.append(client.stdout.readline())
        python, *words = pod["containers"][0]["command"]
        assert python == "python"
        with contained([sys.executable, *words], folder, f"{pod['securityContext']['runAsUser']}:{gid}") as client:
            assert client.stdout is not None
            told.append(client.stdout.read())
        stranger = [
            sys.executable,
            "-c",
            "import tensord; tensord.Client().wait_connected(5); tensord.Client().status()",
        ]
        with contained(stranger, folder, "1003:1003") as client:
            assert client.stdout is not None
            refused = client.stdout.read()
    assert "computed in" in told[0] and "read from the ring" in told[1], told
    assert told[2] == "[1, 2, 3]\n", told
    assert "SocketForbidden" in refused, refused
    assert shlex.join(services["first"]["command"]) == "python /client.py"
