"""Starts from a checkpoint that was written from another tool's tensors: what is loaded, and what starts afresh."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from rlhf.backends.fsdp2 import Fsdp2Backend
from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.checkpoint.state.driver_state import DriverState
from rlhf.convert.native.native_folder import WrittenCheckpoint, plan_native_folder, write_native_folder
from rlhf.errors import UserError
from rlhf.models.hf import hf_folder
from rlhf.models.hf.source import TrainedSoFar
from rlhf.ranks.rng import rng_state
from rlhf.storage.files import write_folder
from rlhf.storage.layout import scan, step_dir, step_of
from tests.support.checkpoints import (
    PlainPart,
    PlainReference,
    begin_at,
    equal_bits,
    flip_bit,
    make_backend,
    make_checkpointer,
    make_config,
    make_driver,
    resume,
    save_steps,
    whole_state,
    world_of_one,
)
from tests.support.memory_source import MemorySource
from tests.support.sections import finished_step, prepare
from tests.support.verified import verify


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    with world_of_one(tmp_path_factory.mktemp("group")):
        yield


@pytest.fixture(scope="module")
def trained() -> Fsdp2Backend:
    return make_backend(1, train_steps=3)


@pytest.fixture(scope="module")
def model_files(tmp_path_factory, trained) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_folder(folder, trained.hf_files())
    return folder


@pytest.fixture
def source(trained, model_files) -> MemorySource:
    """All state of `trained`, as another tool might store it."""
    state = whole_state(trained)
    return MemorySource(state["model"], state["optimizer"], TrainedSoFar(step=4, optimizer_steps=3), model_files)


def imported(source: MemorySource, folder: Path, step: int = 4, **options) -> Path:
    return write(folder / f"global_step_{step}", source, **options).path


def write(target: Path, source: MemorySource, role: str = "actor", **options) -> WrittenCheckpoint:
    plans = plan_native_folder({role: source}, target.parent / "theirs")
    return write_native_folder(plans, target, step_of(target) or 0, **options)


def start(config, target: Path, role: Fsdp2Backend, **options) -> DriverState:
    """Prepare the run directory as a launch does, then resume as ranks do. Return the driver state."""
    begin_at(config, target)
    prepare(config)
    driver = make_driver()
    assert make_checkpointer(config, role, driver=driver, **options).resume()
    return driver


def test_weights_moments_and_place_in_the_schedule_arrive_bit_for_bit(tmp_path, trained, source, monkeypatch):
    monkeypatch.setattr(hf_folder, "RANGE_BYTES", 200)
    target = imported(source, tmp_path)
    assert source.largest == 50, "the source must be read in parts"
    assert verify(target).imported == {"layout": "memory", "path": str(tmp_path / "theirs")}
    backend = make_backend(2, train_steps=1)
    driver = start(make_config(tmp_path), target, backend)
    expected, found = whole_state(trained), whole_state(backend)
    assert equal_bits(found["model"], expected["model"])
    assert equal_bits(found["optimizer"], expected["optimizer"])
    assert found["extra"]["rates"] == expected["extra"]["rates"]
    assert found["extra"]["lr_scheduler"]["last_epoch"] == 3
    assert (driver.step, driver.epochs, driver.tokens) == (4, 0.0, 0)


def test_a_start_logs_the_import_and_the_parts_that_start_afresh(tmp_path, trained, source, caplog):
    config, stream = make_config(tmp_path), PlainPart(7)
    target = imported(source, tmp_path)
    with caplog.at_level("INFO", logger="rlhf"):
        start(config, target, make_backend(2), parts={"data": stream}, reference=PlainReference())
    (line,) = [text for text in caplog.messages if "was imported" in text]
    assert f"{target} was imported from {tmp_path / 'theirs'} (memory). A new run begins there, after step 4" in line
    assert "with actor's weights, actor's moments, actor's schedule" in line
    assert "It does not continue that run bit for bit: reference, generators, data start afresh." in line
    assert stream.state == {"count": 7}, "as it was at the start"
    assert "bit-identical" not in caplog.text
    assert "RNG state" not in caplog.text
    run = json.loads((config.run_dir / "run.json").read_text())
    driver = json.loads((target / "driver_state.json").read_text())
    assert run["run_id"] != driver["run_id"], "a run of its own"
    assert run["resumed_from"] == str(target)


def test_an_imported_checkpoint_allows_any_settings_and_model_files(tmp_path, source):
    """An imported checkpoint stores neither settings nor hashes. The run's own checkpoint stores both (promise 13)."""
    config = make_config(tmp_path)
    target = imported(source, tmp_path)
    backend = make_backend(2)
    start(config, target, backend, fingerprints={"model.path": "another"})
    make_checkpointer(config, backend, 5, fingerprints={"model.path": "another"}).save(5)
    assert resume(config, make_backend(3), None, {"model.path": "another"}) == 5
    with pytest.raises(UserError, match="holds other files than"):
        resume(config, make_backend(3), None, {"model.path": "a third"})
    config.actor.optim.lr = 0.5
    with pytest.raises(UserError, match="settings that the run's numbers depend on differ"):
        prepare(config)


