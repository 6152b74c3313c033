"""What a reader of the code may rely on: each class name has one definition, and messages are built in one place."""

import ast
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


def test_only_the_core_of_the_client_builds_messages() -> None:
    built: list[str] = []
    files = sorted((ROOT / "client").rglob("*.py"))
    for file in files:
        room = file.relative_to(ROOT / "client").parts[0]
        # ctl has no client: it asks over a connection of its own.
        if room in ("core", "ctl"):
            continue
        built += [
            f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node.func)}"
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("messages.")
        ]
    assert len(files) > 100, "the client was not found"
    assert built == [], "add a function to client/core/requests.py"
