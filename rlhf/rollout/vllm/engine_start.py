"""Starts vLLM in the ranks' own processes: arguments, environment, engine."""

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf.config import RolloutConfig
from rlhf.errors import UserError
from rlhf.models.fused_experts import FileConversions, parts_in_files
from rlhf.ranks import dims
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.world import ranks_here
from rlhf.rollout.policy_files import PolicyFiles
from rlhf.rollout.vllm.colocated import VllmEngine, WeightsInFiles
from rlhf.rollout.vllm.process_state import ProcessState
from rlhf.storage.file_parts import parts_of
from rlhf.storage.files import remove_file
from rlhf.storage.scratch import SHARED_MEMORY, Scratch, set_shared_memory_prefix

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run all parts of vLLM in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
SPLITS_GROUPS = "VLLM_DISTRIBUTED_USE_SPLIT_GROUP"
"""vLLM's variable (from 0.32 on) that creates all groups of a kind with one split of the communicator. Otherwise every
rank takes part in a split for each group: 636 splits with 64 ranks."""
BLOCK = 128  # tokens per block of vLLM's CPU cache


def build_vllm_engine(
    config: RolloutConfig,
    policy: PolicyFiles,
    coordinator: Coordinator,
    device: torch.device,
    *,
    seed: int,
    engine_class: Callable[..., VllmEngine] = VllmEngine,
) -> VllmEngine:
    """Build an engine on this rank's device, and let it sleep if possible. Collective, in the ranks' process group.

    Args:
        seed: vLLM's seed. Requests have seeds of their own.
        engine_class: `VllmEngine`, or a function with the same arguments.

    Raises:
        UserError: vLLM rejects the model or the arguments.
    """
    if device.type != "cuda":
        config = replace(config, sleep_level=0)
    tensor_parallel = config.tensor_model_parallel_size
    first = coordinator.rank // tensor_parallel * tensor_parallel
    scratch = Scratch()
    environment = _environment(device, coordinator.world_size) | {"VLLM_RPC_BASE_PATH": str(scratch.folder)}
    # On a CPU, vLLM would compile two small functions, which costs more than it saves.
    process_state = ProcessState(environment, compiles=device.type == "cuda")
    try:
        coordinator.on_domain_leaders(policy.write)
        # The ranks of a tensor-parallel group share memory, and so need one name for the memory.
        memory_name = coordinator.all_gather(scratch.name)[first]
        with process_state.entered():
            weights, hf_config = _weights_in_files(policy.folder)
            arguments = _arguments(config, policy, hf_config, device) | {"seed": seed}
            arguments |= config.engine_kwargs.vllm
            llm = _start(arguments, memory_name, device)
    except BaseException:
        scratch.close()
        raise
    group = range(first, first + tensor_parallel)
    engine = engine_class(llm, process_state, scratch, config, policy, weights, coordinator, group=group)
    engine.sleep()
    return engine


def _environment(device: torch.device, ranks: int) -> dict[str, str]:
    variables = ENVIRONMENT | {"RANK": str(dims.everyone().rank), "LOCAL_RANK": str(device.index or 0)}
    if device.type == "cuda" and ranks > 1:  # vLLM cannot split gloo's groups
        variables[SPLITS_GROUPS] = os.environ.get(SPLITS_GROUPS, "1")
    return variables


def _start(arguments: dict[str, Any], memory_name: str, device: torch.device) -> Any:
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        logging.getLogger("vllm").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            from vllm import LLM

            set_shared_memory_prefix(f"{memory_name}.")
            try:
                with _unique_memory_names(memory_name) if device.type == "cpu" else nullcontext():
                    llm = LLM(**arguments)
            finally:
                set_shared_memory_prefix()
    except (ValueError, TypeError) as error:
        raise UserError(
            "rollout=vllm: vLLM rejects the model or the arguments. Correct rollout.engine_kwargs.vllm, or set another "
            f"model.path or rollout=embedded. vLLM's error: {' '.join(str(error).split())}"
        ) from error
    # The finalizer would destroy the process group, which belongs to the rank.
    llm.llm_engine.engine_core._finalizer.detach()
    return llm


@contextmanager
def _unique_memory_names(prefix: str) -> Iterator[None]:
    """Prefix the names of the memory that vLLM shares between the ranks of a group on a CPU.

    vLLM uses the same names in all runs, and a killed run does not remove its memory.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as SharedMemory

    name_of = SharedMemory.make_group_name
    SharedMemory.make_group_name = staticmethod(lambda communicator: f"{prefix}-{name_of(communicator).lstrip('/')}")
    try:
        yield
    finally:
        SharedMemory.make_group_name = staticmethod(name_of)
        # All ranks have opened the memory, so its names are no longer needed.
        for path in SHARED_MEMORY.glob(f"*{prefix}-*"):
            remove_file(path, missing_ok=True)


def _arguments(config: RolloutConfig, policy: PolicyFiles, hf_config: Any, device: torch.device) -> dict[str, Any]:
    arguments = {
        "model": str(policy.folder),
        "load_format": "dummy",
        "dtype": config.dtype,
        "max_model_len": policy.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "distributed_executor_backend": "external_launcher",
        "gpu_memory_utilization": config.vllm_share,
        "enforce_eager": config.enforce_eager,
        "enable_sleep_mode": config.sleep_level > 0,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
    }
    if device.type == "cpu":
        # On a CPU, chunked prefill makes seeded requests fail.
        arguments |= {"enforce_eager": True, "enable_chunked_prefill": False}
        arguments["kv_cache_memory_bytes"] = _cpu_cache_bytes(config, hf_config, policy.max_model_len)
    return arguments


def _cpu_cache_bytes(config: RolloutConfig, hf_config: Any, max_model_len: int) -> int:
    """Return the bytes for `max_num_seqs` samples of full length, but at most this rank's fraction of the memory."""
    text = hf_config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token_bytes = 2 * text.num_hidden_layers * heads * width * getattr(torch, config.engine_dtype).itemsize
    blocks = config.max_num_seqs * math.ceil(max_model_len / BLOCK) + 1  # vLLM reserves one block
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(blocks * BLOCK * token_bytes, int(machine * config.vllm_share / ranks_here()))


def _weights_in_files(folder: Path) -> tuple[WeightsInFiles, Any]:
    """Return the weights that an update must send, and the configuration of the model in `folder`."""
    hf_config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    state = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    parts = parts_in_files({name: tensor.shape for name, tensor in state.items()}, FileConversions.of(model))
    shapes: dict[tuple[str, ...], Sequence[int]] = {}
    for tied_names in names.values():
        parts_by_name = [parts_of(parts, name, state[name].shape) for name in tied_names]
        shapes |= {tuple(part.name for part in tied): tied[0].shape for tied in zip(*parts_by_name, strict=True)}
    return WeightsInFiles(shapes, parts), hf_config
