"""cached(model): who shares an output with whom, and what becomes of the model itself."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tensord
from tensord.client.transformers import EncoderTally, cached, tally, uncached
from tensord.client.transformers.outputs import CallItems, NotSplittable
from tensord.errors import UsageError
from tensord.ipc.messages import control as messages

from ..daemon_process import PATIENCE_S, Daemon
from ..processes import Child, Stage
from .conftest import patient
from .vision_models import FAMILIES, Family, clip, encoded, image_features, llava, on_entry, pixels, same

Meeting = Callable[..., tuple[list[Any], list[Any]]]

# ---- names


def test_a_namespace_keeps_tenants_apart_and_can_be_invalidated(client: tensord.Client) -> None:
    tenants = [
        tensord.Namespace(model="clip", revision="1", dtype="float32", processor="none", tenant=tenant)
        for tenant in ("a", "b")
    ]
    models = [cached(clip(), client, tenant) for tenant in tenants]
    for model in models:
        encoded(client, model, model, **pixels(1))
        assert tally(model) == EncoderTally(encoded=1)
    cached(models[0], client, client.invalidate(tenants[0]))
    encoded(client, models[0], models[0], **pixels(1))
    models[1](**pixels(1))
    assert [tally(model) for model in models] == [EncoderTally(encoded=1), EncoderTally(found=1, encoded=1)]


# ---- entries


@pytest.mark.parametrize("tree", [[], ["rows"], ["output", "Nobody", {}], ["rows", torch.zeros(3, 1)], 7])
def test_an_entry_of_another_form_under_a_key_is_not_taken_for_an_output(
    daemon: Daemon, client: tensord.Client, tree: Any
) -> None:
    plain, model = clip(), cached(clip(), client)
    encoded(client, model, model, **pixels(1))
    (row,) = daemon.ask(partial(messages.EntriesQuery, count=2))["entries"]
    client.evict(key := bytes.fromhex(row["key"]))
    client.put(key, tree, wait=True)
    assert same(model(**pixels(1)), plain(**pixels(1)))


# ---- other processes


@pytest.fixture
def meeting(
    daemon: Daemon, client: tensord.Client, other_client: tensord.Client, monkeypatch: pytest.MonkeyPatch
) -> Meeting:
    """Two models and what each returned or raised. The second one is called while the first one encodes, and waits for
    `waiting` items of it."""

    def met(waiting: int, *inputs: tuple[int, ...], error: Exception | None = None) -> tuple[list[Any], list[Any]]:
        family = FAMILIES["clip tower"]
        models = [cached(family.make(), each) for each in (client, other_client)]
        begun, go = threading.Event(), threading.Event()

        def pause(_: object) -> None:
            begun.set()
            assert go.wait(60)
            if error is not None:
                raise error

        on_entry(monkeypatch, family, models[0], pause)
        outputs: list[Any] = [None, None]

        @torch.no_grad()
        def run(number: int) -> None:
            try:
                outputs[number] = family.call(models[number], family.inputs(*inputs[number]))
            except KeyError as raised:
                outputs[number] = raised

        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        threads[0].start()
        assert begun.wait(60)
        threads[1].start()
        daemon.until(lambda status: status["store"]["claims_waiting"] == waiting, "the other one waits")
        own = len({*inputs[1]} - {*inputs[0]})
        daemon.until(lambda status: status["store"]["entries"] == own, "the other one has encoded what is its own")
        go.set()
        for thread in threads:
            thread.join(60)
        return models, outputs

    return met


def test_two_callers_with_the_same_input_encode_once(meeting: Meeting) -> None:
    models, outputs = meeting(2, (1, 2), (3, 2, 1))
    assert [tally(model) for model in models] == [EncoderTally(encoded=2), EncoderTally(encoded=1, waited=2)]
    assert same(outputs[1].last_hidden_state[[2, 1]], outputs[0].last_hidden_state)


def test_a_waiting_caller_encodes_when_the_other_one_fails(meeting: Meeting) -> None:
    error = KeyError("the encoder")
    models, outputs = meeting(1, (1,), (1,), error=error)
    assert outputs[0] is error
    assert tally(models[1]) == EncoderTally(encoded=1)


def test_a_waiting_caller_whose_output_cannot_be_split_returns_it(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise NotSplittable("rows of nobody")

    monkeypatch.setattr(CallItems, "split", refused)
    models, outputs = meeting(1, (1,), (1,), error=KeyError("the encoder"))
    assert len(outputs[1].last_hidden_state) == 1
    assert tally(models[1]) == EncoderTally(passed=1)


def encoding(stage: Stage, socket: Path) -> None:
    patient(pytest.MonkeyPatch())
    with tensord.Client(socket, timeout_s=PATIENCE_S) as client, torch.no_grad():
        client.wait_connected(PATIENCE_S)
        torch.set_num_threads(stage.hear())
        model = cached(llava(), client)
        output = encoded(client, model, image_features, model, pixels(1))
        stage.tell((tally(model).encoded, output.pooler_output[0].numpy()))


def test_two_processes_share(daemon: Daemon, client: tensord.Client) -> None:
    with Child(encoding, daemon.socket) as child:
        child.tell(torch.get_num_threads())
        count, features = child.hear(4 * PATIENCE_S)  # it imports transformers first
    assert count == 1
    model = cached(llava(), client)
    assert same(image_features(model, pixels(1)).pooler_output[0], torch.from_numpy(features))
    assert tally(model) == EncoderTally(found=1)


# ---- the model itself


def test_unwrapping_leaves_the_model_as_it_was(client: tensord.Client, family: Family) -> None:
    plain, model = family.make(), family.make()
    types = [type(module) for module in model.modules()]
    assert cached(model, client) is model
    assert list(model.state_dict()) == list(plain.state_dict())
    assert repr(model) == repr(plain)
    assert all(isinstance(module, kind) for module, kind in zip(model.modules(), types, strict=True))
    assert uncached(model) is model
    assert [type(module) for module in model.modules()] == types
    assert "_tensord" not in {name for module in model.modules() for name in vars(module)}
    assert same(family.call(model, family.inputs(1)), family.call(plain, family.inputs(1)))
    assert client.status()["store"]["entries"] == 0
    assert uncached(model) is model


def test_copies_and_pickles_are_of_the_plain_model(client: tensord.Client, tmp_path: Path) -> None:
    model = cached(llava(), client)
    encoded(client, model, image_features, model, pixels(1))
    made = copy.deepcopy(model)
    assert type(made.model) is transformers.LlavaModel
    assert tally(made) == EncoderTally()
    made.model.vision_tower.embeddings.patch_embedding.weight.zero_()
    assert not same(image_features(made, pixels(1)), image_features(model, pixels(1)))
    tower = cached(clip(), client)
    again = pickle.loads(pickle.dumps(tower))
    assert type(again) is transformers.CLIPVisionModel
    assert same(again(**pixels(1)), tower(**pixels(1)))
    assert tally(again) == EncoderTally()
    model.save_pretrained(tmp_path)
    loaded: Any = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path)
    assert same(image_features(loaded.eval(), pixels(1)), image_features(model, pixels(1)))


def test_an_unsupported_model_is_an_error_with_the_reason(client: tensord.Client) -> None:
    with pytest.raises(UsageError, match=r"Linear has no supported encoder \(.*LlavaModel"):
        cached(torch.nn.Linear(1, 1), client)
    with pytest.raises(UsageError, match="model is a str"):
        cached("openai/clip", client)
    hooked = clip()
    hooked.forward = hooked.forward
    with pytest.raises(UsageError, match="replaced in this instance"):
        cached(hooked, client)
