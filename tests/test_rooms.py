"""What a reader of the code may rely on: each class name has one definition, and one module knows of forks."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHIPPED = ("tensord", "client", "daemon", "ipc", "shm")


def test_no_class_name_is_defined_twice_in_the_shipped_packages() -> None:
    places: dict[str, set[str]] = defaultdict(set)
    for package in SHIPPED:
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].add(f"{file.resolve().relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 400, f"{len(places)} classes in {ROOT}: the packages were not found"
    assert {name: sorted(found) for name, found in places.items() if len(found) > 1} == {}


def test_every_file_that_the_source_names_with_its_room_exists() -> None:
    """A room is named from the root, or from a folder that the file lies in."""
    gone: list[str] = []
    named = 0
    for package in SHIPPED[1:]:
        for file in sorted((ROOT / package).rglob("*.py")):
            for name in re.findall(r"(?<![\w/.-])(?:[a-z_]+/)+[a-z_0-9]+\.py\b", file.read_text()):
                named += 1
                if not any((ROOT / folder / name).exists() for folder in file.relative_to(ROOT).parents):
                    gone.append(f"{file.relative_to(ROOT)}: {name}")
    assert named > 20, "no names were found"
    assert gone == []


def test_only_one_module_of_the_client_registers_fork_handlers() -> None:
    """So that their order is read in one place."""
    files = sorted((ROOT / "client").rglob("*.py"))
    assert len(files) > 100, "the client was not found"
    registering = [str(file.relative_to(ROOT)) for file in files if "register_at_fork" in file.read_text()]
    assert registering == ["client/threads/forks.py"]


def test_loggings_fork_handlers_come_before_those_of_the_client() -> None:
    """The client's may log: in a child, logging renews its locks first, whatever is imported first."""
    program = """
import os
found, register = [], os.register_at_fork
def registered(**handlers):
    found.append(next(iter(handlers.values())).__module__)
    register(**handlers)
os.register_at_fork = registered
import tensord.client.caches.visual
print(*found)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert found.index("logging") < found.index("tensord.client.threads.forks")
