"""Files that claim impossible tensor shapes: `merge` rejects them with a one-line error."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from rlhf.checkpoint.__main__ import main
from rlhf.errors import EXIT_CRASHED, EXIT_USER_ERROR
from tests.support.tiny_models import causal_lm

NAME = "lm_head.weight"
SHAPES = {
    "huge": [2**63, 1],
    "beyond all memory": [2**20, 2**20],
    "beyond 64 bits": [2**70],
    "empty and beyond 64 bits": [0, 2**70],
    "empty, with strides beyond 64 bits": [1, 2**62, 0],
    "empty and beyond all memory": [0, 2**44],
    "negative": [-4, -4],
    "not whole": [1.5],
    "many dimensions": [1] * 100,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    causal_lm("llama", folder)
    return folder


def header_of(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = file.read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[length:])


def assert_refused(folder: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["merge", "--local_dir", str(folder), "--target_dir", str(target)])
    error = capsys.readouterr().err
    assert code in (EXIT_CRASHED, EXIT_USER_ERROR)
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not target.exists()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", [NAME, "another"])
def test_in_a_safetensors_header(model, tmp_path, capsys, shape, name):
    folder = shutil.copytree(model, tmp_path / "bad")

    def change(header: dict[str, Any]) -> None:
        end = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
        offsets = header[name]["data_offsets"] if name in header else [end, end]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}

    header_of(folder / "model.safetensors", change)
    assert_refused(folder, tmp_path / "out", capsys)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("whole", [True, False])
def test_in_the_metadata_of_a_dcp_folder(model, tmp_path, capsys, shape, whole):
    """The tensor has the impossible shape, or both the tensor and its only chunk have it."""
    folder = tmp_path / "bad"
    dcp.save({"model": load_file(model / "model.safetensors")}, checkpoint_id=str(folder), no_dist=True)
    shutil.copy(model / "config.json", folder)
    described = pickle.loads((folder / ".metadata").read_bytes())
    entry = described.state_dict_metadata[f"model.{NAME}"]
    entry.size = tuple(shape)
    if whole:
        entry.chunks[:] = [ChunkStorageMetadata(offsets=(0,) * len(shape), sizes=tuple(shape))]
    (folder / ".metadata").write_bytes(pickle.dumps(described))
    assert_refused(folder, tmp_path / "out", capsys)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_in_the_offsets_of_a_ranks_safetensors(model, tmp_path, capsys, shape):
    folder = shutil.copytree(model, tmp_path / "bad")
    file = (folder / "model.safetensors").rename(folder / "shard-00001-model-00001-of-00001.safetensors")

    def change(header: dict[str, Any]) -> None:
        names = header.keys() - {"__metadata__"}
        places = {name: {"saved_offsets": [0] * len(header[name]["shape"])} for name in names}
        places[NAME] = {"saved_offsets": shape}
        header["__metadata__"] = {"DCP_SHARDING_INFO": json.dumps(places)}

    header_of(file, change)
    assert_refused(folder, tmp_path / "out", capsys)
