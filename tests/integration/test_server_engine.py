"""Servers that nobody can reach, on several ranks: one error for all of them. With servers: tests/faults/test_vllm_servers.py."""

from functools import partial
from pathlib import Path

import torch

from rlhf.config import Config
from rlhf.ranks.coordinator import Coordinator
from rlhf.rollout.servers.server_engine import build_server_engine
from rlhf.rollout.servers.watch import ServersFailed
from tests.support.numeric_ranks import run_ranks
from tests.support.tiny_models import TINY_POLICY


def told(folder: Path) -> str:
    """What this rank learns of servers that do not come up."""
    config = Config()
    config.trainer.default_local_dir = str(folder)
    config.rollout.name, config.rollout.servers.urls = "vllm_server", ["http://127.0.0.1:9"]
    config.rollout.servers.start_timeout_s, config.rollout.servers.max_failures = 0.1, 0
    files = {"config.json": (TINY_POLICY / "config.json").read_bytes()}
    try:
        build_server_engine(config, files, [1], Coordinator(), torch.device("cpu"))
    except ServersFailed as error:
        return str(error)
    return ""


def test_servers_that_do_not_come_up_are_an_error_on_every_rank(tmp_path):
    first, second = run_ranks(2, partial(told, tmp_path))
    assert first == second
    assert "http://127.0.0.1:9: dead; did not get ready in time" in first
    assert "rollout.servers.max_failures=0" in first
