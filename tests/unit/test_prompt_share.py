"""Every number of ranks trains on the same prompts in each mini-batch, each prompt once."""

import pytest

from rlhf.config import ModelConfig
from rlhf.data import PromptSet, PromptStream
from rlhf.data.types import Row
from rlhf.models.loading import load_tokenizer
from rlhf.prompt_share import PromptShare
from rlhf.train import PACKAGE

BATCH, MINI, STEPS = 24, 8, 5


@pytest.fixture(scope="module")
def prompts() -> PromptSet:
    folder = PACKAGE / "models" / "tiny_policy"
    rows = [Row(i, f"row {i}", [{"role": "user", "content": f"{i} + 1 ="}], "s", str(i + 1), {}) for i in range(50)]
    return PromptSet(rows, load_tokenizer(ModelConfig(), folder), 64, "error", "data.train_files")


def deal(prompts: PromptSet, world_size: int) -> list[list[list[list[int]]]]:
    """uids by step, mini-batch and rank."""
    shares = [
        PromptShare(PromptStream(prompts, seed=3, shuffle=True), BATCH, MINI, rank, world_size)
        for rank in range(world_size)
    ]
    result = []
    for _ in range(STEPS):
        dealt = [[request.uid for request in share.next()[1]] for share in shares]
        size = MINI // world_size
        result.append([[uids[m * size : (m + 1) * size] for uids in dealt] for m in range(shares[0].mini_batches)])
    return result


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_mini_batches_are_the_same_at_every_world_size(prompts, world_size):
    position = 0
    for step in deal(prompts, world_size):
        assert len(step) == BATCH // MINI
        for mini_batch in step:
            assert all(len(uids) == MINI // world_size for uids in mini_batch)
            # In the order of the ranks: complete, disjoint and as drawn.
            assert [uid for uids in mini_batch for uid in uids] == list(range(position, position + MINI))
            position += MINI


def test_prompts_and_requests_belong_together(prompts):
    share = PromptShare(PromptStream(prompts, seed=3, shuffle=True), BATCH, MINI, 1, 2)
    stream = PromptStream(prompts, seed=3, shuffle=True)
    for _ in range(STEPS):
        drawn = dict(stream.next(BATCH))
        mine, requests = share.next()
        assert [drawn[request.uid] for request in requests] == mine
        assert [request.token_ids for request in requests] == [prompt.token_ids for prompt in mine]


def test_state_is_the_stream_s_and_epochs_are_counted(prompts):
    share = PromptShare(PromptStream(prompts, seed=3, shuffle=True), BATCH, MINI, 0, 2)
    epochs = []
    for _ in range(5):
        share.next()
        epochs.append(share.epoch)
    assert epochs == [24 // 50, 48 // 50, 72 // 50, 96 // 50, 120 // 50]
    stream = PromptStream(prompts, seed=3, shuffle=True)
    stream.load_state_dict(share.state_dict())
    assert PromptShare(stream, BATCH, MINI, 0, 2).next() == share.next()
