"""What a reader of the code may rely on: each class name has one definition, and one module knows of forks."""

import ast
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
import tensord.client.prefix.paged
print(*found)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert (
        found.index("logging")
        < found.index("tensord.client.threads.forks")
        < found.index("tensord.client.threads.aside")
    )
