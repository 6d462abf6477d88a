"""Fingerprints of model folders: which changes of a file show."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlhf.models.fingerprint import SAMPLE_BYTES, SAMPLES, fingerprint

LAYERS = 40
LAYER = SAMPLES * SAMPLE_BYTES // LAYERS // 4 + 1000


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model of many layers, of which samples at even distances miss some."""
    torch.manual_seed(0)
    tensors = {f"layers.{i}.weight": torch.randn(2 * LAYER) for i in range(LAYERS)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_size > SAMPLES * SAMPLE_BYTES
    return tmp_path


def test_one_trained_layer_of_a_large_file_shows(folder):
    path = folder / "model.safetensors"
    content, before = path.read_bytes(), fingerprint(folder)
    begin = len(content) - 4 * 2 * LAYER * LAYERS
    seen = set()
    for i in range(0, LAYERS, 7):
        at = begin + 4 * 2 * LAYER * i
        path.write_bytes(content[:at] + bytes(4 * 2 * LAYER) + content[at + 4 * 2 * LAYER :])
        seen.add(fingerprint(folder))
    assert len(seen) == len(range(0, LAYERS, 7))
    assert before not in seen
    path.write_bytes(content)
    assert fingerprint(folder) == before


def test_what_is_no_file_has_no_part_in_it(tmp_path):
    """A pipe, which a downloaded archive may bring along, would be read for ever."""
    (tmp_path / "config.json").write_text("{}")
    before = fingerprint(tmp_path)
    os.mkfifo(tmp_path / "more.json")
    (tmp_path / "folder.txt").mkdir()
    assert fingerprint(tmp_path) == before


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"a": 1}',
        b'{"a": {"data_offsets": [-5, 3]}}',
        b'{"a": {"data_offsets": ["x", 3]}}',
        b"[" * 90_000,
    ],
    ids=["list", "torn", "number", "negative", "text", "deep"],
)
def test_a_large_damaged_file_has_one_too(tmp_path, header):
    content = len(header).to_bytes(8, "little") + header
    (tmp_path / "model.safetensors").write_bytes(content + bytes(SAMPLES * SAMPLE_BYTES))
    assert fingerprint(tmp_path) == fingerprint(tmp_path)
