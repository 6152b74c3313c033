"""Whatever vLLM can be told is in an engine's names, or in the list of what changes no output, with the reason.

A new version of vLLM that fails here has dropped fields or variables of vllm_fields.py, or reads
variables that nobody knows of.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm.config
import vllm.envs
from vllm.model_executor.models.registry import _VLLM_MODELS

from tensord.client.identity.vllm_fields import BESIDE_VLLM, LEFT_OUT, PROCESSOR, READS_LENGTH, TABLE, LeftOut

# They tell where files and services are.
PLACES = {"AWS_ENDPOINT_URL", "MODELSCOPE_API_TOKEN", "RUNAI_STREAMER_S3_ENDPOINT"}
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


def listed(table: LeftOut) -> list[str]:
    assert all(len(reason) > 5 for reasons in table for reason in reasons)
    return [name for reasons in table for names in reasons.values() for name in names.split()]


@pytest.mark.parametrize("name", list(TABLE))
def test_each_field_of_vllms_configuration_is_named_or_listed_with_a_reason(name: str) -> None:
    """A field that is not listed is named: `LeftOut.of` knows the listed ones only."""
    names = listed(TABLE[name])
    assert len(set(names)) == len(names), "a field has two places"
    assert set(names) <= {field.name for field in dataclasses.fields(CLASSES[name])}, "vLLM has no such fields"


def test_each_environment_variable_of_vllm_is_named_or_listed_with_a_reason() -> None:
    there = set(vllm.envs.environment_variables)
    assert LEFT_OUT.keys() | PROCESSOR <= there | PLACES | BESIDE_VLLM, "vLLM has no such variables"
    assert not BESIDE_VLLM & there, "vLLM knows them now"


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
    known = set(vllm.envs.environment_variables) | BESIDE_VLLM | PLACES
    assert read <= known, "nobody has said what these variables do"


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
