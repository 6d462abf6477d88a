"""State in a checkpoint beside one role: further roles, and the parts of the driver state."""

import itertools
import json
import logging
from dataclasses import replace

import pytest

from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.checkpoint.load.locations import FileLocations
from rlhf.checkpoint.load.restoring import load_state
from rlhf.checkpoint.state.run_state import RunState
from rlhf.config import Config
from rlhf.config.schema.checkpoint import CONTENTS
from rlhf.errors import UserError
from rlhf.numerics import NUMERICS
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.ranks.rng import rng_state, set_rng_state
from rlhf.storage.layout import step_dir
from tests.support.checkpoints import (
    PlainPart,
    PlainReference,
    PlainRole,
    equal_bits,
    files_of,
    flip_bit,
    make_checkpointer,
    make_config,
    make_driver,
    resume,
)
from tests.support.verified import verify

SUBSETS = [list(s) for n in range(1, 5) for s in itertools.combinations(CONTENTS, n)]


@pytest.fixture(autouse=True)
def own_generators():
    before = rng_state()
    yield
    set_rng_state(before)


@pytest.fixture
def config(tmp_path) -> Config:
    config = make_config(tmp_path)
    config.checkpoint.contents = list(CONTENTS)
    return config


def two_roles(seed: int) -> dict[str, PlainRole]:
    return {"actor": PlainRole(300, seed=seed), "critic": PlainRole(200, seed=seed + 1)}


def state_of(role: PlainRole) -> dict:
    return {"weight": role.weight.clone(), "moment": role.moment.clone(), "position": role.position}


@pytest.mark.parametrize("contents", SUBSETS, ids="+".join)
def test_every_role_saves_exactly_checkpoint_contents(config, contents):
    config.checkpoint.contents = contents
    make_checkpointer(config, two_roles(1), 2).save(2)
    files = {"actor": set(), "critic": set()}
    for name in files_of(step_dir(config.run_dir, 2)):
        role, _, rest = name.partition("/")
        if role in files:
            files[role].add(rest.partition("/")[0])
    folders = {"huggingface" if item == "hf_model" else item for item in contents}
    assert files == {"actor": folders, "critic": folders}
    assert verify(step_dir(config.run_dir, 2)).roles == ["actor", "critic"]


@pytest.mark.parametrize("load", SUBSETS, ids="+".join)
def test_every_role_loads_exactly_load_contents(config, load):
    saved = two_roles(1)
    make_checkpointer(config, saved, 2).save(2)
    roles, path = two_roles(50), step_dir(config.run_dir, 2)
    before = {name: state_of(role) for name, role in roles.items()}
    load_state(
        FileLocations.whole(path, verify(path)), RunState(roles, make_driver()), load, 1, Coordinator(GlooTransport())
    )
    for name, role in roles.items():
        source = {
            "weight": saved[name] if {"model", "hf_model"} & set(load) else None,
            "moment": saved[name] if "optimizer" in load else None,
            "position": saved[name] if "extra" in load else None,
        }
        wanted = {key: before[name][key] if of is None else state_of(of)[key] for key, of in source.items()}
        assert equal_bits(state_of(role), wanted)


@pytest.mark.parametrize(
    "name", ["actor/model", "critic/model", "critic/optimizer", "actor/extra", "critic/huggingface"]
)
def test_roles_never_come_from_different_checkpoints(config, name):
    for step in (2, 4):
        make_checkpointer(config, two_roles(step), step).save(step)
    path = next((step_dir(config.run_dir, 4) / name).iterdir())
    flip_bit(path, 8 * path.stat().st_size - 5)
    roles = two_roles(50)
    assert resume(config, roles) == 2
    assert equal_bits(
        {name: state_of(role) for name, role in roles.items()},
        {name: state_of(role) for name, role in two_roles(2).items()},
    )


def test_another_architecture_of_the_critic_names_its_setting(config):
    make_checkpointer(config, two_roles(1), 2).save(2)
    with pytest.raises(UserError, match=r"critic's weights in .* do not fit the architecture of critic\.path: weight"):
        resume(config, {"actor": PlainRole(300), "critic": PlainRole(201)})


