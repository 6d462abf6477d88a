"""Unreachable servers: one error for all ranks. tests/faults/test_vllm_servers.py tests running servers."""

from functools import partial
from pathlib import Path

import torch

from rlhf.config import RolloutConfig, ServersConfig
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.rollout.policy_files import PolicyFiles
from rlhf.rollout.servers.fleet_loop import ServersFailed
from rlhf.rollout.servers.server_engine import build_server_engine
from tests.support.numeric_ranks import run_ranks
from tests.support.tiny_models import TINY_POLICY


def start_error(folder: Path) -> str:
    """Return this rank's error for servers that do not start."""
    servers = ServersConfig(urls=["http://127.0.0.1:9"], start_timeout_s=0.1, max_failures=0)
    config = RolloutConfig(name="vllm_server", servers=servers)
    files = {"config.json": (TINY_POLICY / "config.json").read_bytes()}
    try:
        build_server_engine(
            config,
            PolicyFiles(files, folder / "model", [1], 64),
            Coordinator(GlooTransport()),
            torch.device("cpu"),
            logs=folder / "logs",
            run_id="run",
        )
    except ServersFailed as error:
        return str(error)
    return ""


def test_servers_that_do_not_come_up_are_an_error_on_every_rank(tmp_path):
    first, second = run_ranks(2, partial(start_error, tmp_path))
    assert first == second
    assert "http://127.0.0.1:9: dead; did not get ready in time" in first
    assert "rollout.servers.max_failures=0" in first
