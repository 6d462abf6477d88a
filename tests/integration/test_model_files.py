"""A model's files on every node or on one of them. Two ranks in two working directories are two nodes."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf.backends import build_backend
from rlhf.backends.fsdp2 import Fsdp2Model
from rlhf.backends.training import Training
from rlhf.config import BackendConfig
from rlhf.errors import UserError
from rlhf.models import loading, weights
from rlhf.models.fingerprint import fingerprint as fingerprint_of
from rlhf.models.loading import ModelSource, ModelStart, hf_files, load_model_config, load_tokenizer
from rlhf.models.model_files import ModelFiles, find_files, read_headers
from rlhf.models.skeleton import skeleton
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.storage.shards import Shards
from tests.support.allocations import peak_of
from tests.support.checkpoints import equal_bits, files_of, run_ranks
from tests.support.engines import CPU, ENGINES, NEEDS_DEEPSPEED, OPTIM, gathered
from tests.support.launching import DEADLINE_S, ROOT, ranks, records, saved_steps, small
from tests.support.tiny_models import TINY_POLICY, causal_lm, classifier, mixture

CRITIC, JUDGE, POLICY = loading.load_value_model, loading.load_reward_model, loading.load_model
MODELS = {  # folder -> the function that loads it, and whether its weights can be read tensor by tensor
    "tied": (POLICY, True),
    "untied": (POLICY, True),
    "bfloat16": (POLICY, True),
    "in_parts": (POLICY, True),
    "renamed": (POLICY, True),
    "critic": (CRITIC, True),
    "older_critic": (CRITIC, True),
    "judge": (JUDGE, True),
    "experts": (POLICY, True),
    "experts_in_parts": (POLICY, True),
    "critic_of_experts": (CRITIC, True),
    "both_of_a_tie": (POLICY, False),
}
BUCKET = 1 << 16
SEES, BLIND = "node1", "node0"
"""The nodes, with one rank each. The leader's node, BLIND, sees only files that are on every node."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> Path:
    """Two nodes: `all/NAME` are models on both nodes, `one/NAME` only on SEES."""
    folder = tmp_path_factory.mktemp("nodes")
    store = folder / "store"
    causal_lm("qwen2", store / "tied")
    causal_lm("llama", store / "untied")
    causal_lm("qwen2", store / "bfloat16").bfloat16().save_pretrained(store / "bfloat16")
    causal_lm("llama", store / "in_parts").save_pretrained(store / "in_parts", max_shard_size="20KB")
    (store / "in_parts" / "model.safetensors").unlink()
    renamed("gpt2", store / "renamed")
    causal_lm("llama", store / "critic")
    classifier("gpt2", store / "older_critic")
    classifier("llama", store / "judge")
    mixture("mixtral", store / "experts")
    for name in ("experts_in_parts", "critic_of_experts"):
        mixture("qwen3_moe", store / name).save_pretrained(store / name, max_shard_size="20KB")
        (store / name / "model.safetensors").unlink()
    causal_lm("qwen2", store / "both_of_a_tie")
    file = store / "both_of_a_tie" / "model.safetensors"
    tensors = load_file(file)
    other = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors | {"lm_head.weight": other}, file, {"format": "pt"})
    for node in (SEES, BLIND):
        (folder / node).mkdir()
        (folder / node / "all").symlink_to(store)
    (folder / SEES / "one").symlink_to(store)
    return folder


def renamed(architecture: str, folder: Path) -> None:
    """Write a policy whose file has the names of the trunk alone, like older files."""
    causal_lm(architecture, folder)
    tensors = load_file(folder / "model.safetensors")
    short = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert short.keys() != tensors.keys()
    save_file(short, folder / "model.safetensors", {"format": "pt"})


def find(path: str, mode: str, coordinator: Coordinator, scratch: Path) -> ModelFiles:
    scratch.mkdir(exist_ok=True, parents=True)
    return find_files(ModelSource("model.path", path), mode, coordinator, CPU, scratch)


def load(files: ModelFiles, function: Callable[..., PreTrainedModel], coordinator: Coordinator) -> weights.PendingModel:
    hf_config = load_model_config(files.source, files.folder)
    from_files = partial(function, ModelStart(files.source, files.folder, hf_config))
    return weights.load(files, hf_config, from_files, coordinator, CPU)


