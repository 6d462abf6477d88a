"""Shell completion: the words that are offered, and the script in a real shell."""

import importlib
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from rlhf.cli import completion
from rlhf.config.library import Library
from rlhf.errors import UserError

LIBRARY = Library.find(None)


@pytest.mark.parametrize(
    ("word", "some"),
    [
        ("alg", ["algorithm.", "algorithm="]),
        ("algorithm=g", ["algorithm=grpo", "algorithm=gspo"]),
        ("recipes=min", ["recipes=minimal"]),
        ("trainer.watchdog=", ["trainer.watchdog=false", "trainer.watchdog=true"]),
        ("actor.optim.lr_s", ["actor.optim.lr_scheduler_interval=", "actor.optim.lr_scheduler_type="]),
        (
            "actor.optim.lr_scheduler_type=c",
            ["actor.optim.lr_scheduler_type=constant", "actor.optim.lr_scheduler_type=cosine"],
        ),
        ("ref.update_freq=", ["ref.update_freq=null"]),
        ("actor.opt", ["actor.optim."]),
        ("--ver", ["--version"]),
        ("nothing.", []),
    ],
)
def test_choices(word, some):
    assert completion.choices(f"python -m rlhf.train {word}", LIBRARY) == some


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("python -m rlhf.s", ["rlhf.samples", "rlhf.status"]),
        ("python -m rlhf.status --", ["--help", "--json", "--port", "--serve", "--watch"]),
        ("python -m rlhf.status runs/", []),
        ("python -m rlhf.launch.slurm trainer.nnodes=2 --dry", ["--dry-run"]),
        ("python -m rlhf.evaluate model recipes=min", ["recipes=minimal"]),
        ("python -m rlhf.compare recipes=min", []),
    ],
)
def test_choices_of_all_commands(line, some):
    assert completion.choices(line, LIBRARY) == some


@pytest.mark.parametrize("command", completion.OPTIONS)
def test_every_command_has_help_with_the_options_that_are_offered(command, capsys):
    module = importlib.import_module(command)
    main = (module if hasattr(module, "main") else importlib.import_module(f"{command}.__main__")).main
    with suppress(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    offered = set(completion.OPTIONS[command])
    assert f"python -m {command}" in text
    # argparse's own list, or the lines of Hydra's help.
    listed = set(re.findall(r"^  +(?:-\w(?: [A-Z]+)?, )?(--[a-z][a-z-]+)", text, re.MULTILINE))
    if command == "rlhf.train":
        listed = set(re.findall(r"--[a-z][a-z-]+", text))
        assert offered <= listed
    else:
        assert offered == listed


def test_a_request_for_another_shell_is_refused():
    with pytest.raises(UserError, match=r"install=fish is unknown\. Give install=bash or install=zsh"):
        completion.answer("install=fish", LIBRARY)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("train rollout=v", ["vllm", "vllm_server"]),
        ("train trainer.seed=1 actor.kl_loss_t", ["actor.kl_loss_type="]),
        ("status RUN --se", ["--serve"]),
        ("tra", ["rlhf.train", "rlhf.translate"]),
    ],
)
def test_bash_completes(tmp_path, typed, offered):
    line = f"python -m rlhf.{typed}"
    (tmp_path / "python").symlink_to(sys.executable)
    script = completion.answer("install=bash", LIBRARY) + (
        f'COMP_LINE="{line}"; COMP_POINT={len(line)}; COMP_WORDS=("$1" -m rlhf.train); COMP_WORDBREAKS=$\' =\'\n'
        '_rlhf; printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "-c", script, "bash", sys.executable],
        capture_output=True,
        text=True,
        cwd=Path(completion.__file__).parents[1],
    )
    assert (done.stdout.split(), done.stderr) == (offered, "")
