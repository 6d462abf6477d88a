"""Runs with packing: on by default and logged. Requiring it for a model that mixes sequences is an error."""

import torch
from transformers import AutoModelForCausalLM

from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR
from tests.support.launching import ranks, small, write_sums
from tests.support.tiny_models import save, tiny_config


def test_insisting_on_packing_for_a_model_that_mixes_sequences_ends_the_run(tmp_path):
    torch.manual_seed(0)
    folder = tmp_path / "bloom"
    save(AutoModelForCausalLM.from_config(tiny_config("bloom")), folder)
    sums = write_sums(tmp_path / "sums.jsonl")
    end = ranks(
        tmp_path / "log",
        small(
            tmp_path,
            "x",
            sums,
            f"model.path={folder}",
            "model.attn_implementation=eager",
            "actor.use_remove_padding=true",
        ),
    )
    assert end.code == EXIT_USER_ERROR, end.output
    (message,) = (line for line in end.output.splitlines() if "actor.use_remove_padding=true" in line)
    assert "can't be packed for this model (bloom): it fails on a packed row" in message
    assert "Set actor.use_remove_padding=null" in message
    assert "Traceback" not in end.output


def test_reference_and_critic_are_packed_for_by_default(tmp_path):
    sums = write_sums(tmp_path / "sums.jsonl")
    arguments = small(tmp_path, "x", sums, "algorithm=ppo", "trainer.total_training_steps=2", "trainer.save_freq=0")
    end = ranks(tmp_path / "log", arguments)
    assert end.code == EXIT_DONE, end.output
    for who in ("actor", "critic"):
        assert f"{who}: sequences packed without padding" in end.output
