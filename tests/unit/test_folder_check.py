"""Model folders with missing or invalid files are rejected before anything is loaded."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rlhf
from rlhf.models.folder_check import check_folder
from rlhf.models.model_files import read_headers
from rlhf.models.template_check import check_template
from rlhf.planning.meta_shapes import meta_model
from tests.support.hostile import short_timeouts
from tests.support.refusals import says, user_error

TINY = Path(rlhf.__file__).parent / "models" / "tiny_policy"


@pytest.fixture
def folder(tmp_path) -> Path:
    return shutil.copytree(TINY, tmp_path / "model")


def test_a_complete_folder_and_a_hub_name_pass(folder):
    check_folder("model.path", str(folder))
    check_template(str(folder), None)
    check_folder("model.path", "org/name")
    check_template("org/name", None)


def test_what_a_folder_lacks_is_named(folder):
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / name).unlink()
    message = user_error(check_folder, "model.path", str(folder))
    assert message.startswith(
        f"model.path={folder}: the folder has no weights (*.safetensors) and no tokenizer (tokenizer"
    )
    message = user_error(lambda: check_folder("critic.path", str(folder), tokenizer=False))
    assert (
        message
        == f"critic.path={folder}: the folder has no weights (*.safetensors). Add the files, or set another folder."
    )
    check_folder("critic.path", str(folder), tokenizer=False, weights=False)


def test_a_missing_file_that_the_index_lists_is_an_error(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": files[0], "b": files[1]}}))
    message = user_error(check_folder, "model.path", str(folder))
    assert f"has no {files[1]}, which its index lists (1 of 2 listed files are missing)." in message


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 1}', "[" * 100_000], ids=["torn", "list", "one", "deep"])
def test_an_invalid_index_of_weights_is_an_error(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    check_folder("model.path", str(folder))  # beside a single file of weights, the index is not read
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    message = user_error(check_folder, "model.path", str(folder))
    assert message.startswith(f"model.path={folder}: model.safetensors.index.json is not an index of weights (")


TORN = {
    "deep": (
        lambda whole: (100_000).to_bytes(8, "little") + b"[" * 100_001,
        "does not begin with a safetensors header",
    ),
    "half": (lambda whole: whole[: len(whole) // 2], "bytes of"),
    "pointer": (lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:a\n", "is a pointer of Git LFS"),
    "page": (lambda whole: b"<!DOCTYPE html><html>Not found</html>", "does not begin with a safetensors header"),
    "nothing": (lambda whole: b"", "does not begin with a safetensors header"),
}


@pytest.mark.parametrize("kind", TORN)
def test_truncated_weights_are_rejected_before_loading(folder, kind):
    torn, message = TORN[kind]
    weights = folder / "model.safetensors"
    weights.write_bytes(torn(weights.read_bytes()))
    error = user_error(check_folder, "model.path", str(folder))
    assert error.startswith(f"model.path={folder}: model.safetensors ")
    assert message in error
    check_folder("model.path", str(folder), weights=False)


def test_unused_weights_files_are_not_checked(folder):
    (folder / "consolidated.safetensors").write_bytes(b"version https://git-lfs")
    check_folder("model.path", str(folder))


def test_a_truncated_config_is_rejected_before_loading(folder):
    (folder / "config.json").write_text("{")
    message = user_error(check_folder, "model.path", str(folder))
    assert message.startswith(f"model.path={folder}: config.json is not JSON: ")


def test_pickled_weights_have_a_remedy_that_works(folder, tmp_path):
    make = (
        "import sys, torch; from safetensors.torch import load_file; "
        "torch.save(load_file(sys.argv[1] + '/model.safetensors'), sys.argv[1] + '/pytorch_model.bin')"
    )
    subprocess.run([sys.executable, "-c", make, str(folder)], check=True)
    (folder / "model.safetensors").unlink()
    message = user_error(check_folder, "model.path", str(folder))
    assert message.startswith(
        f"model.path={folder}: its weights are pickles (pytorch_model.bin), which can run code and"
    )
    command = message.split("`")[1].split()
    subprocess.run([sys.executable, *command[1:]], check=True, cwd=TINY.parents[2], capture_output=True)
    check_folder("model.path", f"{folder}-safetensors")
    check_template(f"{folder}-safetensors", None)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:a\nsize 9\n"
JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
CONTENT = {
    "pointer": (POINTER, "is a pointer of Git LFS"),
    "empty": ("", "is not JSON"),
    "half": ('{"eos_token_id": [1', "is not JSON"),
    "list": ("[1]", "must be a JSON object, but has a list"),
    "deep": ("[" * 100_000, "is not JSON"),
}


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("kind", CONTENT)
def test_a_damaged_json_file_is_named_before_anything_is_loaded(folder, name, kind):
    content, problem = CONTENT[kind]
    (folder / name).write_text(content)
    says(user_error(check_folder, "model.path", str(folder)), f"model.path={folder}: {name} ", problem)


def test_a_tokenizer_without_a_model(folder):
    (folder / "tokenizer.json").write_text("{}")
    says(user_error(check_folder, "model.path", str(folder)), "tokenizer.json is not a tokenizer", "fetch it again")
    check_folder("critic.path", str(folder), tokenizer=False)


@pytest.mark.parametrize("name", ["tokenizer.model", "merges.txt", "chat_template.jinja"])
def test_pointers_of_git_lfs_in_other_small_files(folder, name):
    (folder / name).write_text(POINTER)
    says(user_error(check_folder, "model.path", str(folder)), f"{name} is a pointer of Git LFS", "git lfs pull")


@pytest.mark.parametrize("name", ["model.safetensors", "model-2.safetensors", *JSON_FILES])
def test_a_pipe_instead_of_a_file_does_not_hang(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with short_timeouts():
        for weights in (True, False):
            message = user_error(lambda weights=weights: check_folder("model.path", str(folder), weights=weights))
            says(message, f"model.path={folder}: {name} is not a regular file", "Replace it")


def test_a_dangling_link_or_a_folder_instead_of_a_json_file_is_an_error(folder):
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").symlink_to("nowhere")
    says(user_error(check_folder, "model.path", str(folder)), "generation_config.json cannot be read (No such file")
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").mkdir()
    says(user_error(check_folder, "model.path", str(folder)), "generation_config.json is not a regular file")
    (folder / "generation_config.json").rmdir()
    (folder / "onnx.json").mkdir()
    check_folder("model.path", str(folder))


@pytest.mark.parametrize("name", ["../../../../etc/passwd", "/etc/passwd", "..", "", "part/a.safetensors", "a\0b", 5])
def test_an_index_lists_only_files_of_the_folder(folder, name):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    for check in (
        lambda: check_folder("model.path", str(folder)),
        lambda: read_headers(folder, f"model.path={folder}"),
    ):
        says(user_error(check), f"model.path={folder}: model.safetensors.index.json lists {name!r}", "fetch the index")


SIZES = {
    "vocab_size": ("x", 0, -3, True, 10**12),
    "num_attention_heads": (0, 2.5),
    "num_hidden_layers": (0, 10**9, [[1]] and "two"),
    "hidden_size": (10**9,),
    "num_key_value_heads": (0, 10**9),
    "head_dim": (0,),
    "intermediate_size": ("x", 10**9),
}


@pytest.mark.parametrize(("setting", "value"), [(name, value) for name, values in SIZES.items() for value in values])
def test_impossible_sizes_are_named_before_anything_is_loaded(folder, setting, value):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {setting: value}))
    says(
        user_error(check_folder, "model.path", str(folder)), f"model.path={folder}: {setting}={value!r} in config.json"
    )


def test_a_plan_from_config_json_alone_builds_no_absurd_model(folder):
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    for changes, texts in (
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers=1000000000", "above"]),
        ({"num_attention_heads": 0}, ["num_attention_heads=0", "positive"]),
        ({"hidden_act": [1]}, ["Correct its config.json"]),
    ):
        path.write_text(json.dumps(whole | changes))
        with short_timeouts():
            says(user_error(meta_model, "model.path", str(folder)), f"model.path={folder}", *texts)
