"""Whatever vLLM can be told is in an engine's names, or in the list of what changes no output, with the reason.

A new version of vLLM that fails here has fields or variables that nobody has read yet: find out what they do, and give
each its place in vllm_fields.py or vllm_environment.py.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pkgutil
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm.config
import vllm.envs
from vllm.config import VllmConfig
from vllm.model_executor.models.registry import _VLLM_MODELS

from tensord.client.identity.vllm_environment import ENVIRONMENT
from tensord.client.identity.vllm_fields import READS_LENGTH, TABLE, Fields

# vLLM's own, and read around envs.py.
READ_BESIDE = {"VLLM_CUSTOM_ALLREDUCE_ALGO"}
# Classes of named fields that have no table: all of their fields are part of the name.
WHOLE = {
    "AttentionConfig",
    "AudioDummyOptions",
    "BaseDummyOptions",
    "DynamicShapesConfig",
    "HiSparseConfig",
    "ImageDummyOptions",
    "IrOpPriorityConfig",
    "KernelConfig",
    "PassConfig",
    "QuantSpec",
    "QuantizationConfigArgs",
    "VideoDummyOptions",
}
SOURCES = Path(vllm.config.__file__).parents[1]


def classes() -> dict[str, type]:
    """vLLM's configuration classes, by name."""
    found: dict[str, type] = {}
    for module in pkgutil.iter_modules(vllm.config.__path__, "vllm.config."):
        for value in vars(importlib.import_module(module.name)).values():
            if dataclasses.is_dataclass(value) and isinstance(value, type) and value.__module__ == module.name:
                found[value.__name__] = value
    return found


CLASSES = classes()


@pytest.mark.parametrize("name", list(TABLE))
def test_each_field_of_vllms_configuration_is_named_or_listed_with_a_reason(name: str) -> None:
    there = {field.name for field in dataclasses.fields(CLASSES[name])}
    assert there - TABLE[name].all == set(), "nobody has said what these fields do"
    assert TABLE[name].all - there == set(), "vLLM has no such fields"


@pytest.mark.parametrize("name", [*TABLE, "environment"])
def test_nothing_has_two_places_and_every_reason_says_something(name: str) -> None:
    table = ENVIRONMENT if name == "environment" else TABLE[name]
    places = [table.both, table.encoder.keys(), table.processor.keys(), table.neither.keys()]
    assert sum(map(len, places)) == len(table.all)
    for reasons in (table.encoder, table.processor, table.neither):
        assert all(len(reason) > 5 for reason in reasons.values())


def classes_within(annotation: Any) -> Iterator[type]:
    """The configuration classes that a field's type mentions."""
    if isinstance(annotation, type) and annotation in CLASSES.values():
        yield annotation
    for part in typing.get_args(annotation):
        yield from classes_within(part)


def reached(name: str, seen: set[str]) -> None:
    """Adds the names of all classes of which something is named, from this one on."""
    if name in seen:
        return
    seen.add(name)
    table: Fields | None = TABLE.get(name)
    hints = typing.get_type_hints(CLASSES[name])
    for field in dataclasses.fields(CLASSES[name]):
        if table is None or field.name not in table.neither:
            for kind in classes_within(hints[field.name]):
                reached(kind.__name__, seen)


def test_every_class_that_is_reached_is_walked_or_said_to_be_named_whole() -> None:
    seen: set[str] = set()
    reached(VllmConfig.__name__, seen)
    assert seen - TABLE.keys() - WHOLE == set(), "nobody has said whether all of these classes' fields count"


def test_each_environment_variable_of_vllm_is_named_or_listed_with_a_reason() -> None:
    there = set(vllm.envs.environment_variables)
    assert there - ENVIRONMENT.all == set(), "nobody has said what these variables do"
    gone = {name for name in ENVIRONMENT.all - there - READ_BESIDE if name.startswith("VLLM_")}
    assert gone == set(), "vLLM has no such variables"


def variables_read(path: Path) -> Iterator[str]:
    """Names of environment variables that a source file reads by itself."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(attr="getenv" | "get"), args=[ast.Constant(value=str(name)), *_]):
                if "getenv" in ast.unparse(node.func) or "environ" in ast.unparse(node.func):
                    yield name
            case ast.Subscript(value=ast.Attribute(attr="environ"), slice=ast.Constant(value=str(name))):
                yield name


@pytest.mark.parametrize("folder", ["model_executor", "multimodal", "transformers_utils", "renderers", "tokenizers"])
def test_each_environment_variable_that_models_and_processors_read_is_named_or_listed(folder: str) -> None:
    read = {name for path in (SOURCES / folder).rglob("*.py") for name in variables_read(path)}
    assert read - ENVIRONMENT.all == set(), "nobody has said what these variables do"


def test_the_models_whose_processor_reads_the_sequences_length_are_known() -> None:
    modules = {
        path.stem
        for path in (SOURCES / "model_executor" / "models").glob("*.py")
        if re.search(r"ctx\.model_config\.max_model_len", path.read_text())
    }
    assert modules, "vLLM says it in other words now"
    of_models = {
        name for name, (module, *_) in _VLLM_MODELS.items() if module in modules or module.split(".")[-1] in modules
    }
    assert of_models <= READS_LENGTH | {"VoxtralRealtimeGeneration"}
