"""Environments of other libraries: a real run of some steps, killed in an episode, ends with the same bits.

A library that is not installed skips its tests. CONTRIBUTING.md has the command that installs and tests all of them.
"""

import json
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from rlhf.config.schema.env import EnvConfig
from rlhf.environments.sessions import Call, EnvironmentFailed, EnvironmentPool, Session
from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from tests.support.compare_runs import differences
from tests.support.interrupter import at
from tests.support.launching import ROOT, ranks, records
from tests.support.openenv_server import openenv_server

ADAPTERS = ROOT / "rlhf" / "environments" / "adapters"
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 97 / 97  # differs between samples, so that the weights change
"""
NIM = """
from rlhf.environments.adapters.textarena_game import TextArena


class Nim(TextArena):
    def _opponent(self, observation: str) -> str:
        return "[0 1]" if "pile 0: 0" not in observation.rpartition("Current Pile")[2] else "[1 1]"
"""


@dataclass(frozen=True)
class Library:
    """An adapted library with the settings of a short run. `seen`: a text of the environment in each sample."""

    package: str
    settings: tuple[str, ...]
    seen: str


LIBRARIES = {
    "skyrl_gym": Library(
        "skyrl-gym",
        ("env=skyrl_gym", "env.kwargs.id=gsm8k_multi_turn", "data.max_response_length=300"),
        "#### ANSWER",
    ),
    "textarena": Library(
        "textarena",
        (
            "env=textarena",
            "env.kwargs.id=GuessTheNumber-v0",
            "data.max_prompt_length=330",
            "data.max_response_length=180",
        ),
        "[GAME]",
    ),
    "openenv": Library("openenv", ("env=openenv", "data.max_response_length=120"), "Echoer environment ready!"),
    "verifiers": Library(
        "verifiers",
        ("env=verifiers", "env.kwargs.id=guess_taskset", "env.timeout_s=120", "data.max_response_length=60"),
        "wrong",
    ),
}


def need(package: str) -> None:
    try:
        version(package)
    except PackageNotFoundError:
        pytest.skip(f"needs the package {package} (CONTRIBUTING.md, Tests)")


def train(folder: Path, name: str, library: Library, *more: str, environment: dict[str, str] | None = None) -> int:
    """Run two steps of the library's environment and return the exit code."""
    rows = [{"prompt": f"Task {i}.", "answer": str(i), "task": i} for i in range(8)]
    (folder / "reward.py").write_text(REWARD)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["recipes=env_guess", f"trainer.default_local_dir={folder}", f"trainer.experiment_name={name}"]
    arguments += ["trainer.device=cpu", "trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.test_freq=0"]
    arguments += [f"data.train_files={folder}/rows.jsonl", "data.val_files=null", "data.train_batch_size=2"]
    arguments += [
        "actor.ppo_mini_batch_size=2",
        "rollout.n=3",
        "rollout.temperature=3",
        "env.max_turns=3",
        f"reward.functions=[{folder}/reward.py:score]",
    ]
    arguments += [*library.settings, *more]
    # The taskset of verifiers is a module.
    variables = {"PYTHONPATH": f"{ROOT}/tests/support", **(environment or {})}
    end = ranks(folder / f"{name}.log", arguments, variables)
    (folder / "output").write_text(end.output)
    return end.code


