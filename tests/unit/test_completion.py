"""Shell completion: the words that are offered, and the script in a real shell."""

import shutil
import subprocess
import sys
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
    assert completion.choices(word, LIBRARY) == some


def test_a_request_for_another_shell_is_refused():
    with pytest.raises(UserError, match=r"install=fish is unknown\. Give install=bash or install=zsh"):
        completion.answer("install=fish", LIBRARY)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [("rollout=v", ["vllm", "vllm_server"]), ("trainer.seed=1 actor.kl_loss_t", ["actor.kl_loss_type="])],
)
def test_bash_completes(tmp_path, typed, offered):
    line = f"python -m rlhf.train {typed}"
    (tmp_path / "python").symlink_to(sys.executable)
    script = completion.answer("install=bash", LIBRARY) + (
        f'COMP_LINE="{line}"; COMP_POINT={len(line)}; COMP_WORDS=("$1" -m rlhf.train); COMP_WORDBREAKS=$\' =\'\n'
        '_rlhf_train; printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "-c", script, "bash", sys.executable],
        capture_output=True,
        text=True,
        cwd=Path(completion.__file__).parents[1],
    )
    assert (done.stdout.split(), done.stderr) == (offered, "")