def test_parts_missing_from_the_source_start_afresh_without_a_setting(tmp_path, trained, model_files):
    """The source has only weights, like a Hugging Face folder. `checkpoint.contents` has its
    default, which lists more parts, but the run needs no setting to load only the parts that the checkpoint has."""
    weights = MemorySource(whole_state(trained)["model"], model_files=model_files)
    target = imported(weights, tmp_path, 0)
    assert read_manifest(target).contents == ["model", "hf_model"]
    backend = make_backend(2)
    before = whole_state(backend)
    start(make_config(tmp_path), target, backend)
    assert equal_bits(whole_state(backend)["model"], whole_state(trained)["model"])
    assert equal_bits(whole_state(backend)["optimizer"], before["optimizer"])
    config = make_config(tmp_path / "asked")
    begin_at(config, target, ["model", "optimizer"])
    with pytest.raises(UserError, match=r"asks for optimizer, but .* holds model, hf_model"):
        resume(config, make_backend(2))


def test_load_contents_may_leave_out_imported_parts(tmp_path, trained, source):
    config, target = make_config(tmp_path), imported(source, tmp_path)
    begin_at(config, target, ["model"])
    backend = make_backend(2)
    before = whole_state(backend)
    assert resume(config, backend) == 4
    assert equal_bits(whole_state(backend)["model"], whole_state(trained)["model"])
    assert equal_bits(whole_state(backend)["optimizer"], before["optimizer"])
    assert whole_state(backend)["extra"] == before["extra"]


def test_a_critic_that_was_not_imported_starts_from_its_own_files(tmp_path, trained, source):
    config, target = make_config(tmp_path), imported(source, tmp_path)
    begin_at(config, target)
    critic, actor = make_backend(5), make_backend(2)
    before = whole_state(critic)
    assert resume(config, {"actor": actor, "critic": critic}) == 4
    assert equal_bits(whole_state(critic), before)
    assert equal_bits(whole_state(actor)["model"], whole_state(trained)["model"])


class Rollbacks:
    """An actor, a critic and a moving reference that start from an imported actor. `train` changes all of them."""

    def __init__(self, config) -> None:
        self.actor, self.critic, self.reference = make_backend(2), make_backend(5), PlainReference()
        self.driver = make_driver()
        self.checkpointer = make_checkpointer(
            config,
            {"actor": self.actor, "critic": self.critic},
            driver=self.driver,
            parts={"reference": self.reference},
            reference=self.reference,
        )

    def train(self) -> None:
        self.driver.step += 1
        for backend in (self.actor, self.critic):
            backend.backward(backend.module(input_ids=torch.randint(500, (2, 5))).logits.square().mean())
            backend.optimizer_step()
        self.reference.update(self.driver.step)

    def everything(self) -> dict:
        roles = {"actor": whole_state(self.actor), "critic": whole_state(self.critic)}
        return roles | {"reference": self.reference.weight.clone(), "rng": rng_state(), "step": self.driver.step}


@pytest.mark.parametrize("background", [False, True])
def test_a_rollback_to_an_imported_start_restores_the_parts_that_the_import_lacks(
    tmp_path, trained, model_files, background
):
    """The moments, the schedule, the generators and the critic once stayed as the rejected batch had left them."""
    # Promise 16.
    weights = MemorySource(whole_state(trained)["model"], model_files=model_files)
    config = make_config(tmp_path)
    config.checkpoint.async_save = background
    begin_at(config, imported(weights, tmp_path, 0))
    prepare(config)
    run = Rollbacks(config)
    with run.checkpointer.committing():
        assert run.checkpointer.resume()
        run.checkpointer.save_restored(last=False, rolls_back=True)
        before = run.everything()
        run.train()
        run.train()
        assert run.checkpointer.resume()
        assert equal_bits(run.everything(), before)
    assert [path.name for path in scan(config.run_dir)] == ["global_step_0"]


def test_a_start_that_never_rolls_back_saves_no_copy_of_its_source(tmp_path, trained, source):
    config = make_config(tmp_path)
    config.trainer.save_freq = 4
    begin_at(config, imported(source, tmp_path))
    prepare(config)
    run = Rollbacks(config)
    assert run.checkpointer.resume()
    assert run.checkpointer.save_restored(last=False) is None
    assert scan(config.run_dir) == []


def test_a_run_that_rolls_back_refuses_an_import_without_all_parts_in_its_own_directory(tmp_path, trained, source):
    config = make_config(tmp_path)
    imported(source, config.run_dir)
    prepare(config)
    run = Rollbacks(config)
    assert run.checkpointer.resume()
    assert run.checkpointer.save_restored(last=False) is None
    lacks = (
        r"guards\.action=rollback: .*global_step_4 lacks critic's weights, critic's moments, critic's schedule, refer"
    )
    with pytest.raises(UserError, match=lacks):
        run.checkpointer.save_restored(last=False, rolls_back=True)
    run.train()
    with pytest.raises(UserError, match=lacks):
        run.checkpointer.resume()


