"""Verbs `merge` and `export`: what they write, and one line for every mistake."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from rlhf.checkpoint.__main__ import main
from rlhf.checkpoint.export import hf_work
from rlhf.storage.layout import step_dir
from tests.support import tiny_models
from tests.support.checkpoints import (
    TINY_POLICY,
    PlainRole,
    equal_bits,
    flip_bit,
    make_checkpointer,
    make_config,
    save_steps,
)
from tests.support.thread_ranks import make_coordinator, run_thread_ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for architecture in ("qwen2", "llama"):
        tiny_models.causal_lm(architecture, folder / architecture)
    tiny_models.classifier("llama", folder / "classifier")
    return folder


def merged(command, source: Path, target: Path, *options) -> dict[str, torch.Tensor]:
    code, out, err = command("merge", "--local_dir", source, "--target_dir", target, "--json", *options)
    assert (code, err) == (0, "")
    assert set(json.loads(out)["files"]) == {path.name for path in target.iterdir()}
    return {name: t for path in sorted(target.glob("*.safetensors")) for name, t in load_file(path).items()}


def test_merging_a_hugging_face_folder_copies_it(models, tmp_path, command):
    for name in ("qwen2", "llama"):
        found = merged(command, models / name, tmp_path / name)
        assert equal_bits(found, load_file(models / name / "model.safetensors"))
        kept = {path.name: path.read_bytes() for path in (models / name).iterdir() if "model.safe" not in path.name}
        written = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        assert {name: written[name] for name in kept if name != "config.json"} == {
            name: text for name, text in kept.items() if name != "config.json"
        }
        assert json.loads(written["config.json"]) == json.loads(kept["config.json"])


def test_merge_converts_the_dtype_and_splits_into_shards(models, tmp_path, command):
    whole = load_file(models / "llama" / "model.safetensors")
    found = merged(command, models / "llama", tmp_path / "b", "--dtype", "bfloat16", "--max-shard-size", "4KB")
    assert equal_bits(found, {name: tensor.bfloat16() for name, tensor in whole.items()})
    files = sorted((tmp_path / "b").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype="auto", output_loading_info=True)
    assert model.dtype == torch.bfloat16
    assert not any(info.values())
    # Without --dtype the checkpoint's type is kept.
    assert equal_bits(merged(command, tmp_path / "b", tmp_path / "again"), found)


def test_convert_to_hf_writes_the_same_files_as_merge(models, tmp_path, command):
    """`convert --to hf` takes all options for a Hugging Face folder, and the two folders as arguments or as flags."""
    options = ("--dtype", "bfloat16", "--max-shard-size", "4KB", "--tie-word-embedding", "--json")
    merged(command, models / "qwen2", tmp_path / "merged", *options)
    for number, places in enumerate(
        ((models / "qwen2", tmp_path / "0"), ("--local_dir", models / "qwen2", "--target_dir", tmp_path / "1"))
    ):
        code, _, err = command("convert", "--to", "hf", *places, *options)
        assert (code, err) == (0, "")
        folders = [{path.name: path.read_bytes() for path in (tmp_path / n).iterdir()} for n in ("merged", f"{number}")]
        assert folders[0] == folders[1]
    code, _, err = command("convert", models / "qwen2", tmp_path / "x", "--to", "dcp", "--adapter", "keep")
    assert (code, "--adapter=keep is for --to hf" in err) == (2, True)
    code, _, err = command("convert", models / "qwen2", tmp_path / "x")
    assert (code, "Give --to" in err) == (2, True)


def test_weights_beyond_float16_are_an_error(models, tmp_path, command):
    source = shutil.copytree(models / "llama", tmp_path / "large")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e5
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    for verb in (["merge", "--local_dir", source, "--target_dir"], ["convert", "--to", "dcp", source]):
        code, _, err = command(*verb, tmp_path / "half", "--dtype", "float16")
        assert (code, err.count("\n"), "model.norm.weight has values beyond 65504" in err) == (2, 1, True)
        assert not (tmp_path / "half").exists()
    tensors["model.norm.weight"][3] = torch.inf  # infinity exists in every type
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert merged(command, source, tmp_path / "half", "--dtype", "float16")["model.norm.weight"][3] == torch.inf


def test_tied_embeddings(models, tmp_path, command):
    source = shutil.copytree(models / "qwen2", tmp_path / "both")
    whole = load_file(source / "model.safetensors")
    embeddings = whole["model.embed_tokens.weight"]
    save_file(whole | {"lm_head.weight": embeddings.clone()}, source / "model.safetensors")
    assert equal_bits(merged(command, source, tmp_path / "one"), whole)
    save_file(whole | {"lm_head.weight": embeddings + 1}, source / "model.safetensors")
    options = ("merge", "--local_dir", source, "--target_dir", tmp_path / "kept")
    code, _, err = command(*options)
    assert (code, err.count("\n")) == (2, 1)
    assert "lm_head.weight and model.embed_tokens.weight differ" in err
    found = merged(command, source, tmp_path / "kept", "--no-tie-word-embedding")
    assert equal_bits(found["lm_head.weight"], embeddings + 1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "kept")
    assert equal_bits(model.lm_head.weight.detach(), embeddings + 1)
    # The model has a tied head, but its config.json does not say so.
    source = shutil.copytree(models / "qwen2", tmp_path / "forgets")
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
    (source / "config.json").write_text(json.dumps(config))
    code, _, err = command("merge", "--local_dir", source, "--target_dir", tmp_path / "x")
    assert code == 2
    assert "lacks tensors" in err
    assert "such as lm_head.weight" in err
    assert "use merge with --tie-word-embedding" in err
    merged(command, source, tmp_path / "x", "--tie-word-embedding")
    assert json.loads((tmp_path / "x" / "config.json").read_text())["tie_word_embeddings"] is True


def test_value_models(models, tmp_path, command):
    def check_rejected(source: Path, what: str, *options) -> None:
        code, _, err = command("merge", "--local_dir", source, "--target_dir", tmp_path / "x", *options)
        assert (code, err.count("\n")) == (2, 1)
        assert what in err

    check_rejected(models / "llama", "does not know, such as lm_head.weight", "--is-value-model")
    check_rejected(models / "llama", "read as a value model, because of --is-value-model", "--is-value-model")
    check_rejected(models / "classifier", "such as score.bias (1 in all)", "--is-value-model")
    merged(command, models / "classifier", tmp_path / "kept")
    assert json.loads((tmp_path / "kept/config.json").read_text())["architectures"] == [
        "LlamaForSequenceClassification"
    ]
    AutoModelForTokenClassification.from_pretrained(models / "llama", num_labels=1).save_pretrained(tmp_path / "saved")
    check_rejected(tmp_path / "saved", "does not know, such as score.bias", "--hf_model_path", models / "llama")
    check_rejected(
        tmp_path / "saved", "value model, use merge with --is-value-model", "--hf_model_path", models / "llama"
    )
    # A tool may save tensors without noting what the head is; --is-value-model then says so.
    merged(command, tmp_path / "saved", tmp_path / "value", "--hf_model_path", models / "llama", "--is-value-model")
    written = json.loads((tmp_path / "value/config.json").read_text())
    assert (written["architectures"], list(written["id2label"])) == (["LlamaForTokenClassification"], ["0"])
    model, info = AutoModelForTokenClassification.from_pretrained(tmp_path / "value", output_loading_info=True)
    assert (any(info.values()), model.config.num_labels) == (False, 1)


def test_export_takes_the_newest_of_a_run(tmp_path, command):
    config = make_config(tmp_path)
    save_steps(config, PlainRole(), 1)
    make_checkpointer(config, PlainRole(seed=3), 2).save(2)
    code, out, err = command("export", config.run_dir, tmp_path / "out", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["target"] == str(tmp_path / "out")
    assert equal_bits(load_file(tmp_path / "out/model.safetensors"), {"weight": PlainRole(seed=3).weight})
    code, _, err = command("export", config.run_dir, tmp_path / "out")
    assert (code, err.count("\n")) == (2, 1)
    assert "exists already" in err
    flip_bit(step_dir(config.run_dir, 2) / "actor/model/rank_00000.safetensors", 9000)
    code, _, err = command("export", config.run_dir, tmp_path / "out", "--overwrite")
    assert (code, err.count("\n")) == (1, 1)
    assert "global_step_2 is damaged: actor/model/rank_00000.safetensors" in err
    assert equal_bits(load_file(tmp_path / "out/model.safetensors"), {"weight": PlainRole(seed=3).weight})
    assert not list(tmp_path.glob(".incomplete*"))
    assert command("export", step_dir(config.run_dir, 1), tmp_path / "out", "--overwrite")[0] == 0
    assert equal_bits(load_file(tmp_path / "out/model.safetensors"), {"weight": PlainRole().weight})


def test_a_folder_of_several_models_is_not_replaced_by_one(tmp_path, command):
    run_dir, models = make_config(tmp_path).run_dir, tmp_path / "models"
    save_steps(make_config(tmp_path), PlainRole(), 1)
    for name in ("a", "b"):
        assert command("export", run_dir, models / name)[0] == 0
    code, _, err = command("export", run_dir, models, "--overwrite")
    assert (code, err.count("\n")) == (2, 1)
    assert f"{models} is not the folder of one exported model" in err
    assert {path.name for path in models.iterdir()} == {"a", "b"}
    assert command("export", run_dir, models / "a", "--overwrite")[0] == 0


def test_mistakes_get_one_line(models, tmp_path, command):
    run_dir = make_config(tmp_path).run_dir
    save_steps(make_config(tmp_path), PlainRole(), 1)
    (tmp_path / "empty").mkdir()
    other = shutil.copytree(models / "llama", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    wide = shutil.copytree(models / "llama", tmp_path / "wide")
    (wide / "config.json").write_text(json.dumps(config | {"intermediate_size": 25}))
    no_config = shutil.copytree(models / "llama", tmp_path / "no_config")
    (no_config / "config.json").unlink()
    for options, message in (
        (["--local_dir", tmp_path / "nothing"], "does not exist"),
        (["--local_dir", tmp_path / "empty"], "contains no checkpoint of a known layout"),
        (["--local_dir", tmp_path / "empty", "--backend", "native"], "has no checkpoint of this trainer"),
        (["--local_dir", tmp_path / "empty", "--backend", "huggingface"], "has no weights of a Hugging Face model"),
        (["--local_dir", run_dir, "--role", "critic"], "has no role critic"),
        (["--local_dir", run_dir, "--hf_model_path", models / "llama"], "does not know, such as weight"),
        (["--local_dir", models / "llama", "--hf_model_path", models], "has no config.json"),
        (["--local_dir", models / "llama", "--hf_model_path", other], "such as model.layers.2."),
        (
            ["--local_dir", models / "llama", "--hf_model_path", wide],
            "mlp.down_proj.weight has the shape [16, 24]; config.json",
        ),
        (["--local_dir", no_config], "has no config.json. Name the model's folder with --hf_model_path"),
        (["--local_dir", models / "llama", "--private"], "--private is for an upload"),
        (["--local_dir", models / "llama", "--tp", 2], "--tp is for --to megatron, not for --to hf"),
        ([], "--local_dir"),
    ):
        code, out, err = command("merge", "--target_dir", tmp_path / "out", *options)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert message in err
        assert not (tmp_path / "out").exists()
        assert not list(tmp_path.glob(".incomplete*"))


def test_misplaced_folders_cost_no_imports(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    here, gone, run_dir = str(tmp_path / "full"), str(tmp_path / "gone"), str(make_config(tmp_path).run_dir)
    save_steps(make_config(tmp_path), PlainRole(), 1)
    mistakes = [
        ["export", gone, here],
        ["export", here, here],
        ["import", gone, f"{gone}/global_step_0"],
        ["convert", gone, here, "--to", "dcp"],
        ["merge", "--local_dir", here, "--target_dir", gone, "--hf_model_path", "Qwen/Qwen2.5-0.5B"],
        ["test", "--local_dir", here, "--test_hf_dir", gone],
        ["diff", here, gone],
        ["import", here, gone],
        ["convert", here, gone, "--to", "native"],
        ["push", run_dir, "somebody/model"],
    ]
    code = (
        "import json, sys\n"
        "from rlhf.checkpoint.__main__ import main\n"
        "codes = [main(arguments) for arguments in json.loads(sys.argv[1])]\n"
        "print(codes, 'torch' in sys.modules)\n"
    )
    of_nobody = {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | {"HF_HOME": gone}
    command = [sys.executable, "-c", code, json.dumps(mistakes)]
    done = subprocess.run(command, capture_output=True, text=True, env=of_nobody)
    assert done.stdout == f"{[2] * len(mistakes)} False\n"
    lines = done.stderr.splitlines()
    assert len(lines) == len(mistakes)
    assert "--hf_model_path=Qwen/Qwen2.5-0.5B is not a folder" in lines[4]
    assert f"give {gone}/global_step_0, or another step" in lines[7]
    assert "no token for the Hub" in lines[9]


def test_copying_unchanged_weights_does_not_import_torch(tmp_path):
    run_dir = make_config(tmp_path).run_dir
    save_steps(make_config(tmp_path), PlainRole(), 1)
    code = (
        "import json, sys\n"
        "from rlhf.checkpoint.__main__ import main\n"
        "codes = [main(arguments) for arguments in json.loads(sys.argv[1])]\n"
        "print(codes, sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    as_stored = [
        ["merge", "--local_dir", run_dir, "--target_dir", tmp_path / "a", "--tie-word-embedding"],
        ["export", run_dir, tmp_path / "b", "--dtype", "float32"],
        ["convert", step_dir(run_dir, 1), tmp_path / "c", "--to", "hf"],
    ]
    texts = json.dumps([[str(word) for word in words] for words in as_stored])
    done = subprocess.run([sys.executable, "-c", code, texts], capture_output=True, text=True)
    assert (done.stderr, done.stdout.splitlines()[-1]) == ("", "[0, 0, 0] []")
    for name in "abc":
        assert equal_bits(load_file(tmp_path / name / "model.safetensors"), {"weight": PlainRole().weight})


@pytest.mark.parametrize("contents", ["model", "hf_model"])
def test_copied_and_converted_folders_are_identical(tmp_path, command, monkeypatch, contents):
    run_thread_ranks(3, save_part, tmp_path, contents)
    run_dir, options = make_config(tmp_path).run_dir, ("--max-shard-size", "8KB", "--no-tie-word-embedding")
    copied = merged(command, run_dir, tmp_path / "copied", *options)
    monkeypatch.setattr(hf_work, "plan_as_stored", lambda *arguments: None)
    assert equal_bits(merged(command, run_dir, tmp_path / "computed", *options), copied)
    folders = [{path.name: path.read_bytes() for path in (tmp_path / n).iterdir()} for n in ("copied", "computed")]
    assert folders[0] == folders[1]
    assert sum(name.endswith(".safetensors") for name in folders[0]) > 3


def save_part(rank: int, folder: Path, contents: str) -> None:
    """Save one rank's part of weights of several sizes."""

    class Some(PlainRole):
        def model_shards(self):
            found = {"last": super().model_shards()["weight"]}
            for number, size in enumerate((1, 3000, 2, 5000, 64)):
                found[f"layers.{number}"] = PlainRole(size, rank, 3, seed=number).model_shards()["weight"]
            return found

        def hf_files(self):
            return {path.name: path.read_bytes() for path in TINY_POLICY.glob("*.json")}

    config = make_config(folder)
    config.checkpoint.contents = [contents]
    make_checkpointer(config, Some(1000, rank, 3), 1, make_coordinator()).save(1)


