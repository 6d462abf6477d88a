"""Makes a release's runs for later releases to resume: run `python -m tests.support.release_checkpoints` once per
release, on the commit of the release.

Writes `tests/data/releases/VERSION.tar.gz` with the policy, prompts and reward of the runs; the run directory of each
of `RUNS` as a SIGKILL left it in the step after its only checkpoint; and `expected.json` with the state that a resume
restored on that commit (see `restored_state`), the resumed run's end, and the place (see `digests`). First it compares
each resumed run with an undisturbed run.

All paths in the stored settings are relative, so a copy of the folder resumes anywhere from inside.
"""

import gzip
import json
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import rlhf
from rlhf.events import LISTENER_VARIABLE
from tests.support.compare_runs import differences, history
from tests.support.digests import place
from tests.support.forked_start import train_forked
from tests.support.killer import PLAN_VARIABLE
from tests.support.launching import ROOT, TINY_POLICY, copy_run, saved_steps, write_sums
from tests.support.restored_state import environment, recorded

RELEASES = ROOT / "tests" / "data" / "releases"
SAVED, STEPS = 2, 4
"""Step of the checkpoint, and last step of the run."""
LORA = ("model.lora.enabled=true", "model.lora.rank=2", "model.lora.alpha=4", "actor.optim.lr=0.02")
ZERO2 = ("backend=deepspeed", "backend.zero_stage=2")
REWARD = '''"""Reward of the runs: the share of different letters in the response."""


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    return len(set(solution_str)) / max(1, len(solution_str))
'''


@dataclass(frozen=True)
class Run:
    """A run's settings besides `command`'s, and its number of ranks."""

    settings: tuple[str, ...]
    nproc: int = 2


RUNS = {
    "fsdp2": Run(
        ("actor.use_kl_loss=true", "ref.update_freq=2", "checkpoint.contents=[model,optimizer,extra,hf_model]")
    ),
    "fsdp2_lora": Run(LORA),
    "zero2": Run(("algorithm=ppo", "critic.optim.lr=1e-2", "algorithm.kl_ctrl.type=adaptive", *ZERO2)),
    "zero2_lora": Run((*LORA, *ZERO2)),
    # A generation has more prompts than a batch, so groups are carried over. They are too few for the next batch, so
    # the killed step generates, too.
    "dapo": Run(
        (
            "algorithm=dapo",
            "data.gen_batch_size=5",
            "reward.overlong_buffer.len=2",
            "checkpoint.journal=true",
        )
    ),
}


def command(name: str) -> list[str]:
    """Return the settings of a run, which starts in the folder of its files."""
    run = RUNS[name]
    return [
        "recipes=null",
        "trainer.default_local_dir=runs",
        f"trainer.experiment_name={name}",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={SAVED}",
        "trainer.device=cpu",
        "trainer.threads_per_rank=1",
        f"trainer.nproc={run.nproc}",
        # So a kill leaves the same steps on disk, however slow the machine is.
        "checkpoint.async_save=false",
        "model.path=policy",
        "data.train_files=sums.jsonl",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        "reward.functions=[reward.py:score]",
        "rollout.n=4",
        "actor.ppo_mini_batch_size=2",
        "actor.optim.lr=5e-3",
        "actor.optim.lr_scheduler_type=cosine",
        *run.settings,
    ]


def make(folder: Path) -> dict[str, Any]:
    """Make the files and all runs in `folder`; return the content of `expected.json`."""
    make_policy(folder / "policy")
    write_sums(folder / "sums.jsonl")
    (folder / "reward.py").write_text(REWARD)
    return {"place": place(), "runs": {name: make_run(folder, name) for name in RUNS}}


def make_policy(folder: Path) -> None:
    """Save a random policy of 13 thousand weights with the bundled policy's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for path in TINY_POLICY.glob("*token*"):
        shutil.copy(path, folder)
    shutil.copy(TINY_POLICY / "chat_template.jinja", folder)


def make_run(folder: Path, name: str) -> dict[str, Any]:
    """Leave the killed run in `folder`/runs/rlhf/`name`; return its resume's restored state and end."""
    with tempfile.TemporaryDirectory() as scratch:
        calm, resumed = (Path(scratch, state) for state in ("calm", "resumed"))
        copy_files(folder, calm)
        _train(calm, name)
        plan = Path(scratch, "plan", "kills.json")
        plan.parent.mkdir()
        last = RUNS[name].nproc - 1
        plan.write_text(
            json.dumps(
                [{"id": 0, "event": "update.mid", "observer": last, "victim": "supervisor", "after_step": SAVED}]
            )
        )
        plan.with_name("run_dir").write_text(str(run_dir(folder, name)))
        killer = {LISTENER_VARIABLE: "tests.support.killer:on_event", PLAN_VARIABLE: str(plan)}
        _train(folder, name, killer, code=-9)
        assert saved_steps(run_dir(folder, name)) == [SAVED]
        copy_files(folder, resumed)
        copy_run(run_dir(folder, name), run_dir(resumed, name), SAVED)
        record = Path(scratch, "record")
        _train(resumed, name, environment(record))
        found = differences(run_dir(calm, name), run_dir(resumed, name))
        assert not found, found
        return {
            "restored": recorded(record, "restored"),
            "final": recorded(record, "final"),
            "history": history(run_dir(resumed, name)),
        }


def run_dir(folder: Path, name: str) -> Path:
    """Return the directory of a run with files in `folder`."""
    return folder / "runs" / "rlhf" / name


def copy_files(source: Path, target: Path) -> None:
    """Copy the runs' input files."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("runs", "__pycache__"))


def _train(folder: Path, name: str, variables: dict[str, str] | None = None, code: int = 0) -> None:
    end = train_forked(command(name), {"PYTHONPATH": str(ROOT), **(variables or {})}, folder=folder)
    assert end.code == code, end.output


def pack(folder: Path, target: Path) -> None:
    """Write `folder` to a tar.gz with reproducible bytes, without files that name this machine or its processes."""
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and not path.name.endswith((".lock", ".log", ".pyc")) and "/status/" not in name:
                content = path.read_bytes()
                assert str(folder).encode() not in content, name
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(content), 0o644
                tar.addfile(entry, BytesIO(content))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(gzip.compress(packed.getvalue(), 9, mtime=0))


def unpack(release: str, folder: Path) -> dict[str, Any]:
    """Unpack the files of `release` in `folder`; return the content of `expected.json`."""
    with tarfile.open(RELEASES / f"{release}.tar.gz") as tar:
        tar.extractall(folder, filter="data")
    return json.loads((folder / "expected.json").read_text())


def releases() -> Sequence[str]:
    """Return the releases with runs in the tests, oldest first."""
    names = [path.name.removesuffix(".tar.gz") for path in RELEASES.glob("*.tar.gz")]
    return sorted(names, key=lambda name: [int(part) for part in name.split(".")])


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "runs_of_a_release")
        folder.mkdir()
        expected = make(folder)
        (folder / "expected.json").write_text(json.dumps(expected, sort_keys=True))
        pack(folder, RELEASES / f"{rlhf.__version__}.tar.gz")


if __name__ == "__main__":
    main()
