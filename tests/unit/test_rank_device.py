"""The GPU of a rank: by local rank where ranks see all GPUs of a node, or the one GPU that a rank sees."""

import os

import pytest
import torch

from rlhf.backends import deepspeed
from rlhf.ranks.collectives import pick_device


@pytest.mark.parametrize(("visible", "index"), [(8, 3), (1, 0)])
def test_a_rank_takes_a_gpu_that_it_sees(monkeypatch, visible: int, index: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert pick_device("cuda") == pick_device("auto") == torch.device("cuda", index)
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(("device", "selected"), [("cuda:0", "0"), ("cuda:3", "3"), ("cpu", "3")])
def test_deepspeed_selects_the_rank_s_gpu(monkeypatch, device: str, selected: str) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("DS_ACCELERATOR", "")
    deepspeed._set_device_variables(torch.device(device))
    assert os.environ["LOCAL_RANK"] == selected  # DeepSpeed passes it to set_device
    assert os.environ["DS_ACCELERATOR"] == torch.device(device).type
