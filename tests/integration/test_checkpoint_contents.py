"""On a real backend, saves write exactly `checkpoint.contents`, and starts load exactly `checkpoint.load_contents`."""

import itertools
import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.checkpoint.load.locations import FileLocations
from rlhf.checkpoint.load.restoring import load_state
from rlhf.checkpoint.state.run_state import RunState
from rlhf.config.schema.checkpoint import CONTENTS
from rlhf.errors import UserError
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.ranks.rng import rng_state, seed_everything
from rlhf.storage.layout import step_dir
from tests.support.checkpoints import (
    IDENTITY,
    TINY_POLICY,
    PlainRole,
    begin_at,
    equal_bits,
    files_of,
    make_backend,
    make_checkpointer,
    make_config,
    make_driver,
    resume,
    whole_state,
    world_of_one,
)
from tests.support.refusals import facts
from tests.support.verified import verify

SUBSETS = [list(s) for n in range(1, 5) for s in itertools.combinations(CONTENTS, n)]
ALWAYS = {"manifest.json", "config.yaml", "driver_state.json"}
FILES = {
    "model": {"actor/model/index.safetensors", "actor/model/rank_00000.safetensors"},
    "optimizer": {"actor/optimizer/index.safetensors", "actor/optimizer/rank_00000.safetensors"},
    "extra": {"actor/extra/lr_scheduler.json", "rng/rank_00000.safetensors"},
    "hf_model": {
        f"actor/huggingface/{name}"
        for name in (
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        )
    },
}


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    with world_of_one(tmp_path_factory.mktemp("group")):
        yield


@pytest.fixture(scope="module")
def trained():
    return make_backend(1, train_steps=3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, trained):
    """A run with a checkpoint of all items, the state that was saved, and the RNG states at the save."""
    config = make_config(tmp_path_factory.mktemp("saved"))
    config.checkpoint.contents = list(CONTENTS)
    seed_everything(5, 0)
    random.gauss(0, 1)
    make_checkpointer(config, trained, 3).save(3)
    return config, whole_state(trained), rng_state()


@pytest.fixture(autouse=True)
def own_run(process_group, saved):
    """Reset the resume settings of the shared configuration after each test."""
    yield
    config, _, _ = saved
    config.trainer.resume_mode, config.trainer.resume_from_path = "auto", None
    config.checkpoint.load_contents = None


@pytest.mark.parametrize("contents", SUBSETS, ids="+".join)
def test_a_save_writes_exactly_what_contents_names(tmp_path, trained, contents):
    config = make_config(tmp_path)
    config.checkpoint.contents = contents
    result = make_checkpointer(config, trained, 3).save(3)
    files = files_of(result.path)
    assert files == ALWAYS.union(*(FILES[item] for item in contents))
    manifest = verify(result.path)
    assert (manifest.contents, manifest.roles) == (contents, ["actor"])
    assert set(manifest.files) == files - {"manifest.json"}
    assert manifest.total_bytes == result.total_bytes
    assert result.total_bytes == sum((result.path / name).stat().st_size for name in manifest.files)


@pytest.mark.parametrize("load", SUBSETS, ids="+".join)
def test_loading_restores_exactly_what_it_is_asked_for(saved, load):
    config, state, generators = saved
    backend = make_backend(2, train_steps=1)
    seed_everything(77, 0)
    own, own_generators = whole_state(backend), rng_state()
    checkpoint = step_dir(config.run_dir, 3)
    live = RunState({"actor": backend}, make_driver())
    load_state(FileLocations.whole(checkpoint, verify(checkpoint)), live, load, 1, Coordinator(GlooTransport()))
    assert live.driver.step == 3  # the driver state is not an item of contents: it is always restored
    expected = {
        "model": state["model"] if {"model", "hf_model"} & set(load) else own["model"],
        "optimizer": state["optimizer"] if "optimizer" in load else own["optimizer"],
        "extra": state["extra"] if "extra" in load else own["extra"],
    }
    assert equal_bits(whole_state(backend), expected)
    assert equal_bits(rng_state(), generators if "extra" in load else own_generators)


@pytest.mark.parametrize("load", SUBSETS, ids="+".join)
def test_a_start_loads_exactly_load_contents_and_requires_weights(saved, load):
    config, state, _ = saved
    begin_at(config, step_dir(config.run_dir, 3), load)
    backend = make_backend(2, train_steps=1)
    own = whole_state(backend)
    if not {"model", "hf_model"} & set(load):
        with pytest.raises(UserError, match="restores no weights"):
            make_checkpointer(config, backend).resume()
        assert equal_bits(whole_state(backend), own)
        return
    assert resume(config, backend) == 3
    after = whole_state(backend)
    assert equal_bits(after["model"], state["model"])
    for item in ("optimizer", "extra"):
        assert equal_bits(after[item], state[item] if item in load else own[item])


def test_a_restart_loads_everything_and_ignores_load_contents(saved, caplog):
    """Regression: `load_contents` once left out optimizer and schedule at each restart, so a crash changed the run."""
    config, state, generators = saved
    for load in (None, ["model"]):
        config.checkpoint.load_contents = load
        backend = make_backend(2, train_steps=1)
        seed_everything(77, 0)
        assert resume(config, backend) == 3
        assert equal_bits(whole_state(backend), state)
        assert equal_bits(rng_state(), generators)
    assert "load_contents" not in caplog.text


