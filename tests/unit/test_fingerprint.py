"""Fingerprints of model folders: the changes of files that they reveal."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlhf.assemble.model_sources import resolve_models
from rlhf.config import ModelConfig
from rlhf.models.fingerprint import SAMPLE_BYTES, SAMPLES, code_fingerprint, fingerprint
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from tests.support.tiny_models import TINY_POLICY

LAYERS = 40
LAYER = SAMPLES * SAMPLE_BYTES // LAYERS // 4 + 1000


@pytest.fixture
def folder(tmp_path) -> Path:
    """Make a model of many layers; byte samples at even distances would miss some layers."""
    torch.manual_seed(0)
    tensors = {f"layers.{i}.weight": torch.randn(2 * LAYER) for i in range(LAYERS)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_size > SAMPLES * SAMPLE_BYTES
    return tmp_path


def test_a_change_of_any_layer_of_a_large_file_changes_the_fingerprint(folder):
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


def test_pipes_and_folders_do_not_affect_the_fingerprint(tmp_path):
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
def test_a_large_file_with_a_damaged_header_has_a_fingerprint(tmp_path, header):
    content = len(header).to_bytes(8, "little") + header
    (tmp_path / "model.safetensors").write_bytes(content + bytes(SAMPLES * SAMPLE_BYTES))
    assert fingerprint(tmp_path) == fingerprint(tmp_path)


def test_model_code_has_a_separate_fingerprint(tmp_path):
    assert code_fingerprint(tmp_path) == ""
    before = fingerprint(tmp_path)
    (tmp_path / "modeling_own.py").write_text("scale = 1.0\n")
    first = code_fingerprint(tmp_path)
    (tmp_path / "modeling_own.py").write_text("scale = 2.0\n")
    assert len({"", first, code_fingerprint(tmp_path)}) == 3
    assert fingerprint(tmp_path) == before  # checkpoints of all releases have this hash


def test_changed_model_code_changes_fingerprints_only_if_code_is_trusted(tmp_path):
    coordinator = Coordinator(GlooTransport())
    shutil.copytree(TINY_POLICY, tmp_path / "model")
    code = tmp_path / "model" / "modeling_own.py"

    def seen(trusted: bool) -> dict[str, str]:
        model = ModelConfig(path=str(tmp_path / "model"), trust_remote_code=trusted)
        device, scratch = torch.device("cpu"), tmp_path / "scratch"
        return resolve_models(model, None, None, coordinator, device, scratch).fingerprints

    code.write_text("scale = 1.0\n")
    trusted, plain = seen(True), seen(False)
    code.write_text("scale = 2.0\n")
    assert seen(False) == plain == {"model.path": trusted["model.path"]}
    assert seen(True).keys() == trusted.keys() == {"model.path", "model.trust_remote_code"}
    assert seen(True)["model.trust_remote_code"] != trusted["model.trust_remote_code"]