def whole(folder: Path, function: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """Return the model that transformers loads from local files."""
    source = ModelSource("model.path", str(folder))
    return function(ModelStart(source, folder, load_model_config(source, folder)))


def contents(shards: Shards, model: PreTrainedModel) -> dict[str, Any]:
    """Return everything about a loaded model, and the generator's state after loading."""
    persistent = model.state_dict().keys()
    files = hf_files(model.config, load_tokenizer(SOURCE, TINY_POLICY), getattr(model, "generation_config", None))
    return {
        "weights": gathered(shards),
        "tied": sorted({name for name, _ in model.named_parameters(remove_duplicate=False)} - shards.keys()),
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers() if name not in persistent},
        "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
        "training": model.training,
        "class": type(model).__name__,
        "files": files,
        "generator": torch.get_rng_state(),
    }


SOURCE = ModelSource("model.path", str(TINY_POLICY))


def same_bits(rank: int, folder: Path) -> dict[str, list[str]]:
    """Return for each model and way to load it the reader, differences from transformers' model, and the hash."""
    torch.use_deterministic_algorithms(True)  # as in a run on the CPU; it also fills fresh memory with NaN
    weights.BUCKET_BYTES = 3000  # several buckets for one tensor
    coordinator = Coordinator(GlooTransport())
    os.chdir(folder / (SEES if rank else BLIND))
    result = {}
    for name, (function, by_tensor) in MODELS.items():
        torch.manual_seed(rank)
        expected = Fsdp2Model(whole(folder / "store" / name, function), BackendConfig(), CPU)
        expected = contents(expected.model_shards(), expected.module)
        for place, mode in (("all", "auto"), ("all", "broadcast"), ("one", "auto")):
            files = find(f"{place}/{name}", mode, coordinator, folder / f"scratch{rank}" / f"{place}-{mode}-{name}")
            torch.manual_seed(rank)
            loaded = load(files, function, coordinator)
            on_meta = any(p.is_meta for p in loaded.model.parameters())
            assert on_meta == by_tensor, name
            model = Fsdp2Model(loaded.model, BackendConfig(), CPU)
            loaded.fill(model.model_shards())
            found = contents(model.model_shards(), model.module)
            differences = [key for key in expected if not equal_bits(expected[key], found[key])]
            result[f"{place} {mode} {name}"] = [str(files.reader), *differences, files.fingerprint]
    return result


def test_every_way_to_load_gives_the_bits_of_the_library_s_model(nodes):
    found = run_ranks(2, same_bits, nodes, deadline_s=300, join=nodes / "join")
    assert found[0] == found[1]
    readers = {"all auto": "None", "all broadcast": "0", "one auto": "1"}
    for case, (reader, *differences, fingerprint) in found[0].items():
        place, mode, name = case.split()
        assert (reader, differences) == (readers[f"{place} {mode}"], []), case
        assert fingerprint == fingerprint_of(nodes / "store" / name), case


def test_weights_that_transformers_transposes_are_not_read_in_place(nodes):
    folder = nodes / "store" / "untied"
    source = ModelSource("model.path", str(folder))
    square = "model.layers.0.self_attn.q_proj.weight"
    headers = read_headers(folder)
    assert headers is not None
    assert headers[square].shape == (16, 16)
    start = ModelStart(source, folder, load_model_config(source, folder))
    assert skeleton(lambda tensors: POLICY(start, tensors), headers) is not None
    assert skeleton(lambda tensors: POLICY(start, {**tensors, square: tensors[square].T}), headers) is None


