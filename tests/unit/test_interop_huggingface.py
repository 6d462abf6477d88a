"""Layout `huggingface`: folders as on the Hub, in one file or several, in safetensors or pickles."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf.convert.huggingface.layout_huggingface import PICKLE, PICKLE_INDEX
from rlhf.errors import UserError
from rlhf.storage.disk_errors import DamagedCheckpoint
from tests.support import tiny_models
from tests.support.checkpoints import equal_bits, flip_bit
from tests.support.sources import opened, whole


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_models.causal_lm("qwen2", tmp_path_factory.mktemp("whole"))


def saved(model, folder: Path, **options) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def tensors_of(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("size", ["5GB", "4KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_safetensors(model, tmp_path, size, dtype):
    folder = saved(model, tmp_path, max_shard_size=size)
    if dtype != torch.float32:
        model = type(model).from_pretrained(folder, dtype=dtype)
        for path in folder.glob("model*"):
            path.unlink()
        saved(model, folder, max_shard_size=size)
    assert len(list(folder.glob("*.safetensors"))) > (1 if size == "4KB" else 0)
    for chunk in (None, 5):
        with opened(folder) as source:
            assert equal_bits(whole(source, chunk), tensors_of(model))  # tied weights once
            assert (source.layout, source.contents.model_files) == ("huggingface", folder)


@pytest.mark.parametrize("shards", [1, 3])
def test_pickles(model, tmp_path, shards):
    state = tensors_of(model)
    (tmp_path / "config.json").write_text(model.config.to_json_string())
    if shards == 1:
        torch.save(state, tmp_path / PICKLE)
    else:
        files = {name: f"pytorch_model-{n % shards + 1:05d}-of-{shards:05d}.bin" for n, name in enumerate(state)}
        for file in set(files.values()):
            torch.save({name: state[name] for name in state if files[name] == file}, tmp_path / file)
        (tmp_path / PICKLE_INDEX).write_text(json.dumps({"weight_map": files}))
    for chunk in (None, 5):
        with opened(tmp_path) as source:
            assert equal_bits(whole(source, chunk), state)


def test_a_flipped_bit_in_a_pickle_is_found(model, tmp_path):
    (tmp_path / "config.json").write_text(model.config.to_json_string())
    torch.save(tensors_of(model), tmp_path / PICKLE)
    flip_bit(tmp_path / PICKLE, (tmp_path / PICKLE).stat().st_size // 2)
    with opened(tmp_path) as source, pytest.raises(DamagedCheckpoint, match=PICKLE):
        whole(source)


def test_pickles_with_other_objects_than_tensors_are_rejected(tmp_path):
    torch.save({"a": torch.ones(2), "path": tmp_path}, tmp_path / PICKLE)
    with pytest.raises(UserError, match="uses pathlib"), opened(tmp_path):
        pass
    torch.save([1], tmp_path / PICKLE)
    with pytest.raises(UserError, match="contains more than named tensors"), opened(tmp_path):
        pass


def test_broken_folders(model, tmp_path):
    folder = saved(model, tmp_path, max_shard_size="4KB")
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    first = folder / sorted(set(listed.values()))[0]

    def check_rejected(kind: type[Exception], message: str) -> None:
        with pytest.raises(kind, match=message), opened(folder):
            pass

    size = first.stat().st_size
    os.truncate(first, size - 3)
    check_rejected(
        DamagedCheckpoint, rf"{first.name} has {size - 3} bytes, its header needs {size}: the file is cut off"
    )
    os.truncate(first, 5)
    check_rejected(DamagedCheckpoint, first.name)
    first.unlink()
    check_rejected(UserError, rf"lacks {first.name}, which model\.safetensors\.index\.json lists\. Restore")
    saved(model, folder, max_shard_size="4KB")
    index.write_text(json.dumps({"weight_map": listed | {"more.weight": first.name}}))
    check_rejected(DamagedCheckpoint, f"{first.name} lacks more.weight, which the index lists")
    for text in ("{", "[]", '{"weight_map": 3}', json.dumps({"weight_map": {"a": "../x.safetensors"}})):
        index.write_text(text)
        check_rejected(DamagedCheckpoint, "is not an index of weights")
    saved(model, folder, max_shard_size="4KB")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "quantization_config": {}}))
    check_rejected(UserError, "is quantized")


def test_files_of_save_pretrained_are_read_bit_for_bit(model, tmp_path):
    folder = saved(model, tmp_path)
    with opened(folder) as source:
        assert equal_bits(whole(source), load_file(folder / "model.safetensors"))
