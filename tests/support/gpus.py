"""Marks tests that need a CUDA device, and lists both devices for tests cheap enough to run on each."""

import pytest
import torch

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