@pytest.mark.parametrize("in_run_dir", [False, True])
def test_damage_leaves_no_moments_to_an_imported_checkpoint_without_moments(tmp_path, trained, model_files, in_run_dir):
    """Training once began at the source's step, with the moments of a damaged checkpoint of a later step."""
    weights, config = MemorySource(whole_state(trained)["model"], model_files=model_files), make_config(tmp_path)
    if in_run_dir:
        imported(weights, config.run_dir, 0)
    else:
        begin_at(config, imported(weights, tmp_path, 0))
    prepare(config)
    save_steps(config, make_backend(3, train_steps=2), 6)
    flip_bit(step_dir(config.run_dir, 6) / "config.yaml", 11)
    with pytest.raises(RuntimeError, match=r"global_step_0 lacks actor's moments, actor's schedule, .*start again"):
        resume(config, make_backend(2))
    assert (config.run_dir / "global_step_6.damaged-1").exists()
    backend = make_backend(2)
    before = whole_state(backend)
    assert resume(config, backend) == 0
    assert equal_bits(whole_state(backend), before | {"model": whole_state(trained)["model"]})


def test_damage_of_the_weights_alone_leaves_the_other_parts_fresh(tmp_path, trained, model_files):
    weights, config = MemorySource(whole_state(trained)["model"], model_files=model_files), make_config(tmp_path)
    config.checkpoint.contents = ["model"]
    begin_at(config, imported(weights, tmp_path, 0), ["model"])
    prepare(config)
    save_steps(config, make_backend(3, train_steps=2), 6)
    flip_bit(step_dir(config.run_dir, 6) / "config.yaml", 11)
    backend = make_backend(2)
    before = whole_state(backend)
    assert resume(config, backend) == 0
    assert equal_bits(whole_state(backend), before | {"model": whole_state(trained)["model"]})


def test_moments_that_are_missing_are_zero_and_named(tmp_path, trained, model_files):
    state = whole_state(trained)
    frozen = "model.norm.weight"
    kept = {name: tensor for name, tensor in state["optimizer"].items() if not name.startswith(frozen)}
    source = MemorySource(state["model"], kept, TrainedSoFar(step=4), model_files)
    done = write(tmp_path / "global_step_4", source)
    assert done.absent == [f"actor: moments of 1 weights, such as {frozen}, which begin at zero"]
    place = "actor: position in the learning rate schedule, after 3 optimizer steps"
    assert place in done.converted, "as the moments' step counts say"
    backend = make_backend(2, train_steps=1)
    start(make_config(tmp_path), tmp_path / "global_step_4", backend)
    found = whole_state(backend)["optimizer"]
    for name, tensor in state["optimizer"].items():
        assert equal_bits(found[name], torch.zeros_like(tensor) if name.startswith(frozen) else tensor), name


def test_the_run_goes_on_from_its_own_checkpoints_once_it_has_any(tmp_path, source):
    config = make_config(tmp_path)
    target = imported(source, tmp_path)
    start(config, target, backend := make_backend(2))
    make_checkpointer(config, backend, 5).save(5)
    shutil.rmtree(target)
    prepare(config)
    assert resume(config, make_backend(3)) == 5


def test_nothing_left_to_train_is_refused(tmp_path, source):
    config = make_config(tmp_path)
    target = imported(source, tmp_path, 10)
    begin_at(config, target)
    prepare(config)
    assert finished_step(config) is None
    with pytest.raises(UserError, match="at step 10, and nothing is left to train from there: the run has 10 steps"):
        resume(config, make_backend(2))


def test_an_imported_checkpoint_in_the_run_directory_is_no_finished_run(tmp_path, source):
    config = make_config(tmp_path)
    config.trainer.total_training_steps = None
    imported(source, config.run_dir, 4)
    prepare(config)
    assert finished_step(config) is None
    assert resume(config, make_backend(2)) == 4


def test_another_architecture_is_refused_at_the_import_and_at_the_start(tmp_path, trained, source, model_files):
    lacking = {name: tensor for name, tensor in whole_state(trained)["model"].items() if "norm" not in name}
    with pytest.raises(UserError, match=r"lacks tensors that config\.json of .* asks for.*\(3 in all\)"):
        imported(MemorySource(lacking, model_files=model_files), tmp_path)
    assert not any(tmp_path.iterdir())
    config = make_config(tmp_path)
    begin_at(config, imported(source, tmp_path))
    with pytest.raises(UserError, match=r"actor's weights in .* do not fit the architecture of model\.path"):
        resume(config, make_backend(2, tied=True))


def test_mistakes_are_told_before_anything_is_written(tmp_path, trained, source):
    nameless = MemorySource(whole_state(trained)["model"])
    with pytest.raises(UserError, match="--hf_model_path"):
        imported(nameless, tmp_path)
    assert not any(tmp_path.iterdir())
    assert step_dir(tmp_path, 4) == imported(source, tmp_path)
    with pytest.raises(UserError, match="exists already"):
        imported(source, tmp_path)
    imported(source, tmp_path, overwrite=True)
    with pytest.raises(UserError, match=r"LlamaForTokenClassification\) does not know, such as lm_head\.weight"):
        write(tmp_path / "global_step_1", source, "critic")
