"""A rollout server's command line and environment, from the settings."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlhf.config import RolloutConfig
from rlhf.rollout.servers.__main__ import server_flags
from rlhf.rollout.servers.keeper import Keeper, processes_of
from rlhf.rollout.servers.secret import VARIABLE, Secret
from rlhf.rollout.servers.server_process import ServerProcess, as_flags, environment, flags

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SECRET = Secret("of-this-run-alone", "here")


def value(words: list[str], flag: str) -> str:
    """Return the value of the last `flag` in `words`, as argparse reads it."""
    found = [word.partition("=")[2] or words[i + 1] for i, word in enumerate(words) if word.split("=")[0] == flag]
    return found[-1]


def test_settings_become_flags():
    config = RolloutConfig(dtype="bfloat16", max_num_seqs=7, tensor_model_parallel_size=2, gpu_memory_utilization=0.25)
    words = flags(config, Path("model"), 96, CUDA)
    assert words[0] == "model"
    assert value(words, "--dtype") == "bfloat16"
    assert value(words, "--max-num-seqs") == "7"
    assert value(words, "--max-model-len") == "96"
    assert value(words, "--tensor-parallel-size") == "2"
    assert value(words, "--gpu-memory-utilization") == "0.25"
    assert value(words, "--load-format") == "dummy"
    assert "--no-enforce-eager" in words
    assert not any("sampling-mask" in word for word in words)
    config.sampling_mask = True
    assert "--return-sampling-mask" in flags(config, Path("model"), 96, CUDA)
    on_cpu = flags(config, Path("model"), 96, CPU)
    assert not any("gpu-memory" in word or "enforce-eager" in word for word in on_cpu)
    config.gpu_memory_utilization = None  # a server has its GPUs to itself
    assert not any("gpu-memory" in word for word in flags(config, Path("model"), 96, CUDA))


def test_vllms_own_arguments_win_and_keep_their_types():
    config = RolloutConfig(max_num_seqs=7)
    config.engine_kwargs.vllm = {"max_num_seqs": 9, "quantization": "fp8"}
    words = flags(config, Path("model"), 96, CPU)
    assert value(words, "--max-num-seqs") == "9"
    assert value(words, "--quantization") == "fp8"
    assert as_flags({"enable_prefix_caching": False, "enable_lora": True, "revision": None}) == [
        "--no-enable-prefix-caching",
        "--enable-lora",
    ]
    assert as_flags({"limit_mm_per_prompt": {"image": 2}}) == ["--limit-mm-per-prompt", '{"image": 2}']
    assert as_flags({"cudagraph_capture_sizes": [1, 8]}) == ["--cudagraph-capture-sizes", "1", "8"]


def test_users_flags_win_except_over_what_the_trainer_cannot_do_without():
    theirs = ["model", "--host", "0.0.0.0", "--kv-cache-memory-bytes", "1", "--logprobs-mode", "raw_logprobs"]
    words = server_flags(theirs, cpu=True, has_secret=True)
    assert value(words, "--model") == "model"
    assert value(words, "--host") == "0.0.0.0"
    assert value(words, "--kv-cache-memory-bytes") == "1"
    assert value(words, "--logprobs-mode") == "processed_logprobs"
    assert value(server_flags(["model"], cpu=True, has_secret=True), "--host") == "127.0.0.1"
    assert "--no-enable-chunked-prefill" in words
    assert "--no-enable-chunked-prefill" not in server_flags(theirs, cpu=False, has_secret=True)


def test_a_cache_size_in_vllms_variable_is_not_overridden(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert "--kv-cache-memory-bytes" not in server_flags(["model"], cpu=True, has_secret=True)


def test_a_server_is_no_rank_and_sees_its_gpus_only():
    rank = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "HOME": "h",
    }
    found = environment(rank | {"CUDA_VISIBLE_DEVICES": "0", "TORCHINDUCTOR_CACHE_DIR": "/c"}, CUDA, ("4", "5"), SECRET)
    assert found.keys() == {"HOME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR", VARIABLE}
    assert found["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert found["TORCHINDUCTOR_CACHE_DIR"] == "/c"
    assert found[VARIABLE] == SECRET.value
    assert environment({"CUDA_VISIBLE_DEVICES": "0"}, CPU, (), SECRET)["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_server_is_used_again_only_if_it_would_be_started_the_same_way(monkeypatch: pytest.MonkeyPatch):
    def fingerprint(config: RolloutConfig, secret: Secret = SECRET) -> str:
        return ServerProcess(config, Path("model"), 96, CPU, (), secret, Path("log"), Keeper())._fingerprint()

    first = fingerprint(RolloutConfig())
    monkeypatch.setenv("RLHF_SUPERVISOR_PID", "7")
    assert fingerprint(RolloutConfig()) == first
    assert fingerprint(RolloutConfig(max_num_seqs=7)) != first
    assert fingerprint(RolloutConfig(), Secret("of-another-run-so", "here")) != first
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert fingerprint(RolloutConfig()) != first


def test_a_process_group_ends_with_its_last_process_that_runs():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    assert processes_of(child.pid) == [child.pid]
    child.kill()
    child.wait()
    assert processes_of(child.pid) == []