SLOW = ("textarena", "openenv", "verifiers")
"""Libraries that are not in the extra dev."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in LIBRARIES])
def test_a_kill_inside_an_episode_changes_no_bit(name, tmp_path: Path):
    library = LIBRARIES[name]
    need(library.package)
    with openenv_server(tmp_path) if name == "openenv" else nullcontext() as url:
        if url is not None:
            library = replace(library, settings=(*library.settings, f"env.kwargs.url={url}"))
        check_kill(library, tmp_path)


def check_kill(library: Library, tmp_path: Path) -> None:
    assert train(tmp_path, "whole", library) == EXIT_DONE, (tmp_path / "output").read_text()
    # The second turn of the first step: two replies of each episode are in the journal.
    kill = at("env.turn", 2, "SIGKILL", once=tmp_path / "hit")
    journal = "checkpoint.journal=true"
    assert train(tmp_path, "killed", library, journal, environment=kill) == -9
    assert any(file.stat().st_size for file in (tmp_path / "rlhf" / "killed" / "journal").iterdir())
    assert train(tmp_path, "killed", library, journal, environment=kill) == EXIT_DONE
    whole, killed = tmp_path / "rlhf" / "whole", tmp_path / "rlhf" / "killed"
    assert differences(whole, killed) == []
    assert [record["env/failed"] for record in records(whole) if record["step"]] == [0, 0]
    assert max(record["env/turns"] for record in records(whole) if record["step"]) > 1
    samples = [json.loads(line) for line in (whole / "samples" / "step_1.jsonl").read_text().splitlines()]
    assert all(library.seen in sample["prompt"] + sample["response"] for sample in samples)
    assert all(record["actor/grad_norm"] > 0 for record in records(whole) if record["step"])


@pytest.mark.parametrize(
    ("name", "spec", "kwargs", "words"),
    [
        ("skyrl_gym", "skyrl_gym_task.py:SkyRLGym", {"id": "gsm8k_multiturn"}, "Did you mean gsm8k_multi_turn?"),
        ("textarena", "textarena_game.py:TextArena", {"id": "GuessTheNumbr-v0"}, "Did you mean GuessTheNumber-v0?"),
        ("textarena", "textarena_game.py:TextArena", {"id": "Nim-v0"}, "players has to be 2"),
        ("textarena", "textarena_game.py:TextArena", {"id": "Nim-v0", "players": 2}, "_opponent"),
    ],
)
def test_a_wrong_environment_is_one_message(name, spec, kwargs, words):
    need(LIBRARIES[name].package)
    pool = EnvironmentPool(EnvConfig(classes=[f"{ADAPTERS}/{spec}"], kwargs=kwargs, process="episode"))
    with pytest.raises(UserError) as error:
        pool.start()
    assert words in str(error.value)
    assert f"env.kwargs.{'players' if words == '_opponent' else 'id'}=" in str(error.value)


def test_a_missing_package_ends_the_run_before_a_model_is_loaded(tmp_path: Path):
    missing = [name for name, library in LIBRARIES.items() if not _installed(library.package)]
    if not missing:
        pytest.skip("all adapted libraries are installed")
    assert train(tmp_path, "missing", LIBRARIES[missing[0]]) == EXIT_USER_ERROR
    output = (tmp_path / "output").read_text()
    assert f"pip install 'rlhf[{LIBRARIES[missing[0]].package}]'" in output
    assert not (tmp_path / "rlhf" / "missing").exists()


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def test_a_user_plays_the_other_player_of_a_textarena_game(tmp_path: Path):
    need("textarena")
    (tmp_path / "nim.py").write_text(NIM)
    config = EnvConfig(
        classes=[f"{tmp_path}/nim.py:Nim"], kwargs={"id": "Nim-v0", "players": 2, "piles": [3, 2]}, process="episode"
    )
    pool = EnvironmentPool(config).start()
    try:
        begin: Call = {"op": "reset", "row": {"seed": 1}}
        steps: list[Call] = [{"op": "step", "text": text} for text in ("[0 2]", "[1 1]", "[1 1]")]
        session = Session(pool, 0, seed=1)
        first, *replies = session.make([begin, *steps[:2]])
        assert "pile 0: 3" in first["value"]
        assert "[Player 1] [0 1]" in replies[0]["value"][0]
        assert replies[1]["value"][0] is None  # the opponent took the last object
        assert session.make([{"op": "reward"}]) == [{"value": -1.0}]
    finally:
        pool.close()


def test_a_textarena_game_that_draws_at_each_turn_is_restored_by_its_calls():
    need("textarena")
    kwargs = {"id": "Blackjack-v0"}
    pool = EnvironmentPool(
        EnvConfig(classes=[f"{ADAPTERS}/textarena_game.py:TextArena"], kwargs=kwargs, process="episode")
    )
    calls: list[Call] = [{"op": "reset", "row": {"seed": 3}}, *({"op": "step", "text": "[hit]"} for _ in range(4))]
    try:
        pool.start()
        session = Session(pool, 0, seed=3)
        replies = session.make(calls)
        assert session.state is None
        assert len({str(reply) for reply in replies}) == len(calls)
        again = Session(pool, 0, seed=3)
        again.record(calls[:3], replies[:3], None)
        assert again.make(calls[3:]) == replies[3:]
        other: list[Call] = [{"op": "reset", "row": {"seed": 4}}, *calls[1:]]
        assert Session(pool, 0, seed=4).make(other) != replies
    finally:
        pool.close()


def test_an_openenv_session_answers_and_names_the_mistake(tmp_path: Path):
    need("openenv")
    spec, begin = f"{ADAPTERS}/openenv_session.py:OpenEnv", {"op": "reset", "row": {"seed": 1, "prompt": "Go."}}
    with openenv_server(tmp_path, sessions=1) as url:
        for kwargs, words in (
            ({"url": "http://127.0.0.1:9"}, ("env.kwargs.url=http://127.0.0.1:9", "Start the server")),
            ({"url": url, "action": "mesage"}, ("env.kwargs.action=mesage", "Did you mean message?")),
        ):
            with pytest.raises(UserError) as error:
                EnvironmentPool(EnvConfig(classes=[spec], kwargs=kwargs, network=True)).start()
            assert all(word in str(error.value) for word in words), error.value
        pool = EnvironmentPool(EnvConfig(classes=[spec], kwargs={"url": url}, network=True)).start()
        try:
            session = Session(pool, 0, seed=1)
            assert session.make([begin, {"op": "step", "text": "hello"}]) == [
                {"value": "\nEchoer environment ready!"},
                {"value": ["hello", 0.5]},
            ]
            with pytest.raises(EnvironmentFailed, match="max_concurrent_envs"):
                Session(pool, 0, seed=1).make([begin])
            session.close()
            assert Session(pool, 0, seed=1).make([begin]) == [{"value": "\nEchoer environment ready!"}]
        finally:
            pool.close()


VERIFIERS: tuple[tuple[dict, tuple[str, ...]], ...] = (
    ({}, ("env.kwargs", "Set env.kwargs.id=TASKSET")),
    ({"id": "guess_tasket"}, ("env.kwargs.id=guess_tasket", "install the taskset")),
    ({"id": "guess_taskset", "confg": {}}, ("env.kwargs.confg", "Did you mean config?")),
    ({"id": "guess_taskset", "config": {"taskset": {"taks": "s3cr3t"}}}, ("env.kwargs", "taskset.taks")),
    ({"id": "guess_taskset", "config": {"taskset": {"tasks": 0}}}, ("env.kwargs.id=guess_taskset", "no task")),
    ({"id": "guess_taskset", "config": {"id": "user-sim"}}, ("assistant, user", "one conversation")),
)


def verifiers(kwargs: dict) -> EnvironmentPool:
    return EnvironmentPool(EnvConfig(command=f"python {ADAPTERS}/verifiers_agent.py", kwargs=kwargs, timeout_s=120))


@pytest.mark.slow
def test_a_task_of_verifiers_is_played_and_names_the_mistake(monkeypatch):
    need("verifiers")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/tests/support")
    for kwargs, words in VERIFIERS:
        with pytest.raises(UserError) as error:
            verifiers(kwargs).start()
        assert all(word in str(error.value) for word in words), error.value
        assert "s3cr3t" not in str(error.value)
    pool = verifiers({"id": "guess_taskset", "config": {"taskset": {"tasks": 5}}}).start()
    answer: Call = {"op": "answer", "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    answer["message"] = {"role": "assistant", "content": "4"}
    try:
        session = Session(pool, 0, seed=1, name="right")
        start, told, reward = session.make(
            [{"op": "start", "row": {"task": 4}, "vocabulary": 9}, answer, {"op": "reward", "required": True}]
        )
        assert start["value"]["messages"] == [{"role": "user", "content": "Guess 0 to 9."}]
        assert told["value"] == [{"role": "user", "content": "right"}]
        assert reward["value"] == 1 + ord("4") / 970
        for row, words in (({"task": 5}, "has 5 tasks"), ({}, "column task")):
            with pytest.raises(EnvironmentFailed, match=words):
                Session(pool, 0, seed=1, name=f"wrong-{len(row)}").make([{"op": "start", "row": row, "vocabulary": 9}])
    finally:
        pool.close()