def test_a_changed_seed_gives_other_generators(saved):
    config, _, generators = saved
    for seed, same in ((config.trainer.seed, True), (7, False)):
        changed = make_config(config.run_dir.parents[1])
        changed.checkpoint.contents = list(CONTENTS)
        changed.trainer.seed, changed.trainer.allow_config_change = seed, True
        assert resume(changed, make_backend(2)) == 3
        assert equal_bits(rng_state(), generators) == same


def test_a_run_started_with_load_contents_restarts_from_all_of_its_own_saves(tmp_path, saved, trained, caplog):
    config = make_config(tmp_path)
    begin_at(config, step_dir(saved[0].run_dir, 3), ["model"])
    for _ in range(2):  # until its first save, the run starts from the other run's checkpoint each time
        backend = make_backend(2, train_steps=1)
        own = whole_state(backend)
        assert resume(config, backend) == 3
        assert equal_bits(whole_state(backend), own | {"model": saved[1]["model"]})
    assert "continues without its optimizer and extra, as set by checkpoint.load_contents" in caplog.text
    caplog.clear()
    make_checkpointer(config, trained, 4).save(4)
    backend = make_backend(2, train_steps=1)
    assert resume(config, backend) == 4
    assert equal_bits(whole_state(backend), whole_state(trained))
    assert "continues without" not in caplog.text


def test_a_restart_warns_of_parts_that_were_not_saved(tmp_path, trained, caplog):
    config = make_config(tmp_path)
    config.checkpoint.contents = ["model"]
    make_checkpointer(config, trained, 3).save(3)
    config.checkpoint.contents = list(CONTENTS)
    assert resume(config, make_backend(2)) == 3
    assert "continues without its optimizer and extra, which were not saved" in caplog.text


def test_training_goes_on_from_a_resume_as_if_it_had_never_stopped(saved):
    config, _, _ = saved
    resumed, undisturbed = make_backend(2, train_steps=1), make_backend(1, train_steps=3)
    make_checkpointer(config, resumed).resume()
    for backend in (resumed, undisturbed):
        for _ in range(2):
            backend.backward(backend.module(input_ids=torch.arange(12).view(2, 6)).logits.square().mean())
            backend.optimizer_step()
    assert equal_bits(whole_state(resumed), whole_state(undisturbed))


@pytest.mark.parametrize("item", CONTENTS)
def test_a_part_missing_from_the_checkpoint_is_named(tmp_path, trained, item):
    config = make_config(tmp_path)
    config.checkpoint.contents = [other for other in CONTENTS if other != item]
    make_checkpointer(config, trained, 3).save(3)
    # Also load weights that exist: a start without weights is rejected for another reason.
    load = [item] if item.endswith("model") else ["model", item]
    begin_at(config, step_dir(config.run_dir, 3), load)
    backend = make_backend(2)
    state = whole_state(backend)
    with pytest.raises(UserError) as caught:
        make_checkpointer(config, backend).resume()
    assert f"={load} asks for {item}, but {step_dir(config.run_dir, 3)} holds " in str(caught.value)
    assert equal_bits(whole_state(backend), state)


def test_a_missing_role_is_named(saved):
    config, _, _ = saved
    with pytest.raises(UserError, match="has no critic; it holds actor"):
        resume(config, {"critic": PlainRole()})


@pytest.mark.parametrize("item", ["model", "hf_model", "optimizer"])
def test_another_architecture_is_refused_with_names_and_shapes(tmp_path, item):
    config = make_config(tmp_path)
    config.checkpoint.contents = [item]
    make_checkpointer(config, PlainRole(), 3).save(3)
    checkpoint = step_dir(config.run_dir, 3)
    state = RunState({"actor": make_backend(2)}, make_driver())
    with pytest.raises(
        UserError,
        match=r"do not fit the architecture of model\.path: lm_head\.weight.* is not in the ch.*; and \d+ more",
    ):
        load_state(FileLocations.whole(checkpoint, verify(checkpoint)), state, [item], 1, Coordinator(GlooTransport()))


def test_a_changed_setting_is_an_error_and_a_harmless_change_is_not(saved):
    config, _, _ = saved
    changed = make_config(config.run_dir.parents[1])
    changed.checkpoint.contents = list(CONTENTS)
    changed.trainer.save_freq = 7
    assert resume(changed, make_backend(2)) == 3
    changed.actor.optim.lr = 0.5
    with pytest.raises(UserError, match=r"actor\.optim\.lr.*\n.*trainer\.allow_config_change=true"):
        resume(changed, make_backend(2))
    changed.trainer.allow_config_change = True
    assert resume(changed, make_backend(2)) == 3


