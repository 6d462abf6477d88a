"""python -m rlhf.plan and the memory check before a run: their output, and the settings that they reject."""

import json
import re
import shlex
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
from transformers import AutoConfig

from rlhf.cli.command_parser import byte_size
from rlhf.cli.plan import DOES_NOT_FIT, main
from rlhf.compose import compose_config
from rlhf.config import Config
from rlhf.config.library import Library
from rlhf.config.rules.validate import validate
from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from rlhf.launch.banner import banner
from rlhf.planning import devices
from rlhf.planning.check import check_fits, engine_share, models_of, plan_of
from rlhf.planning.devices import gpu_memory, smallest_gpu
from rlhf.planning.memory_plan import Models, Plan, Target, evaluation_share, memory_plan
from rlhf.planning.meta_shapes import meta_model
from rlhf.planning.model_shapes import ModelShapes
from rlhf.planning.plan_text import gib, plan_page
from rlhf.planning.remedies import remedies
from rlhf.planning.rollout_memory import free_share
from rlhf.train import main as train
from tests.support.launching import TINY_POLICY, write_sums
from tests.support.refusals import says

QWEN_7B = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
GPUS = "0, GPU-aaaa, 81559\n1, GPU-bbbb, 40536\n"


@pytest.fixture(autouse=True)
def _anew():
    gpu_memory.cache_clear()
    yield
    gpu_memory.cache_clear()


@pytest.fixture
def qwen_7b(tmp_path) -> str:
    (tmp_path / "seven").mkdir()
    (tmp_path / "seven" / "config.json").write_text(json.dumps(QWEN_7B))
    return str(tmp_path / "seven")


@pytest.fixture
def driver(tmp_path, monkeypatch) -> Path:
    """Simulate a machine with a GPU driver; its nvidia-smi prints the returned file."""
    monkeypatch.setattr(devices, "DRIVERS", ("/dev/null",))
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/gpus\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    (tmp_path / "gpus").write_text(GPUS)
    return tmp_path / "gpus"


