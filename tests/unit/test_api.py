"""`rlhf.train` as a function: each mistake in a call raises one message before anything starts."""

import inspect
import pydoc
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import rlhf
import rlhf.api
import rlhf.train
from rlhf.api import check_inputs, file_and_name
from rlhf.config import Config, RewardConfig, TrainerConfig
from rlhf.config.user_functions import load_function
from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from rlhf.storage.layout import HISTORY
from rlhf.tracking.history import History
from rlhf.tracking.report import REPORT
from tests.support.refusals import says, user_error


def score(solution_str: str) -> float:
    return 0.0


class Scores:
    def of(self, solution_str: str) -> float:
        return 0.0

    def __call__(self, solution_str: str) -> float:
        return 0.0


def test_cuda_without_a_driver_is_refused_before_torch_is_asked(monkeypatch):
    monkeypatch.setattr("rlhf.api.lacks_gpu", lambda: True)
    with pytest.raises(UserError, match=r"trainer\.device=cuda, but this machine has no GPU"):
        check_inputs(Config(trainer=TrainerConfig(device="cuda")))


def test_wandb_without_a_login_is_refused_before_slower_checks(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_CONFIG_DIR", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("wandb")
    with pytest.raises(UserError, match="nobody is logged in to wandb"):
        check_inputs(Config(trainer=TrainerConfig(logger=["wandb"]), reward=RewardConfig(functions=["nothing"])))


def test_a_function_defined_in_a_file_is_referred_to_by_path_and_name():
    assert file_and_name(score) == f"{Path(__file__).absolute()}:score"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda text: 0.0, "a lambda"),
        (Scores().of, "not a plain function"),
        (Scores(), "not a plain function"),
        (Scores.of, "Define it with def at the top level"),
        (len, "not a plain function"),
    ],
    ids=["lambda", "bound method", "callable object", "method", "builtin"],
)
def test_a_function_that_reward_processes_cannot_import_is_rejected(function, message):
    with pytest.raises(UserError, match=message):
        rlhf.train([], reward=function)


@pytest.mark.parametrize(
    ("reward", "override"),
    [
        ("exact_match", "Give reward=exact_match among"),
        (["reward_model"], "Give reward=reward_model among"),
        (["exact_match", "math_verify"], "Give reward.functions=[exact_match,math_verify] among"),
        ("score", "or reward.functions=[FILE.py:NAME] among"),
    ],
)
def test_a_text_as_a_reward_gets_the_override_to_write(reward, override):
    says(user_error(partial(rlhf.train, [], reward=reward)), "a string, not a function", override)


def test_a_function_of_a_notebook_is_refused():
    space: dict = {}
    exec(compile("def score(solution_str):\n    return 0.0\n", "/tmp/ipykernel_7/123.py", "exec"), space)
    with pytest.raises(UserError, match="writefile"):
        rlhf.train([], reward=[space["score"]])


@pytest.mark.parametrize("earlier", [None, '{"steps": 1}'])
def test_the_result_is_right_even_if_the_report_could_not_be_written(tmp_path, monkeypatch, earlier):
    """A run that is finished on a full disk has no report.json, or that of an earlier and shorter run."""

    def start(config, *_):
        (config.run_dir / REPORT).parent.mkdir(parents=True)
        History(config.run_dir / HISTORY).append({"step": 3, "reward/mean": 0.5})
        if earlier is not None:
            (config.run_dir / REPORT).write_text(earlier)
        return EXIT_DONE

    monkeypatch.setattr("rlhf.api.start", start)
    report = rlhf.train([f"trainer.default_local_dir={tmp_path}"])
    assert (report["steps"], report["reward"]) == (3, [[3, 0.5]])


def test_a_string_of_overrides_is_rejected():
    with pytest.raises(UserError, match="Give a list"):
        rlhf.train("recipes=minimal")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"overrides": {"rollout.n": 4}}, "not a list of strings"),
        ({"overrides": None}, "not a list of strings"),
        ({"overrides": [4]}, "not a list of strings"),
        ({"reward": "score.py:closeness"}, "Give the function itself, or reward.functions=[FILE.py:NAME]"),
        ({"reward": ["score.py:closeness"]}, "Give the function itself, or reward.functions=[FILE.py:NAME]"),
        ({"callbacks": print}, "Give callbacks=[FUNCTION]"),
        ({"callbacks": ["print"]}, "Give callbacks=[FUNCTION]"),
    ],
)
def test_arguments_of_wrong_types_are_rejected(arguments, message):
    with pytest.raises(UserError) as raised:
        rlhf.train.train(**{"overrides": ["trainer.nproq=1"], **arguments})
    assert message in str(raised.value)


def test_rlhf_train_is_both_a_function_and_a_module():
    with pytest.raises(UserError, match=r"Did you mean trainer.nproc\?"):
        rlhf.train(["trainer.nproq=2"])
    assert rlhf.train.main(["--version"]) == 0


def test_a_secret_is_in_no_message(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hush-hush-hush")
    assert rlhf.train.main(["model.path=hush-hush-hush", "trainer.nproq=hush-hush-hush"]) == EXIT_USER_ERROR
    output = capsys.readouterr().err
    assert "REDACTED" in output
    assert "hush" not in output


def test_a_run_on_several_machines_needs_a_launcher():
    with pytest.raises(UserError) as raised:
        rlhf.train(["trainer.nnodes=2"])
    says(raised.value, "trainer.nnodes=2", "rlhf.launch.slurm", "torchrun")


def test_a_call_under_torchrun_is_rejected(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UserError, match="does not work under torchrun"):
        rlhf.train([])


def test_loading_a_function_from_a_script_without_main_guard_is_an_error(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import rlhf\n\n\ndef score(solution_str):\n    return 0.0\n\n\nrlhf.train([], reward=score)\n")
    with pytest.raises(UserError, match='if __name__ == "__main__":'):
        load_function("reward.functions", f"{script}:score")


def test_importing_rlhf_does_not_import_torch():
    code = "import sys, rlhf; rlhf.train; rlhf.UserError; rlhf.RunEnded; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_describes_the_function_and_not_the_command() -> None:
    assert rlhf.train.__doc__ == rlhf.api.train.__doc__
    assert inspect.signature(rlhf.train) == inspect.signature(rlhf.api.train)
    text = pydoc.plain(pydoc.render_doc(rlhf.train))
    assert "train(overrides: collections.abc.Sequence[str] = (), *, reward:" in text.replace("\n        ", " ")
    assert "RunEnded: the run ended" in text
    assert "main(" not in text
