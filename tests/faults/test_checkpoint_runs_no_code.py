"""Foreign checkpoint folders run no code: pickles, torch files and YAML tags in place of every file."""

import json
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from rlhf.checkpoint.commit.manifest import _text, read_manifest
from rlhf.errors import UserError
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import step_dir
from tests.support.checkpoints import PlainRole, files_of, make_checkpointer, make_config, resume, save_steps
from tests.support.hashes import hash_file


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.fixture
def bomb(tmp_path) -> Path:
    return tmp_path / "exploded"


def payloads(bomb: Path, folder: Path) -> dict[str, bytes]:
    torch.save({"weight": Bomb(bomb)}, folder / "payload.pt")
    return {
        "pickle": pickle.dumps(Bomb(bomb)),
        "torch": (folder / "payload.pt").read_bytes(),
        "yaml": f"!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{bomb}']]\n".encode(),
        "yaml-os": f"a: !!python/object/apply:os.system ['touch {bomb}']\n".encode(),
    }


def reseal(checkpoint: Path) -> None:
    """Make the manifest agree with the files, as an attacker would."""
    payload = json.loads((checkpoint / "manifest.json").read_text())["payload"]
    for name, entry in payload["files"].items():
        entry["size"], entry["xxh3_128"] = hash_file(checkpoint / name)
    (checkpoint / "manifest.json").write_bytes(_text(payload))
    read_manifest(checkpoint)


def look_and_resume(config, role) -> None:
    for action in ("list", "inspect", "verify"):
        subprocess.run(
            [sys.executable, "-m", "rlhf.checkpoint", action, config.run_dir], capture_output=True, check=False
        )
    make_checkpointer(config, role).resume()


def test_the_payloads_would_run_code_if_loaded(tmp_path, bomb):
    for kind, payload in payloads(bomb, tmp_path).items():
        bomb.unlink(missing_ok=True)
        (tmp_path / "live").write_bytes(payload)
        if kind == "pickle":
            pickle.loads(payload)
        elif kind == "torch":
            torch.load(tmp_path / "live", weights_only=False)
        else:
            continue
        assert bomb.exists()


@pytest.mark.parametrize("kind", ["pickle", "torch", "yaml", "yaml-os"])
@pytest.mark.parametrize("sealed", [False, True])
def test_no_file_of_a_checkpoint_runs_code(tmp_path, bomb, kind, sealed):
    # Promise 14.
    payload = payloads(bomb, tmp_path)[kind]
    config = make_config(tmp_path)
    config.checkpoint.contents = ["model", "optimizer", "extra", "hf_model"]
    save_steps(config, PlainRole(), 3)
    checkpoint = step_dir(config.run_dir, 3)
    for name in sorted(files_of(checkpoint)):
        original = (checkpoint / name).read_bytes(), (checkpoint / "manifest.json").read_bytes()
        (checkpoint / name).write_bytes(payload)
        if sealed and name != "manifest.json":
            reseal(checkpoint)
        # The kind of error does not matter. A file that is not read causes no error.
        with suppress(Exception):
            make_checkpointer(config, PlainRole()).resume()
        assert not bomb.exists(), name
        damaged = config.run_dir / "global_step_3.damaged-1"
        if damaged.exists():
            damaged.rename(checkpoint)
        (checkpoint / name).write_bytes(original[0])
        (checkpoint / "manifest.json").write_bytes(original[1])
    assert resume(config, PlainRole()) == 3


def test_pickles_that_lie_beside_the_files_are_not_touched(tmp_path, bomb):
    config = make_config(tmp_path)
    config.checkpoint.contents = ["model", "optimizer", "extra", "hf_model"]
    save_steps(config, PlainRole(seed=4), 3)
    checkpoint = step_dir(config.run_dir, 3)
    for name, payload in payloads(bomb, tmp_path).items():
        for place in (
            f"{name}.pkl",
            "optimizer.pt",
            "actor/model/pytorch_model.bin",
            "actor/huggingface/pytorch_model.bin",
            "rng/rng_state_0.pth",
            "data.pt",
        ):
            (checkpoint / place).write_bytes(payload)
        role = PlainRole()
        look_and_resume(config, role)
        assert role.position == 4
        assert not bomb.exists()


def test_the_command_survives_a_hostile_manifest(tmp_path, bomb):
    config = make_config(tmp_path)
    save_steps(config, PlainRole(), 3)
    manifest = step_dir(config.run_dir, 3) / "manifest.json"
    for payload in payloads(bomb, tmp_path).values():
        manifest.write_bytes(payload)
        for action in ("list", "inspect", "verify"):
            done = subprocess.run(
                [sys.executable, "-m", "rlhf.checkpoint", action, config.run_dir],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 1
            assert "manifest.json is damaged" in done.stdout
            assert done.stderr == ""
        with pytest.raises(DamagedCheckpoint):
            read_manifest(manifest.parent)
    with pytest.raises(UserError):
        make_checkpointer(config, PlainRole()).resume()
    assert not bomb.exists()