def test_a_reference_of_another_architecture_is_refused(config):
    make_checkpointer(config, PlainRole(), 2, reference=PlainReference(10)).save(2)
    with pytest.raises(UserError, match=r"reference weights in .* do not fit the architecture of model\.path"):
        resume(config, PlainRole(), reference=PlainReference(11))


def test_the_driver_state_has_an_entry_per_part(config):
    data, guards = PlainPart(7), PlainPart(9)
    driver = make_driver(2)
    driver.note_accuracy(0.1 + 0.2)
    make_checkpointer(config, PlainRole(), driver=driver, parts={"data": data, "guards": guards}).save(2)
    stored = json.loads((step_dir(config.run_dir, 2) / "driver_state.json").read_text())
    assert stored == driver.state_dict() | {"data": {"count": 7}, "guards": {"count": 9}}
    data, guards, other = PlainPart(), PlainPart(), make_driver()
    assert make_checkpointer(config, PlainRole(), driver=other, parts={"data": data, "guards": guards}).resume()
    assert (data.state, guards.state) == ({"count": 7}, {"count": 9})
    assert other == driver


def test_a_resume_does_not_load_the_run_id_or_length_from_the_checkpoint(config):
    make_checkpointer(config, PlainRole(), 2).save(2)
    driver = make_driver()
    driver.run_id, driver.total_steps, driver.steps_per_epoch = "other", 99, 7.5
    assert make_checkpointer(config, PlainRole(), driver=driver).resume()
    assert (driver.run_id, driver.total_steps, driver.steps_per_epoch, driver.step) == ("other", 99, 7.5, 2)


def test_a_part_missing_from_the_checkpoint_starts_afresh_with_a_warning(config, caplog):
    make_checkpointer(config, PlainRole(), 2, parts={"data": PlainPart(7)}).save(2)
    data, guards = PlainPart(), PlainPart(100)
    checkpointer = make_checkpointer(config, PlainRole(), parts={"data": data, "guards": guards})
    with caplog.at_level(logging.WARNING, logger="rlhf"):
        checkpointer.resume()
    assert (data.state, guards.state) == ({"count": 7}, {"count": 100})
    [line] = caplog.messages
    assert line == f"{step_dir(config.run_dir, 2)} has no state of guards, which starts afresh."
    # A later rollback to that checkpoint starts the guards afresh, too.
    guards.state["count"] = 105
    checkpointer.resume()
    assert guards.state == {"count": 100}


def test_a_resume_warns_if_thread_counts_may_change_bits(tmp_path, caplog):
    config = make_config(tmp_path)
    make_checkpointer(config, PlainRole(), 2, threads=[4]).save(2)
    assert read_manifest(step_dir(config.run_dir, 2)).threads == [4]
    assert resume(config, PlainRole(), threads=[4]) == 2
    assert "may not be bit-identical" not in caplog.text
    assert resume(config, PlainRole(), threads=[8]) == 2
    assert (
        "Ranks had 4 CPU threads each at the save and 8 now (trainer.threads_per_rank): the state is exact"
        in caplog.text
    )
    checkpointer = make_checkpointer(config, PlainRole(), threads=[4])
    checkpointer._identity = replace(checkpointer._identity, versions={"torch": "0.1"})
    assert checkpointer.resume()
    assert "continues with 0.1: the state is exact, but later steps may not be bit-identical" in caplog.text


def test_a_resume_warns_of_another_numerics_version_but_not_another_release(tmp_path, caplog):
    # Promise 19.
    config = make_config(tmp_path)
    make_checkpointer(config, PlainRole(), 2).save(2)
    checkpointer = make_checkpointer(config, PlainRole())
    later = checkpointer._identity.versions | {"rlhf": "9.0.0"}
    checkpointer._identity = replace(checkpointer._identity, versions=later)
    assert checkpointer.resume()
    assert caplog.messages == []
    checkpointer._identity = replace(checkpointer._identity, numerics=NUMERICS + 1)
    assert checkpointer.resume()
    [line] = caplog.messages
    assert f"numerics version {NUMERICS} " in line
    assert f"continues with {NUMERICS + 1} (rlhf 9.0.0): the state is exact" in line