def test_mistyped_words_get_one_line(capsys):
    for arguments, message in (
        (["exprot", "a", "b"], "exprot is not a verb; .*Did you mean export?"),
        (["export", "a", "b", "--dtpye", "bfloat16"], "--dtpye bfloat16 is not known. Did you mean --dtype?"),
        (["export", "a", "b", "c"], "c is not known."),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        err = capsys.readouterr().err
        assert (caught.value.code, err.count("\n")) == (2, 1), err
        assert all(part in err for part in (*message.split(".*"), "--help"))


def test_an_address_instead_of_a_folder_is_an_error(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    address, here = "s3://bucket/model", "model"
    for arguments in (
        ["export", here, address],
        ["export", address, here],
        ["merge", "--local_dir", here, "--target_dir", address],
        ["merge", "--local_dir", here, address, "--target_dir", here],
        ["merge", "--local_dir", here, "--target_dir", here, "--hf_model_path", address],
        ["convert", here, address, "--to", "dcp"],
        ["convert", here, "--output_path", address, "--to", "megatron"],
        ["import", address, "global_step_0"],
        ["import", here, f"{address}/global_step_0"],
        ["push", address, "somebody/model"],
        ["test", "--local_dir", here, "--test_hf_dir", address],
        ["diff", here, address],
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        err = capsys.readouterr().err
        assert (caught.value.code, err.count("\n")) == (2, 1), err
        assert f"{address} is a URL" in err or f"{address}/global_step_0 is a URL" in err
    assert not list(tmp_path.iterdir())


def test_options_of_verl_are_taken(models, tmp_path, command):
    merged(command, models / "llama", tmp_path / "out", "--use_cpu_initialization")


def test_wrong_words_are_usage_errors(tmp_path, capsys):
    for options in (["--max-shard-size", "much"], ["--max-shard-size", "0"], ["--dtype", "int8"], ["--backend", "x"]):
        with pytest.raises(SystemExit) as caught:
            main(["merge", "--local_dir", str(tmp_path), "--target_dir", str(tmp_path / "out"), *options])
        assert caught.value.code == 2
        assert options[1] in capsys.readouterr().err
