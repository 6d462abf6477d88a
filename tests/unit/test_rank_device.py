"""The GPU of a rank, by local rank or the only one that the rank sees, and the switches that a rank sets for it."""

import os

import pytest
import torch

from rlhf.backends import deepspeed
from rlhf.ranks.collectives import configure_cuda, pick_device
from tests.support.refusals import says, user_error


@pytest.mark.parametrize(("visible", "index"), [(8, 3), (1, 0)])
def test_a_rank_takes_a_gpu_that_it_sees(monkeypatch, visible: int, index: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert pick_device("cuda") == pick_device("auto") == torch.device("cuda", index)
    assert pick_device("cpu") == torch.device("cpu")


def test_more_ranks_than_gpus_are_an_error_of_the_user(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("RANK", "10")
    monkeypatch.setenv("LOCAL_RANK", "2")
    says(user_error(pick_device, "auto"), "device=auto", "rank 10", "2 GPUs", "--nproc-per-node", "trainer.device=cpu")


@pytest.mark.parametrize(("device", "selected"), [("cuda:0", "0"), ("cuda:3", "3"), ("cpu", "3")])
def test_deepspeed_selects_the_rank_s_gpu(monkeypatch, device: str, selected: str) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("DS_ACCELERATOR", "")
    deepspeed._set_device_variables(torch.device(device))
    assert os.environ["LOCAL_RANK"] == selected  # DeepSpeed passes it to set_device
    assert os.environ["DS_ACCELERATOR"] == torch.device(device).type


@pytest.mark.parametrize(("tf32", "precision"), [(True, "high"), (False, "highest")])
def test_a_rank_on_a_gpu_attends_without_cudnn(monkeypatch, tf32: bool, precision: str) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.backends.cuda.cudnn_sdp_enabled(), torch.get_float32_matmul_precision()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        configure_cuda(tf32=tf32)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        # The other attention kernels stay enabled, and torch chooses among them.
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
        assert torch.get_float32_matmul_precision() == precision
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"]
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before[0])
        torch.set_float32_matmul_precision(before[1])