def write_meta_weights(folder: str) -> None:
    """Write a safetensors file with the shapes of the model in `config.json`, and a hole in place of its weights."""
    model = meta_model("model.path", folder)
    header, end = {}, 0
    for name, tensor in model.named_parameters():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + 4 * tensor.numel()]}
        end += 4 * tensor.numel()
    text = json.dumps(header).encode()
    with (Path(folder) / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def document(capsys, *arguments: str, code: int = EXIT_DONE) -> dict:
    assert main(["recipes=null", "data.train_files=x.jsonl", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def small(folder: Path) -> Config:
    config = Config()
    config.model.path = str(TINY_POLICY)
    config.trainer.default_local_dir = str(folder)
    return config


def test_a_model_of_which_only_the_configuration_is_there(qwen_7b, capsys):
    found = document(capsys, f"model.path={qwen_7b}", "trainer.nproc=8", "--device-memory", "80GB", code=DOES_NOT_FIT)
    assert found["parameters"] == {"policy": 7_615_616_512}
    assert found["checkpoint"]["parts"] == {"actor/model": 4 * 7_615_616_512, "actor/optimizer": 8 * 7_615_616_512}
    assert found["phases"]["save"]["actor weights"] == 4 * 7_615_616_512 // 8
    assert found["device_memory"] == 80_000_000_000
    assert found["peak"]["bytes"] == sum(found["phases"][found["peak"]["phase"]].values())
    assert found["tokens"]["step"] == 64 * 8 * 512


def test_ranks_of_several_machines(qwen_7b, capsys):
    on_one = document(capsys, f"model.path={qwen_7b}", "trainer.nproc=8", "--device-memory", "80GB", code=DOES_NOT_FIT)
    on_four = document(
        capsys,
        f"model.path={qwen_7b}",
        "trainer.nproc=8",
        "--ranks",
        "32",
        "--device-memory",
        "80GB",
        code=DOES_NOT_FIT,
    )
    assert (on_one["ranks"], on_four["ranks"]) == (8, 32)
    assert 4 * on_four["phases"]["save"]["actor optimizer"] == on_one["phases"]["save"]["actor optimizer"]


def test_an_error_names_the_setting_of_the_ranks(qwen_7b, capsys):
    wrong = ["rollout=vllm", "trainer.nproc=8", "rollout.tensor_model_parallel_size=3", "--device-memory", "80GB"]
    assert main(["recipes=null", "data.train_files=x.jsonl", f"model.path={qwen_7b}", *wrong]) == EXIT_USER_ERROR
    says(capsys.readouterr().err, "rollout.tensor_model_parallel_size=3", "trainer.nproc=8")


def test_the_plan_lists_every_model_and_phase(capsys):
    path, tiny = f"model.path={TINY_POLICY}", f"reward_model.path={TINY_POLICY}"
    plain = document(capsys, path, "actor.use_kl_loss=false", "trainer.device=cpu")
    assert list(plain["phases"]) == ["weight sync", "generation", "actor update", "save"]
    more = document(
        capsys,
        path,
        tiny,
        "reward=reward_model",
        "algorithm=ppo",
        "actor.use_kl_loss=true",
        "actor.ppo_mini_batch_size=32",
        "ref.update_freq=1",
        "checkpoint.contents=[model,optimizer,hf_model]",
        "checkpoint.hf_dtype=bfloat16",
        "trainer.device=cpu",
    )
    phases = ["weight sync", "generation", "rewards", "reference", "old log-probs", "values", "critic update"]
    assert list(more["phases"]) == [*phases, "actor update", "save"]
    parts = ["actor/model", "actor/optimizer", "actor/huggingface", "critic/model", "critic/optimizer"]
    assert list(more["checkpoint"]["parts"]) == [*parts, "critic/huggingface", "ref"]
    assert 2 * more["checkpoint"]["parts"]["actor/huggingface"] == more["checkpoint"]["parts"]["actor/model"]


def test_what_is_offloaded_is_where_it_is_needed(qwen_7b, capsys):
    common = (f"model.path={qwen_7b}", "trainer.nproc=8", "--device-memory", "80GB", "actor.ppo_mini_batch_size=32")
    common += ("rollout.gpu_memory_utilization=0.5",)
    settings = [f"{role}.fsdp_config.param_offload=true" for role in ("actor", "critic", "ref")]
    settings += [f"{role}.fsdp_config.optimizer_offload=true" for role in ("actor", "critic")]
    more = ("algorithm=ppo", "actor.use_kl_loss=true", "model.enable_gradient_checkpointing=true", "rollout=vllm")
    plain = document(capsys, *common, *more)
    moved = document(capsys, *common, *more, *settings)

    def there(found: dict, item: str) -> list[str]:
        return [name for name, items in found["phases"].items() if item in items]

    assert there(plain, "actor weights") == there(plain, "critic optimizer") == list(plain["phases"])
    assert there(moved, "actor weights") == ["old log-probs", "actor update"]
    assert there(moved, "critic weights") == ["values", "critic update"]
    assert there(moved, "reference weights") == ["reference"]
    # An update's peak is when activations are stored. At that time the optimizer's state is not on the device.
    assert there(moved, "actor optimizer") == there(moved, "critic optimizer") == []
    save = plain["phases"]["save"]
    items = [f"{role} {what}" for role in ("actor", "critic") for what in ("weights", "optimizer")]
    away = sum(save[item] for item in [*items, "reference weights"])
    assert sum(save.values()) - sum(moved["phases"]["save"].values()) == away
    assert sum(moved["host"].values()) - sum(plain["host"].values()) == moved["host"]["offloaded"] == away
    assert {found["set"] for found in plain["remedies"]} >= set(settings)
    assert not {found["set"] for found in moved["remedies"]} & set(settings)


def test_the_optimizer_is_back_in_its_step(qwen_7b, capsys):
    common = (f"model.path={qwen_7b}", "trainer.nproc=8", "--device-memory", "80GB", "rollout=vllm")
    short = ("data.max_prompt_length=8", "data.max_response_length=8", "actor.fsdp_config.optimizer_offload=true")
    found = document(capsys, *common, *short, "model.enable_gradient_checkpointing=true")
    assert found["phases"]["actor update"]["actor optimizer"] == 8 * 7_615_616_512 // 8
    assert "actor optimizer" not in found["phases"]["generation"]


def test_offloading_on_a_cpu_changes_no_figure(capsys):
    common = (f"model.path={TINY_POLICY}", "trainer.device=cpu", "actor.use_kl_loss=true")
    settings = [f"{role}.fsdp_config.param_offload=true" for role in ("actor", "ref")]
    plain = document(capsys, *common)
    assert document(capsys, *common, *settings, "actor.fsdp_config.optimizer_offload=true") == plain
    assert not [found["set"] for found in plain["remedies"] if "offload" in found["set"]]


def test_the_printed_plan_shows_ranks_peak_and_remedies(qwen_7b, capsys):
    arguments = ["recipes=null", "data.train_files=x.jsonl", f"model.path={qwen_7b}", "--device-memory", "80GB"]
    assert main([*arguments, "trainer.nproc=8", "--disk-speed", "2GB"]) == DOES_NOT_FIT
    output = capsys.readouterr().out
    for expected in (
        "policy 7.62B; 8 ranks",
        "<- peak",
        "writing takes 46 s at 2 GB/s",
        "The run does not fit: ",
        "less",
    ):
        assert expected in output


@pytest.mark.parametrize("size", ["80", "many", "0GB", "GB", "-1GB", "1.2.3GB", "9" * 400])
def test_an_invalid_device_memory_is_a_usage_error(size, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--device-memory", size, "--ranks", "none"])
    assert ended.value.code == EXIT_USER_ERROR
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("text", ["many", "1.2.3GB", ".", "9" * 400, "1e30", "nan", "GB", "0GB"])
def test_byte_size_rejects_text_that_is_not_a_size(text):
    with pytest.raises(ArgumentTypeError, match="is not a size with a unit"):
        byte_size(text)


def test_byte_size_rejects_a_number_without_a_unit():
    with pytest.raises(ArgumentTypeError, match="write 80GiB or 80GB"):
        byte_size("80")


def test_sizes():
    assert [byte_size(text) for text in ("80GB", "79.5 GiB", "512m", "7k")] == [
        8 * 10**10,
        159 << 29,
        512 * 10**6,
        7000,
    ]
    assert [gib(size) for size in (159 << 29, 3 << 20)] == ["79.5 GiB", "3 MiB"]


def test_a_model_that_is_not_there(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert main(["recipes=null", "data.train_files=x.jsonl", "model.path=org/name"]) == EXIT_USER_ERROR
    assert "hf download org/name config.json" in capsys.readouterr().err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["recipes=null", "data.train_files=x.jsonl", "model.path=org/name"]) == EXIT_USER_ERROR
    says(capsys.readouterr().err, "model.path=org/name", "HF_HUB_OFFLINE", "unset")


def test_a_setting_that_is_wrong(capsys):
    assert main(["trainer.nprocs=8"]) == EXIT_USER_ERROR
    assert "trainer.nproc" in capsys.readouterr().err


ADAPTERS_THAT_CANNOT_BE = [
    (
        "model.lora.target_modules=[q_proj,downproj]",
        "model.lora.target_modules=['q_proj', 'downproj']: llama has no module called 'downproj'. Did you mean "
        "down_proj? Its linear layers are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj.\n",
    ),
    ("model.lora.exclude_modules=[nope]", "model.lora.exclude_modules=['nope']: llama has no module called 'nope'."),
    ("model.lora.target_modules=[norm]", "model.norm is a LlamaRMSNorm, and adapters are for linear layers."),
    ("model.lora.target_modules=[lm_head]", "lm_head is the head"),
    ("model.lora.rank=1000000000", "model.lora.rank=1000000000: the largest rank that a selected layer allows is 96, "),
]


@pytest.mark.parametrize("started", [False, True], ids=["plan", "train"])
@pytest.mark.parametrize(("wrong", "message"), ADAPTERS_THAT_CANNOT_BE)
def test_adapters_that_the_model_cannot_have(wrong, message, started, tmp_path, capsys):
    sums = write_sums(tmp_path / "sums.jsonl")
    arguments = [f"model.path={TINY_POLICY}", f"data.train_files={sums}", "model.lora.enabled=true", wrong]
    arguments += ["trainer.device=cpu", f"trainer.default_local_dir={tmp_path}"]
    assert (train if started else main)(arguments) == EXIT_USER_ERROR
    assert message in capsys.readouterr().err
    assert not (tmp_path / "rlhf").exists()


@pytest.mark.parametrize("right", ["target_modules=[q_proj,mlp.up_proj]", "exclude_modules=[1.mlp]", "rank=96"])
def test_valid_adapters_are_checked_without_building_the_model(right, capsys, monkeypatch):
    monkeypatch.setattr("rlhf.planning.meta_shapes.meta_model", None)
    document(
        capsys, f"model.path={TINY_POLICY}", "model.lora.enabled=true", f"model.lora.{right}", "trainer.device=cpu"
    )


def test_settings_written_as_options(capsys):
    assert main(["--use_peft", "--learning_rate", "1e-6", "--multirun", "trainer.nproc=2"]) == EXIT_USER_ERROR
    peft, rate, other = capsys.readouterr().err.splitlines()
    assert peft == "error: --use_peft: settings are written without dashes. Did you mean model.lora.enabled=VALUE?"
    assert rate.startswith("--learning_rate 1e-6: settings are written without dashes. Did you mean actor.optim.lr=")
    assert other == "--multirun: there is no such option. --help shows the usage."


def test_vllm_is_planned_without_being_installed(qwen_7b, capsys):
    options = [f"model.path={qwen_7b}", "rollout=vllm", "trainer.nproc=8", "--device-memory", "80GB"]
    options += ["rollout.gpu_memory_utilization=0.5", "rollout.dtype=bfloat16"]
    asleep, awake = (
        document(capsys, *options, f"rollout.sleep_level={level}", code=DOES_NOT_FIT)["phases"] for level in (2, 0)
    )
    uses = ("weights", "cache", "passes", "graphs and buffers")
    assert sum(awake["generation"][f"engine {use}"] for use in uses) == 40_000_000_000
    # A profiled pass of 16,384 tokens in bfloat16: 3 widths of the MLP, 3 of the residual stream, and the queries.
    assert awake["generation"]["engine passes"] == 16384 * 2 * (3 * 18944 + 4 * 3584)
    assert awake["actor update"]["engine cache"] == awake["generation"]["engine cache"]
    assert "engine cache" not in asleep["actor update"]


def test_an_engine_without_room_for_a_sample_does_not_fit(qwen_7b):
    """Half of 24 GB is less than the weights in bfloat16: every phase fits, and vLLM would not start."""
    config = Config()
    config.model.path, config.trainer.nproc, config.data.train_files = qwen_7b, 8, "x.jsonl"
    config.model.enable_gradient_checkpointing = True
    config.backend.autocast = config.rollout.dtype = "bfloat16"
    config.rollout.name, config.actor.ppo_max_token_len_per_gpu = "vllm", 1024
    config.rollout.gpu_memory_utilization = 0.5
    kept = config.actor.fsdp_config
    kept.param_offload = kept.optimizer_offload = config.ref.fsdp_config.param_offload = True
    models = models_of(config, from_config=True)
    assert models is not None

    def planned() -> Plan:
        return memory_plan(config, models, Target(True, 8, 24 * 10**9))

    plan = planned()
    assert (plan.cached_tokens, plan.fits) == (0, False)
    assert plan.peak.total < 24 * 10**9
    found = remedies(config, models, plan)
    page = plan_page(config.rollout, models, plan, found, 10**9)
    assert (
        "utilization=0.5 leaves a KV cache of 0 tokens beside the engine's weights, but a sample may have 512 " in page
    )
    assert [str(remedy) for remedy in found if remedy.fits] == ["rollout.tensor_model_parallel_size=2"]
    config.rollout.tensor_model_parallel_size = 2
    assert planned().fits
    config.rollout.tensor_model_parallel_size, config.rollout.gpu_memory_utilization = 1, 0.8
    assert planned().fits


def test_a_remedy_saves_what_it_says(qwen_7b):
    config = Config()
    config.model.path, config.data.train_files, config.trainer.nproc = qwen_7b, "x.jsonl", 8
    validate(config)
    models = models_of(config, from_config=True)
    assert models is not None
    plan = memory_plan(config, models, Target(True, 8, 80 << 30))
    found = {str(remedy): remedy for remedy in remedies(config, models, plan)}
    assert list(found.values()) == sorted(found.values(), key=lambda remedy: -remedy.saved)
    config.model.enable_gradient_checkpointing = True
    other = memory_plan(config, models, plan.target)
    remedy = found["model.enable_gradient_checkpointing=true"]
    assert remedy.saved == plan.peak.total - other.peak.total > 0
    assert remedy.fits == other.fits


def test_adapters_are_a_remedy_where_the_whole_model_does_not_fit(qwen_7b, capsys):
    options = [f"model.path={qwen_7b}", "rollout=vllm", "backend.autocast=bfloat16", "rollout.dtype=bfloat16"]
    options += ["model.enable_gradient_checkpointing=true", "actor.ppo_max_token_len_per_gpu=4096"]
    one = document(capsys, *options, "trainer.nproc=1", "--device-memory", "80GB", code=DOES_NOT_FIT)
    (adapters,) = (found for found in one["remedies"] if found["set"] == "model.lora.enabled=true")
    assert adapters["fits"]
    roomy = document(capsys, *options, "trainer.nproc=1", "--device-memory", "800GB")
    assert not [found for found in roomy["remedies"] if "lora" in found["set"]]


def test_vllm_is_a_remedy_for_long_samples(qwen_7b, capsys):
    """The embedded engine reserves room for all samples that it decodes together, each as long as the longest."""
    long = ["data.max_response_length=20480", "rollout.max_num_seqs=256", "trainer.nproc=8", "--device-memory=80GB"]
    found = document(capsys, f"model.path={qwen_7b}", *long, "data.train_batch_size=512", code=DOES_NOT_FIT)
    assert found["peak"]["phase"] == "generation"
    assert found["remedies"][0]["set"] == "rollout=vllm"


def test_more_ranks_take_less_of_each(qwen_7b):
    config = Config()
    config.model.path = qwen_7b
    models = models_of(config, from_config=True)
    assert isinstance(models, Models)
    totals = [memory_plan(config, models, Target(True, ranks)).phases[-1].total for ranks in (1, 2, 4, 8)]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize(
    ("visible", "mib"), [(None, 40536), ("0", 81559), ("GPU-bbbb", 40536), ("0,1", 40536), ("", None), ("7", None)]
)
def test_memory_of_the_gpus_that_are_visible(driver, visible, mib):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert smallest_gpu(environ) == (None if mib is None else mib << 20)


def test_a_run_that_cannot_fit_ends_before_it_starts(driver, tmp_path, capsys):
    driver.write_text("0, GPU-a, 1000\n")
    sums = write_sums(tmp_path / "sums.jsonl")
    arguments = [f"data.train_files={sums}", "trainer.device=cuda", f"trainer.default_local_dir={tmp_path}"]
    assert train(arguments) == EXIT_USER_ERROR
    output = capsys.readouterr().err
    assert re.search(r"actor update needs 1\.\d GiB on each rank, and a rank has 1,000 MiB", output)
    says(output, "No settings make the run fit", "at least", "for each GPU")
    assert "trainer.check_memory=false" in output
    assert not (tmp_path / "rlhf").exists()


def test_vllm_gets_what_training_leaves(qwen_7b, capsys):
    options = (f"model.path={qwen_7b}", "rollout=vllm", "trainer.nproc=8", "--device-memory", "80GB")
    options += ("backend.autocast=bfloat16", "rollout.dtype=bfloat16", "model.enable_gradient_checkpointing=true")
    memory, shares = 80 * 10**9, []
    for more in ((), ("actor.fsdp_config.optimizer_offload=true",), ("rollout.sleep_level=0",)):
        found = document(capsys, *options, *more)
        for name in list(found["phases"]) if "rollout.sleep_level=0" in more else ["generation"]:
            uses = found["phases"][name]
            engine = sum(size for use, size in uses.items() if use.startswith("engine "))
            # The share is a multiple of 0.05, and a tenth of the memory stays free for fragments.
            assert sum(uses.values()) <= 0.9 * memory
        shares.append(engine / memory)
        if not more:
            assert 0.85 * memory < sum(found["phases"]["generation"].values())
            assert found["peak"]["phase"] == "actor update"
    assert shares[1] > shares[0] > shares[2]
    assert [share * 20 for share in shares] == pytest.approx([round(share * 20) for share in shares], abs=1e-6)
    main(["recipes=null", "data.train_files=x.jsonl", *options])
    assert f"(gpu_memory_utilization {shares[0]:.2g})" in capsys.readouterr().out


def test_vllm_gets_what_an_evaluation_leaves(qwen_7b):
    """An evaluation has no optimizer and keeps the policy in host memory, so vLLM gets nearly all of the GPU."""
    target = Target(True, 8, 80 << 30, 1 << 40)
    run = ["recipes=null", "data.train_files=x.jsonl", f"model.path={qwen_7b}", "rollout=vllm", "trainer.device=cuda"]
    run += ["rollout.dtype=bfloat16", "trainer.nproc=8"]
    judged = ["reward=reward_model", f"reward_model.path={qwen_7b}"]
    shares = {}
    for name, more in {
        "plain": [],
        "awake": ["rollout.sleep_level=0"],
        "judged": judged,
        "judge in host memory": [*judged, "reward_model.fsdp_config.param_offload=true"],
        "given": ["rollout.gpu_memory_utilization=0.3"],
    }.items():
        config = compose_config([*run, *more], Library.find(None))
        models = models_of(config, from_config=True)
        assert models is not None
        shares[name] = evaluation_share(config, models, target)
        training = memory_plan(config, models, target).engine_share
        assert training == 0.3 if name == "given" else training < shares[name]
    assert shares["given"] == 0.3
    assert shares["plain"] == shares["judge in host memory"] == pytest.approx(0.85)
    assert 0.7 < shares["judged"] < shares["plain"]
    assert 0.7 < shares["awake"] < shares["plain"]


def test_vllm_gets_a_larger_memory_share_in_an_evaluation(driver):
    driver.write_text("0, GPU-a, 3000\n")
    run = ["recipes=offline", f"model.path={TINY_POLICY}", "rollout=vllm", "trainer.device=cuda"]
    config = compose_config([*run, "data.train_batch_size=4096", "rollout.n=64"], Library.find(None))
    assert engine_share(config, trains=True) < engine_share(config, trains=False)


@pytest.mark.parametrize(("taken", "share"), [(0, 0.9), (30, 0.6), (39, 0.5), (60, 0.3), (85, 0.05), (200, 0.05)])
def test_the_memory_share_of_vllm_is_the_rest_rounded_down_to_a_twentieth(taken, share):
    assert free_share(100, taken) == pytest.approx(share)


def test_layers_with_a_window_cache_only_the_window(qwen_7b, capsys):
    options = (f"model.path={qwen_7b}", "rollout=vllm", "trainer.nproc=8", "--device-memory=80GB")
    options += ("backend.autocast=bfloat16", "rollout.dtype=bfloat16", "model.enable_gradient_checkpointing=true")
    options += ("rollout.gpu_memory_utilization=0.5", "data.max_prompt_length=1024", "data.max_response_length=3072")
    plain = document(capsys, *options)["tokens"]["cache"]
    changed = QWEN_7B | {"sliding_window": 1024, "layer_types": ["sliding_attention", "full_attention"] * 14}
    Path(qwen_7b, "config.json").write_text(json.dumps(changed))
    # Half of the layers keep a quarter of a sample's 4,096 tokens.
    assert document(capsys, *options)["tokens"]["cache"] == pytest.approx(plain / (5 / 8), rel=1e-3)
    Path(qwen_7b, "config.json").write_text(json.dumps(changed | {"use_sliding_window": False}))
    assert document(capsys, *options)["tokens"]["cache"] == plain


@pytest.mark.parametrize(
    "named",
    [
        {"model_type": "gemma2"},
        {"model_type": "gemma3_text"},
        {"model_type": "gemma3_text", "sliding_window_pattern": 3},
        {"model_type": "cohere2", "sliding_window_pattern": 4},
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 7},
    ],
)
def test_windows_of_files_without_layer_types_are_those_of_transformers(named):
    config = named | {"num_hidden_layers": 12, "sliding_window": 64}
    kinds = AutoConfig.for_model(**config).layer_types
    windows = ModelShapes({f"layers.{layer}.weight": (1, 1) for layer in range(12)}, config).windows
    assert windows == [64 if kind == "sliding_attention" else None for kind in kinds]
    assert {64, None} == set(windows)


def test_devices_beyond_the_heads_of_the_keys_get_copies(qwen_7b, capsys):
    options = (f"model.path={qwen_7b}", "rollout=vllm", "trainer.nproc=28", "--device-memory=800GB")
    options += ("data.train_batch_size=28", "actor.ppo_mini_batch_size=28")
    options += ("backend.autocast=bfloat16", "rollout.dtype=bfloat16", "rollout.gpu_memory_utilization=0.5")
    found = {
        gpus: document(
            capsys,
            *options,
            f"rollout.tensor_model_parallel_size={gpus}",
            "data.train_batch_size=28",
            "actor.ppo_mini_batch_size=28",
        )
        for gpus in (4, 28)
    }
    per_token = {gpus: of["phases"]["generation"]["engine cache"] / of["tokens"]["cache"] for gpus, of in found.items()}
    assert per_token[4] == pytest.approx(per_token[28], rel=1e-3)  # the model has 4 heads of keys
    assert main(["recipes=null", "data.train_files=x.jsonl", *options, "rollout.tensor_model_parallel_size=14"]) == 2
    facts = ("rollout.tensor_model_parallel_size=14", "28 attention heads", "4 key-value heads", "one of 1, 2, 4, 28")
    message = capsys.readouterr().err
    assert all(fact in message for fact in facts), message


def test_a_host_without_room_is_an_error(driver, tmp_path, monkeypatch):
    config = small(tmp_path)
    config.trainer.device = "cuda"
    check_fits(config)
    monkeypatch.setattr("rlhf.planning.check.machine_memory", lambda: 1 << 30)
    with pytest.raises(UserError, match=r"needs 3\.\d GiB of host memory, and the machine has 1\.0 GiB"):
        check_fits(config)


def test_a_switch_overrides_the_refusal(driver, tmp_path):
    driver.write_text("0, GPU-a, 1000\n")
    config = small(tmp_path)
    config.trainer.device = "cuda"
    with pytest.raises(UserError, match="does not fit"):
        check_fits(config)
    config.trainer.check_memory = False
    check_fits(config)
    config.trainer.check_memory = True
    driver.write_text(GPUS)
    gpu_memory.cache_clear()
    check_fits(config)


def test_the_error_of_the_check_names_the_settings_that_together_fit(driver, qwen_7b, monkeypatch):
    """The remedy works: with these settings added to the command, the check passes."""
    driver.write_text("0, GPU-a, 24576\n")
    monkeypatch.setattr("rlhf.planning.check.machine_memory", lambda: 128 << 30)
    write_meta_weights(qwen_7b)
    command = ["recipes=null", "data.train_files=x.jsonl", f"model.path={qwen_7b}", "rollout=embedded"]
    command += ["trainer.device=cuda", "trainer.nproc=1"]
    with pytest.raises(UserError, match="does not fit") as raised:
        check_fits(compose_config(command, Library.find(None)))
    found = re.search(r"add them to the command: (.*?)\. `python", str(raised.value))
    assert found is not None, str(raised.value)
    added = shlex.split(found[1])
    assert len(added) > 1
    check_fits(compose_config([*command, *added], Library.find(None)))


def test_the_error_of_the_check_names_the_gpu_that_a_run_needs(driver, qwen_7b, monkeypatch):
    driver.write_text("0, GPU-a, 6000\n")
    monkeypatch.setattr("rlhf.planning.check.machine_memory", lambda: 128 << 30)
    write_meta_weights(qwen_7b)
    command = ["recipes=null", "data.train_files=x.jsonl", f"model.path={qwen_7b}", "trainer.device=cuda"]
    with pytest.raises(UserError) as raised:
        check_fits(compose_config([*command, "trainer.nproc=1"], Library.find(None)))
    says(str(raised.value), "No settings make the run fit", "at least", "for each GPU")


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        (("--devices", "8"), "--ranks 8"),
        (("--gpus=8",), "--ranks 8"),
        (("--world-size", "8"), "--ranks 8"),
        (("--memory", "80GB"), "--device-memory 80GB"),
        (("--nproc", "8"), "trainer.nproc=8"),
    ],
)
def test_options_of_other_commands_get_a_hint(option, meant, capsys):
    assert main(["recipes=null", *option]) == EXIT_USER_ERROR
    says(capsys.readouterr().err, option[0], f"Did you mean {meant}?")


def test_a_damaged_config_file_is_to_be_corrected(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"')
    assert main(["recipes=null", "data.train_files=x.jsonl", f"model.path={tmp_path}"]) == EXIT_USER_ERROR
    says(capsys.readouterr().err, str(tmp_path), "config.json is not JSON", "Copy or fetch it again")


def test_a_cpu_machine_with_too_little_memory_logs_a_warning(tmp_path, monkeypatch, caplog):
    config = small(tmp_path)
    check_fits(config)
    assert not caplog.records
    monkeypatch.setattr("rlhf.planning.check.machine_memory", lambda: 1 << 20)
    check_fits(config)
    assert "memory may be too small" in caplog.text
    caplog.clear()
    monkeypatch.setenv("RANK", "1")  # under torchrun only one rank warns
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_fits(config)
    assert not caplog.records


def test_the_banner_shows_the_planned_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = small(tmp_path)
    config.data.train_files = str(write_sums(tmp_path / "sums.jsonl"))
    found = plan_of(config)
    assert found is not None
    (shown,) = (line for line in banner(config, []).splitlines() if line.startswith("  memory"))
    assert gib(found[1].peak.total) in shown
    assert found[1].peak.name in shown
    config.model.path = str(tmp_path)
    assert "\n  memory" not in banner(config, [])


LONG = ("data.max_prompt_length=2048", "data.max_response_length=8192")


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        # The least change: gradient checkpointing alone, not the adapters that lower the peak as well.
        (("trainer.nproc=8", "rollout=vllm", "--device-memory=80GB"), ["model.enable_gradient_checkpointing=true"]),
        # Each of these alone leaves another phase too large.
        (
            ("trainer.nproc=2", "--device-memory=24GB"),
            [
                "model.lora.enabled=true",
                "model.enable_gradient_checkpointing=true",
                "actor.ppo_max_token_len_per_gpu=10240",
                "rollout=vllm",
                "rollout.tensor_model_parallel_size=2",
                "actor.fsdp_config.param_offload=true",
            ],
        ),
    ],
)
def test_the_suggested_changes_together_fit_and_none_is_superfluous(qwen_7b, capsys, settings, changes):
    options = [f"model.path={qwen_7b}", *LONG, *settings]
    found = document(capsys, *options, code=DOES_NOT_FIT)["together"]
    assert (found["set"], found["fits"]) == (changes, True)
    fitting = document(capsys, *options, *changes)
    assert fitting["peak"] == found["peak"]
    for left_out in changes:
        fewer = [change for change in changes if change != left_out]
        assert main(["recipes=null", "data.train_files=x.jsonl", *options, *fewer]) != EXIT_DONE
    capsys.readouterr()


