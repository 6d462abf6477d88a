"""Table of layouts: the functions that every layout has, and the errors for a folder of no known layout."""

import ast
from pathlib import Path

import pytest
import torch

from rlhf.convert.fsdp.fsdp_tensors import AssembledTensor, StoredBox
from rlhf.convert.layouts import LAYOUTS, backends, open_source
from rlhf.convert.stored_tensor import StoredTensor
from rlhf.errors import UserError
from rlhf.models.hf.source import Origin, TensorInfo
from rlhf.storage.disk_errors import DamagedCheckpoint

PACKAGE = Path(__file__).parents[2] / "rlhf"


def test_every_layout_is_in_the_table():
    paths = [path for path in PACKAGE.rglob("layout_*.py") if "recognises" in names_of(path)]
    modules = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in paths}
    assert {entry.module for entry in LAYOUTS} == modules


def names_of(path: Path) -> set[str]:
    """Functions of a module."""
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_layout_has_name_recognises_and_open_source():
    for entry in LAYOUTS:
        layout = entry.load()
        assert layout.NAME
        assert callable(layout.recognises)
        assert callable(layout.open_source)


def test_a_tag_for_a_layout_without_tags_is_an_error(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    for backend in ("auto", "huggingface"):
        with pytest.raises(UserError, match="--tag=step-9 selects one of several saves"):
            open_source(Origin(tmp_path, tag="step-9"), backend)


def test_missing_paths_and_unknown_layouts_are_errors(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path / 'x'} does not exist"):
        open_source(Origin(tmp_path / "x"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is not a folder"):
        open_source(Origin(tmp_path / "file"))
    with pytest.raises(UserError, match=r"contains no checkpoint of a known layout\. Looked for: ") as caught:
        open_source(Origin(tmp_path))
    assert all(entry.known_by in str(caught.value) for entry in LAYOUTS)
    with pytest.raises(UserError, match=r"--backend=nativ is unknown\. Give one of auto"):
        open_source(Origin(tmp_path), "nativ")
    assert backends()[0] == "auto"


def test_a_part_of_our_checkpoint_names_the_checkpoint(tmp_path):
    step = tmp_path / "global_step_2"
    for role in ("actor", "critic"):
        (step / role / "model").mkdir(parents=True)
    (step / "manifest.json").touch()
    for part, hint in (("actor", ""), ("actor/model", ""), ("critic", " and --role critic")):
        with pytest.raises(UserError, match=rf"is a part of the checkpoint {step}\. Give {step}{hint}\."):
            open_source(Origin(step / part))


def test_a_missing_role_is_an_error_that_lists_the_roles(tmp_path):
    for role in ("actor", "critic"):
        (tmp_path / role).mkdir()
        (tmp_path / role / "model_world_size_1_rank_0.pt").touch()
    (tmp_path / "data").mkdir()
    for backend in ("auto", "fsdp"):
        with pytest.raises(UserError, match=r"has no role acter; it has actor, critic\. Set --role, or "):
            open_source(Origin(tmp_path, role="acter"), backend)
    with pytest.raises(UserError, match="contains no checkpoint of a known layout"):
        open_source(Origin(tmp_path / "data", role="acter"))


def test_a_run_directory_of_another_trainer_names_its_newest_step(tmp_path):
    for step in (5, 10):
        (tmp_path / f"global_step_{step}" / "actor").mkdir(parents=True)
        (tmp_path / f"global_step_{step}" / "actor" / "model_world_size_1_rank_0.pt").touch()
    for backend in ("auto", "fsdp"):
        with pytest.raises(UserError, match=f"Give one step, such as {tmp_path / 'global_step_10'}"):
            open_source(Origin(tmp_path), backend)
    with pytest.raises(UserError, match="use `merge` or `import`"):
        open_source(Origin(tmp_path), "native")


def test_overlapping_parts_do_not_form_a_tensor(tmp_path):
    """The parts have as many elements as the whole, but one position occurs twice and another never."""
    (tmp_path / "f").write_bytes(bytes(16))
    parts = [
        StoredTensor(tmp_path / "f", 0, torch.float32, (3,)),
        StoredTensor(tmp_path / "f", 12, torch.float32, (1,)),
    ]
    spread = AssembledTensor(TensorInfo((4,), torch.float32), [StoredBox((0,), parts[0]), StoredBox((2,), parts[1])])
    with pytest.raises(DamagedCheckpoint, match="do not form a tensor of"):
        spread.read(0, 4)
    spread = AssembledTensor(TensorInfo((4,), torch.float32), [StoredBox((0,), parts[0]), StoredBox((3,), parts[1])])
    assert spread.read(0, 4).tolist() == [0.0] * 4
