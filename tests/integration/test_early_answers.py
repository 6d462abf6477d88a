"""Errors that appear without an import of torch: mistakes on the command line, and in the files that it names."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR
from tests.support.commands import ROOT, run

RUN_AND_LIST_MODULES = """
import sys
from rlhf.train import main
code = main(sys.argv[1:])
heavy = {"torch", "transformers", "datasets", "reasoning_gym"} & set(sys.modules)
assert not heavy, heavy
sys.exit(code)
"""


@pytest.mark.parametrize(
    "argument", ["trainer.nproq=2", "trainer.nproc=abc", "rollout.n=1", "recipes=nope", "--help", "--info"]
)
def test_help_and_errors_appear_before_heavy_imports(tmp_path, argument):
    done = run(tmp_path, "-c", RUN_AND_LIST_MODULES, argument)
    assert done.returncode == (EXIT_DONE if argument.startswith("--") else EXIT_USER_ERROR), done.stderr


GOOD_ROWS = '{"prompt": "1", "answer": "1"}\n' * 3


EARLY: dict[str, tuple[str, dict[str, str], str]] = {
    "a broken line": ("data.train_files=bad.jsonl", {"bad.jsonl": GOOD_ROWS + "{oh\n"}, "line 4 is not JSON"),
    "no template": ("", {"model/chat_template.jinja": ""}, "its tokenizer has no chat template"),
    "no weights": ("", {"model/model.safetensors": ""}, "the folder has no weights (*.safetensors)."),
    "no login": ("trainer.logger=[wandb]", {}, "nobody is logged in to wandb. Run `wandb login`, or set WANDB_API_KEY"),
    "a broken template": (
        "model.chat_template=own.jinja",
        {"own.jinja": "{% if %}"},
        "own.jinja, line 1: not a valid chat template",
    ),
    "a template that fails": (
        "model.chat_template=own.jinja",
        {"own.jinja": "{{ messages[0].content + greeting }}"},
        "a.jsonl line 1: the chat template (model.chat_template=own.jinja) rejects the prompt (roles: user): Undefined",
    ),
    "a name on the Hub": (
        "model.path=org/nowhere",
        {},
        "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids the download. Unset the variable, or set a local folder.",
    ),
    "lengths": ("data.max_response_length=4096", {}, "positions, but the model has 512 (max_position_embeddings)."),
    "a vision model": (
        "model.path=vit",
        {"vit/config.json": '{"model_type": "vit"}'},
        "model.path=vit: model_type vit",
    ),
    "a reward file": (
        "reward.functions=[own.py:f]",
        {"own.py": "import not_there\ndef f(solution_str): return 1.0\n"},
        "own.py:f cannot be imported: ModuleNotFoundError: No module named 'not_there'. Correct the file.",
    ),
    "an estimator": (
        "algorithm.adv_estimator=own.py:f",
        {"own.py": "def f(inputs, config): ...\nraise RuntimeError('at import')\n"},
        "algorithm.adv_estimator=own.py:f cannot be imported: RuntimeError: at import. Correct the file.",
    ),
}


ANSWER_ALL = """
import contextlib, io, json, os, sys
from rlhf.train import main
answers = {}
for folder, settings in json.load(sys.stdin).items():
    os.chdir(folder)
    with contextlib.redirect_stderr(output := io.StringIO()):
        code = main(settings)
    answers[folder] = [code, output.getvalue(), os.path.exists("checkpoints")]
assert "torch" not in sys.modules
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, tuple[int, str, bool]]:
    """Exit code and output for each mistake, and whether a run directory was made. One process answers all mistakes,
    and must not import torch."""
    base = tmp_path_factory.mktemp("early")
    commands: dict[str, list[str]] = {}
    for number, (setting, files, _) in enumerate(EARLY.values()):
        folder = base / str(number)
        model = shutil.copytree(ROOT / "rlhf" / "models" / "tiny_policy", folder / "model")
        shutil.copytree(model, folder / "vit")
        (folder / "a.jsonl").write_text(GOOD_ROWS)
        for name, text in files.items():
            (folder / name).write_text(text) if text else (folder / name).unlink()
        minimal = ["recipes=minimal", "model.path=model", "data.train_files=a.jsonl"]
        commands[str(folder)] = [*minimal, *filter(None, [setting])]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "NETRC"))}
    done = subprocess.run(
        [sys.executable, "-c", ANSWER_ALL],
        input=json.dumps(commands),
        env=environ | {"PYTHONPATH": str(ROOT), "HOME": str(base), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(EARLY, json.loads(done.stdout).values(), strict=True))


@pytest.mark.parametrize("mistake", EARLY)
def test_mistakes_in_files_are_told_before_torch_is_imported(answers, mistake):
    code, output, made = answers[mistake]
    assert (code, made) == (EXIT_USER_ERROR, False), output
    assert EARLY[mistake][2] in output
