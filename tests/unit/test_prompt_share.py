"""Every number of ranks trains on the same prompts in each mini-batch, each prompt once."""

import pytest

from rlhf.config.library import PACKAGE
from rlhf.data import PromptSet, PromptStream
from rlhf.data.items import Row
from rlhf.data.tokens import LengthLimit
from rlhf.experience.prompt_share import PromptShare
from rlhf.models.loading import ModelSource, load_tokenizer

BATCH, MINI, STEPS = 24, 8, 5


@pytest.fixture(scope="module")
def prompts() -> PromptSet:
    folder = PACKAGE / "models" / "tiny_policy"
    rows = [Row(i, f"row {i}", [{"role": "user", "content": f"{i} + 1 ="}], "s", str(i + 1), {}) for i in range(50)]
    tokenizer = load_tokenizer(ModelSource("model.path", str(folder)), folder)
    return PromptSet.in_memory(rows, tokenizer, LengthLimit(64, "error", "data.train_files"))


def deal(prompts: PromptSet, world_size: int) -> list[list[list[list[int]]]]:
    """uids by step, mini-batch and rank."""
    shares = [
        PromptShare(PromptStream(prompts, seed=3, shuffle=True), BATCH, MINI, rank, world_size)
        for rank in range(world_size)
    ]
    result = []
    for _ in range(STEPS):
        dealt = [[drawn.uid for drawn in share.next()] for share in shares]
        size = MINI // world_size
        result.append([[uids[m * size : (m + 1) * size] for uids in dealt] for m in range(BATCH // MINI)])
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


def test_prompts_keep_their_places(prompts):
    share = PromptShare(PromptStream(prompts, seed=3, shuffle=True), BATCH, MINI, 1, 2)
    stream = PromptStream(prompts, seed=3, shuffle=True)
    for _ in range(STEPS):
        drawn = stream.next(BATCH)
        mine = share.next()
        assert len(mine) == BATCH // 2
        assert [each for each in drawn if each in mine] == mine


@pytest.mark.parametrize("size", [1, 7, 8, 30])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_size_of_one_s_own_is_dealt_in_one_piece(prompts, world_size, size):
    stream = PromptStream(prompts, seed=3, shuffle=True)
    shares = [
        PromptShare(PromptStream(prompts, seed=3, shuffle=True), BATCH, MINI, rank, world_size)
        for rank in range(world_size)
    ]
    for _ in range(3):
        drawn, parts = stream.next(size), [share.next(size) for share in shares]
        assert [each for part in parts for each in part] == drawn
        lengths = [len(part) for part in parts]
        assert max(lengths) - min(lengths) <= 1


def test_skipping_leaves_prompts_out_and_never_goes_back(prompts):
    shares = [PromptShare(PromptStream(prompts, seed=3, shuffle=True), BATCH, MINI, rank, 2) for rank in (0, 1)]
    for share in shares:
        assert share.position == 0
        share.next()
        assert share.position == BATCH
        share.advance_to(BATCH - 1)
        assert share.position == BATCH
        share.advance_to(60)
        assert share.position == 60
    dealt = [share.next() for share in shares]
    assert sorted(each.uid for part in dealt for each in part) == list(range(60, 60 + BATCH))
    expected = PromptStream(prompts, seed=3, shuffle=True).next(60 + BATCH)
    assert all(each in expected for part in dealt for each in part)


def test_epochs_are_counted(prompts):
    share = PromptShare(PromptStream(prompts, seed=3, shuffle=True), BATCH, MINI, 0, 2)
    epochs = []
    for _ in range(5):
        share.next()
        epochs.append(share.epochs)
    assert epochs == [24 / 50, 48 / 50, 72 / 50, 96 / 50, 120 / 50]