def test_the_command_has_each_setting_once(qwen_7b, capsys):
    typed = ["recipes=null", "data.train_files=x.jsonl", f"model.path={qwen_7b}", *LONG, "trainer.nproc=8"]
    off = "model.enable_gradient_checkpointing=false"
    assert main([*typed, off, "rollout=vllm", "--device-memory=80GB"]) == DOES_NOT_FIT
    _, _, command = capsys.readouterr().out.partition("python -m rlhf.train")
    assert shlex.split(command.replace("\\\n", "")) == [
        *typed,
        "rollout=vllm",
        "model.enable_gradient_checkpointing=true",
    ]


def test_the_plan_names_the_device_memory_that_would_be_enough(qwen_7b, capsys):
    options = [f"model.path={qwen_7b}", *LONG, "trainer.nproc=4"]
    found = document(capsys, *options, "--device-memory=8GB", code=DOES_NOT_FIT)["together"]
    assert not found["fits"]
    enough = f"{found['device_memory'] // 2**30}GiB"
    document(capsys, *options, *found["set"], "--device-memory", enough)
    less = f"{found['device_memory'] // 2**30 - 1}GiB"
    document(capsys, *options, *found["set"], "--device-memory", less, code=DOES_NOT_FIT)


def test_the_number_of_devices_that_a_run_needs(qwen_7b, capsys):
    # The rules allow no adapters if the reference has its own weights.
    options = [f"model.path={qwen_7b}", *LONG, "ref.fsdp_config.param_offload=true", "--device-memory=24GB"]
    found = document(capsys, *options, "trainer.nproc=2", code=DOES_NOT_FIT)["together"]
    assert found["ranks"]
    document(capsys, *options, *found["set"], f"trainer.nproc={found['ranks']}")
    document(capsys, *options, *found["set"], f"trainer.nproc={found['ranks'] // 2}", code=DOES_NOT_FIT)