def zero_bits(rank: int, folder: Path) -> dict[str, bool]:
    """Return for each DeepSpeed engine whether weights sent by a rank equal those that transformers loads."""
    torch.use_deterministic_algorithms(True)
    weights.BUCKET_BYTES = 3000
    coordinator = Coordinator(GlooTransport())
    os.chdir(folder / (SEES if rank else BLIND))
    files = find("one/tied", "auto", coordinator, folder / f"zero{rank}")
    result = {}
    for kind in [kind for kind in ENGINES if kind.startswith("zero")]:
        results = []
        for sent in (False, True):
            loaded = load(files, POLICY, coordinator)
            model = loaded.model if sent else whole(folder / "store" / "tied", POLICY)
            options = {"grad_clip": 1.0, "total_optimizer_steps": 5}
            backend = build_backend(model, ENGINES[kind], CPU, Training(OPTIM, **options))
            if sent:
                loaded.fill(backend.model_shards())
                backend.after_load()
            logits = backend.module(input_ids=torch.arange(1, 13).view(2, 6), use_cache=False).logits.detach().clone()
            full = {name: tensor.clone() for name, tensor in backend.full_tensors()}
            results.append({"master": gathered(backend.model_shards()), "full": full, "logits": logits})
        assert torch.isfinite(results[0]["logits"]).all()
        result[kind] = equal_bits(*results)
    return result


@NEEDS_DEEPSPEED
def test_deepspeed_takes_weights_that_were_sent(nodes):
    for found in run_ranks(2, zero_bits, nodes, deadline_s=300, join=nodes / "join-zero"):
        assert found.keys() == {kind for kind in ENGINES if kind.startswith("zero")}
        assert all(found.values()), found


def memory(rank: int, folder: Path) -> dict[str, tuple[int, int]]:
    """Return the peak memory of each way to load, and the bytes that this rank read tensor by tensor."""
    weights.BUCKET_BYTES = BUCKET
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # the profiler does not see transformers' threads
    coordinator = Coordinator(GlooTransport())
    os.chdir(folder / (SEES if rank else BLIND))
    read: list[int] = []
    original = weights.ModelReader.read

    def counting(self: weights.ModelReader, name: str, low: int, high: int) -> torch.Tensor:
        rows = original(self, name, low, high)
        read.append(rows.numel() * rows.element_size())
        return rows

    weights.ModelReader.read = counting  # type: ignore[method-assign]

    def by(place: str) -> Fsdp2Model:
        loaded = load(files[place], POLICY, coordinator)
        model = Fsdp2Model(loaded.model, BackendConfig(), CPU)
        loaded.fill(model.model_shards())
        return model

    def library() -> Fsdp2Model:
        return Fsdp2Model(whole(folder / "store" / "large", POLICY), BackendConfig(), CPU)

    files = {place: find(f"{place}/large", "auto", coordinator, folder / f"m{place}{rank}") for place in ("all", "one")}
    file_size = (folder / "store" / "large" / "model.safetensors").stat().st_size
    result = {}
    ways: dict[str, Callable[[], Any]] = {"library": library, "all": partial(by, "all"), "one": partial(by, "one")}
    for name, action in ways.items():
        read.clear()
        result[name] = peak_of(action, file_size), sum(read)
    return result


def test_no_rank_needs_more_memory_than_its_part_and_a_bucket(nodes):
    causal_lm("llama", nodes / "store" / "large", hidden_size=128, intermediate_size=512, num_hidden_layers=6)
    model = AutoModelForCausalLM.from_pretrained(nodes / "store" / "large").bfloat16()
    model.save_pretrained(nodes / "store" / "large")
    size = 4 * sum(p.numel() for p in model.parameters())
    found = run_ranks(2, memory, nodes, deadline_s=120, join=nodes / "join-memory")
    for rank, ways in enumerate(found):
        assert ways["library"][0] > size  # the measurement includes a whole model
        for way in ("all", "one"):
            assert size / 2 <= ways[way][0] < size / 2 + 4 * BUCKET, (rank, way, ways, size)
        assert ways["all"][1] == size / 4  # half of the rows, in bfloat16
        assert ways["one"][1] == (size / 2 if rank == 1 else 0)


