"""The layout of a Hugging Face folder's weights is one that other tools read."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig

from rlhf.storage import hf_layout
from rlhf.storage.hf_layout import index_of_weights, lay_out_weights, with_dtype

TENSORS = {
    "a": ("BF16", (3,)),
    "b": ("F32", (2, 5)),
    "c": ("I64", ()),
    "d": ("U8", (7,)),
    "e": ("F32", (0, 4)),
    "f": ("F16", (1,)),
}


def written(folder, file, seed: int) -> dict[str, torch.Tensor]:
    """Write random bytes for each tensor where the layout has it; returns them."""
    content, tensors = bytearray(file.header.ljust(file.size, b"\0")), {}
    assert len(content) == file.size
    for name, first in file.first_byte.items():
        dtype, shape = TENSORS[name]
        kind = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64, "U8": torch.uint8}
        tensor = torch.randint(100, shape, generator=torch.Generator().manual_seed(seed))
        tensors[name] = tensor.to(kind.get(dtype, torch.float16))
        raw = tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes()
        assert first % max(1, tensors[name].element_size()) == 0  # aligned
        content[first : first + len(raw)] = raw
    (folder / file.name).write_bytes(content)
    return tensors


@pytest.mark.parametrize("shard_bytes", [1, 20, 60, 1000])
def test_safetensors_opens_what_is_written_by_the_layout(tmp_path, monkeypatch, shard_bytes):
    monkeypatch.setattr(hf_layout, "SHARD_BYTES", shard_bytes)
    files = lay_out_weights(TENSORS)
    found = {}
    for number, file in enumerate(files):
        expected = written(tmp_path, file, number)
        with safe_open(tmp_path / file.name, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in opened.keys():  # noqa: SIM118
                assert torch.equal(opened.get_tensor(name), expected[name])
                found[name] = file.name
        assert file.size - len(file.header) <= shard_bytes or len(file.first_byte) == 1
    assert found.keys() == TENSORS.keys()
    index = index_of_weights(files)
    if len(files) == 1:
        assert (files[0].name, index) == ("model.safetensors", {})
        return
    document = json.loads(index["model.safetensors.index.json"])
    assert document == {"metadata": {"total_size": 6 + 40 + 8 + 7 + 2}, "weight_map": found}
    assert [file.name for file in files] == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]


def test_configuration_says_the_type_of_the_weights(tmp_path):
    small = {"config.json": b'{"model_type": "qwen2", "torch_dtype": "float32"}', "tokenizer.json": b"{}"}
    assert with_dtype(small, None) == small
    config = with_dtype(small, "bfloat16")
    assert config["tokenizer.json"] == small["tokenizer.json"]
    (tmp_path / "config.json").write_bytes(config["config.json"])
    assert AutoConfig.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert small["config.json"].count(b"float32") == 1
