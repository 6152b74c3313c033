"""A class name names one class: whoever searches for it in the shipped packages finds one definition."""

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
