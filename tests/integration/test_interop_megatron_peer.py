"""Checkpoints of megatron-core itself: we read what it writes, and it loads what we write."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf.convert.megatron.megatron_folder import write_megatron_folder
from tests.support import megatron_ranks, megatron_training
from tests.support.megatron_ranks import CASES, SIZES, TIED, TOKENS
from tests.support.peers import run_in_peers
from tests.support.sources import opened, whole

pytestmark = pytest.mark.peers
SCRIPT = Path(megatron_ranks.__file__)
ALIASES = {
    ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
    ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
}
SPLIT = [(name, "x".join(map(str, split))) for name, splits in CASES.items() for split in splits]
READ = [(*case, kind) for case in SPLIT for kind in ("dist", "ranks")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All folders that `megatron_ranks` writes, and the folders that we write from them."""
    root = tmp_path_factory.mktemp("megatron")
    for architecture, tied in TIED.items():
        config = AutoConfig.for_model(architecture, **SIZES, tie_word_embeddings=tied)
        config.save_pretrained(root / architecture / "huggingface")
    run_in_peers(SCRIPT, root, "make")
    for architecture in CASES:
        folder = root / architecture
        with opened(folder / "1x1x1" / "dist", model_files=folder / "huggingface") as source:
            write_megatron_folder(source, folder / "ours")
            split = {"tensor_ranks": 2, "pipeline_ranks": 2}
            write_megatron_folder(source, folder / "ours_ranks", **split, layout="mp_rank")
    run_in_peers(SCRIPT, root, "load")
    return root


def tensors_of(folder: Path, architecture: Path) -> dict[str, Tensor]:
    """Return all tensors that we read from a Megatron folder."""
    with opened(folder, model_files=architecture / "huggingface") as source:
        assert source.layout == "megatron"
        return whole(source, 1001)


@pytest.mark.parametrize("architecture", CASES)
def test_the_merged_model_gives_megatrons_logits(made: Path, architecture: str) -> None:
    """Float32 logits differ only by the order of sums. This shows that every tensor is complete and in its place."""
    tensors = tensors_of(made / architecture / "1x1x1" / "dist", made / architecture)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(made / architecture / "huggingface"))
    missing, unexpected = model.float().eval().load_state_dict(tensors, strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if TIED[architecture] else [])
    model.tie_weights()
    with torch.no_grad():
        logits = model(torch.tensor(TOKENS)).logits
    expected = torch.load(made / architecture / "logits.pt")
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("architecture", "case", "kind"), READ)
def test_every_split_is_read_as_the_same_model(made: Path, architecture: str, case: str, kind: str) -> None:
    """Splits are tensor, pipeline and virtual pipeline parallel; saves are `dist` or have a file per rank (`ranks`)."""
    expected = tensors_of(made / architecture / "1x1x1" / "dist", made / architecture)
    found = tensors_of(made / architecture / case / kind, made / architecture)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_megatron_loads_what_we_write_at_every_split(made: Path) -> None:
    """Every rank loads the same bits as from Megatron's own folder."""
    found = json.loads((made / "loaded.json").read_text())
    assert found == {" ".join(case): None for case in SPLIT}


def test_the_files_of_ranks_that_we_write_are_megatrons(made: Path) -> None:
    """Each rank's file equals Megatron's, with the names of Transformer Engine's layer norms."""
    for place in (made / "qwen2" / "2x2x1" / "ranks").iterdir():
        expected = torch.load(place / "model_states.pt", weights_only=True)["model"]
        ours = made / "qwen2" / "ours_ranks" / place.name / "model_states.pt"
        found = torch.load(ours, weights_only=True)["model"]
        for name, alias in ALIASES.items():
            expected = {key.replace(name, alias): value for key, value in expected.items()}
        weights = {name: tensor for name, tensor in expected.items() if tensor is not None}
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    assert SIZES["vocab_size"] % 128 != 0


@pytest.fixture(scope="module")
def optimizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All folders that `megatron_training` writes."""
    root = tmp_path_factory.mktemp("optimizers")
    config = AutoConfig.for_model("qwen2", **SIZES, tie_word_embeddings=TIED["qwen2"])
    config.save_pretrained(root / "huggingface")
    run_in_peers(Path(megatron_training.__file__), root)
    return root


TRAINED = ["x".join(map(str, split)) for split in megatron_training.SPLITS]


@pytest.mark.parametrize("split", TRAINED)
@pytest.mark.parametrize("kind", ["plain", "ranks", "fully_reshardable"])
def test_moments_and_float32_weights_are_the_optimizers(optimizers: Path, split: str, kind: str) -> None:
    """The state equals the tensors of Megatron's optimizer, which the test reads as weights."""
    found = tensors_of(optimizers / split / kind, optimizers)
    expected = tensors_of(optimizers / split / "masters", optimizers)
    for moment in ("exp_avg", "exp_avg_sq"):
        of_moment = tensors_of(optimizers / split / moment, optimizers)
        expected |= {f"{name}.{moment}": tensor for name, tensor in of_moment.items()}
    steps = {name for name in found if name.endswith(".step")}
    assert found.keys() == expected.keys() | steps
    assert {found[name].item() for name in steps} == {megatron_training.STEPS}
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("kind", ["dp_reshardable", "dp_zero_gather_scatter"])
def test_buckets_are_left_out_with_the_formats_name(optimizers: Path, kind: str) -> None:
    with opened(optimizers / TRAINED[0] / kind, model_files=optimizers / "huggingface") as source:
        assert source.contents.moments == {}
        assert f"in the format {kind}" in source.contents.absent[0]