@pytest.mark.parametrize(
    ("fingerprints", "expected"),
    [
        ({"model.path": "0" * 32}, ["model.path={path} holds other files than when {checkpoint} was saved"]),
        (
            IDENTITY.fingerprints | {"model.path": "0" * 32, "model.trust_remote_code": "c" * 32},
            ["model.path={path} holds other files than when {checkpoint} was saved"],
        ),
        ({}, ["model.path was in use when {checkpoint} was saved, and is not in use now"]),
        (
            IDENTITY.fingerprints | {"critic.path": "c" * 32},
            ["critic.path=None was not in use when {checkpoint} was saved"],
        ),
        (
            {"model.path": "0" * 32, "reward_model.path": "r" * 32},
            ["model.path={path} holds other", "reward_model.path=None was not in use"],
        ),
    ],
)
def test_the_setting_whose_files_differ_is_named(saved, caplog, fingerprints, expected):
    config, _, _ = saved
    changed = make_config(config.run_dir.parents[1])
    changed.checkpoint.contents = list(CONTENTS)
    remedies = facts("trainer.allow_config_change=true", "trainer.experiment_name=NAME")
    with pytest.raises(UserError, match=remedies) as caught:
        resume(changed, make_backend(2), None, fingerprints)
    changed.trainer.allow_config_change = True
    assert resume(changed, make_backend(2), None, fingerprints) == 3
    for line in expected:
        line = line.format(path=changed.model.path, checkpoint=step_dir(config.run_dir, 3))
        assert line in str(caught.value)
        assert line in caplog.text
    both = str(caught.value).count("when ")
    assert both == len(expected)  # and no other setting is named


def test_a_run_that_begins_at_a_checkpoint_with_other_files_is_not_sent_to_another_directory(tmp_path, saved):
    config = make_config(tmp_path)
    begin_at(config, step_dir(saved[0].run_dir, 3), ["model"])
    with pytest.raises(UserError, match=r"trainer\.allow_config_change=true") as caught:
        resume(config, make_backend(2), None, {"model.path": "0" * 32})
    assert "experiment_name" not in str(caught.value), "it has a directory of its own"


@pytest.mark.parametrize("tied", [False, True])
def test_the_export_opens_as_any_hugging_face_folder(tmp_path, tied):
    config = make_config(tmp_path)
    config.checkpoint.contents = ["hf_model"]
    backend = make_backend(3, train_steps=2, tied=tied)
    folder = make_checkpointer(config, backend, 2).save(2).path / "actor/huggingface"
    model, loading_info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert {key: list(value) for key, value in loading_info.items() if value} == {}
    ids = torch.arange(14).view(2, 7)
    backend.module.eval()
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, backend.module(input_ids=ids).logits)
    assert model.generation_config.eos_token_id == backend.module.generation_config.eos_token_id
    chat = [{"role": "user", "content": "12 + 34?"}]
    exported, own = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(TINY_POLICY)
    assert exported.apply_chat_template(chat) == own.apply_chat_template(chat)


def test_a_large_export_is_split_and_still_opens(tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf.storage.hf_layout.SHARD_BYTES", 30_000)
    config = make_config(tmp_path)
    config.checkpoint.contents = ["hf_model"]
    backend = make_backend(3, train_steps=1)
    folder = make_checkpointer(config, backend, 1).save(1).path / "actor/huggingface"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(list(folder.glob("model-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert equal_bits(dict(model.state_dict()), whole_state(backend)["model"])
    other = make_backend(4)
    make_checkpointer(config, other).resume()
    assert equal_bits(whole_state(other)["model"], whole_state(backend)["model"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_export_is_in_the_type_that_is_asked_for_and_training_goes_on_in_its_own(tmp_path, trained, caplog, dtype):
    config = make_config(tmp_path)
    config.checkpoint.contents, config.checkpoint.hf_dtype = ["model", "hf_model"], dtype
    path = make_checkpointer(config, trained, 3).save(3).path
    model = AutoModelForCausalLM.from_pretrained(path / "actor/huggingface")
    kind, state = getattr(torch, dtype), whole_state(trained)["model"]
    rounded = {name: tensor.to(kind) for name, tensor in state.items()}
    assert equal_bits(dict(model.state_dict()), rounded)
    other = make_backend(2)
    assert resume(config, other) == 3
    assert equal_bits(whole_state(other)["model"], state)
    assert "rounded" not in caplog.text
    # Only a start with load_contents=[hf_model] gets the rounded weights, and a warning.
    begin_at(config, path, ["hf_model"])
    config.trainer.default_local_dir = str(tmp_path / "fork")
    assert resume(config, other) == 3
    assert equal_bits(whole_state(other)["model"], {name: tensor.float() for name, tensor in rounded.items()})
    assert ("weights in" in caplog.text and "were rounded to" in caplog.text) == (dtype != "float32")


def test_extra_files_in_the_export_folder_are_not_read(tmp_path, trained):
    config = make_config(tmp_path)
    config.checkpoint.contents = ["hf_model"]
    folder = make_checkpointer(config, trained, 3).save(3).path / "actor/huggingface"
    (folder / "model_2.safetensors").write_bytes(b"\xff" * 100)
    backend = make_backend(2)
    make_checkpointer(config, backend).resume()
    assert equal_bits(whole_state(backend)["model"], whole_state(trained)["model"])