def mistakes(rank: int, folder: Path) -> dict[str, str]:
    """Return the error message of each mistake on this rank."""
    coordinator = Coordinator(GlooTransport())
    os.chdir(folder / (SEES if rank else BLIND))
    errors = {}

    def record_error(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
            errors[name] = "nothing"
        except UserError as error:
            errors[name] = str(error)

    def run(path: str, mode: str, damage: Callable[[], Any] = lambda: None) -> None:
        files = find(path, mode, coordinator, folder / f"e{rank}" / f"{len(errors)}")
        loaded = load(files, POLICY, coordinator)
        model = Fsdp2Model(loaded.model, BackendConfig(), CPU)
        coordinator.on_leader(damage)
        loaded.fill(model.model_shards())

    record_error("blind", lambda: run("one/tied", "shard"))
    record_error("nowhere", lambda: run("no/where", "auto"))
    record_error("truncated", lambda: run("one/truncated", "auto"))
    record_error("lacking", lambda: run("one/lacking", "auto"))
    record_error("lacking, own", lambda: run("all/lacking", "auto"))
    for place in ("one", "all"):
        coordinator.on_leader(lambda: causal_lm("llama", folder / "store" / "going") and None)
        file = folder / "store" / "going" / "model.safetensors"
        # The file is cut after its headers were read, as when a user replaces the folder.
        record_error(f"going, {place}", partial(run, f"{place}/going", "auto", partial(os.truncate, file, 5000)))
    return errors


def test_mistakes_are_told_on_every_rank(nodes):
    store = nodes / "store"
    causal_lm("llama", store / "truncated")
    os.truncate(store / "truncated" / "model.safetensors", 20_000)
    causal_lm("llama", store / "lacking")
    tensors = load_file(store / "lacking" / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, store / "lacking" / "model.safetensors", {"format": "pt"})
    found = run_ranks(2, mistakes, nodes, deadline_s=120, join=nodes / "join-mistakes")
    assert found[0] == found[1]
    errors = found[0]
    # Rank 0 does not see the model; rank 1 is the first rank that sees it.
    assert errors["blind"].startswith(
        f"model.loading=shard: rank 0 (on {socket.gethostname()}) does not see model.path=one/tied."
    )
    assert "set model.loading=auto" in errors["blind"]
    assert errors["nowhere"].startswith("model.path=no/where is")
    for name in ("truncated", "going, one", "going, all"):
        assert errors[name].startswith("model.path=")
        assert "can't be loaded from safetensors" in errors[name]
    for name in ("lacking", "lacking, own"):
        assert "1 weights that its config.json needs are missing" in errors[name]


@pytest.mark.slow
def test_a_run_on_two_nodes_of_which_one_has_the_model(tmp_path, sums):
    """Under torchrun, with a critic, and a reward model that only the second node has."""
    for node in (BLIND, SEES):
        (tmp_path / node).mkdir()
    (tmp_path / BLIND / "model").mkdir()  # an empty folder, as if a disk were not mounted
    (tmp_path / SEES / "model").symlink_to(TINY_POLICY)
    classifier("llama", tmp_path / SEES / "judge")
    settings = [
        "model.path=./model",
        "algorithm=ppo",
        "reward.functions=[exact_match,reward_model]",
        "reward_model.path=./judge",
        "trainer.total_training_steps=2",
        "checkpoint.contents=[model,optimizer,extra,hf_model]",
        "backend.dp_replicate=1",  # the default depends on the number of machines
    ]
    command = small(tmp_path, "two_nodes", sums, *settings)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
    on_a_node = f'cd "{tmp_path}/node$RANK" && LOCAL_WORLD_SIZE=1 exec "{sys.executable}" -m rlhf.train "$@"'
    done = subprocess.run(
        [*launcher, "sh", "-c", on_a_node, "sh", *command],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout
    # The same run, with all files visible to every rank.
    replaced = {
        "model.path=./model": f"model.path={TINY_POLICY}",
        "reward_model.path=./judge": f"reward_model.path={tmp_path}/{SEES}/judge",
    }
    everywhere = [replaced.get(argument, argument) for argument in small(tmp_path, "one_place", sums, *settings)]
    ended = ranks(tmp_path / "log", everywhere, nproc=2)
    assert ended.code == 0, ended.output
    runs = [tmp_path / "rlhf" / name for name in ("two_nodes", "one_place")]
    assert saved_steps(runs[0]) == saved_steps(runs[1]) != []
    last = [run / f"global_step_{saved_steps(run)[0]}" for run in runs]
    assert files_of(last[0]) == files_of(last[1])
    own = {"config.yaml", "driver_state.json", "manifest.json"}  # the command, the run's name, times
    for name in files_of(last[0]) - own:
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes(), name
    assert {path.name for path in last[0].rglob("*")} >= {"model.safetensors", "tokenizer.json", *own}
    figures = [[record.get("reward/mean") for record in records(run)] for run in runs]
    assert figures[0] == figures[1]
