"""Every number of ranks draws the same prompts in each step, each once, nearly equally many on every rank."""

import pytest

from rlhf.config import AlgorithmConfig, RolloutConfig
from rlhf.config.derived import generated_by_rank
from rlhf.config.library import PACKAGE
from rlhf.data import PromptSet, PromptStream
from rlhf.data.items import Row
from rlhf.data.tokens import LengthLimit
from rlhf.experience.prompt_share import PromptShare
from rlhf.models.loading import ModelSource, load_tokenizer
from rlhf.ranks.dims import RankGroup

BATCH, STEPS = 24, 5


@pytest.fixture(scope="module")
def prompts() -> PromptSet:
    folder = PACKAGE / "models" / "tiny_policy"
    rows = [Row(i, f"row {i}", [{"role": "user", "content": f"{i} + 1 ="}], "s", str(i + 1), {}) for i in range(50)]
    tokenizer = load_tokenizer(ModelSource("model.path", str(folder)), folder)
    return PromptSet.in_memory(rows, tokenizer, LengthLimit(64, "error", "data.train_files"))


def shares_of(prompts: PromptSet, world_size: int) -> list[PromptShare]:
    """The share of each rank."""
    return [
        PromptShare(PromptStream(prompts, seed=3, shuffle=True), BATCH, RankGroup(rank, range(world_size), None))
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("size", [None, 1, 7, 8, 30])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 32])
def test_ranks_together_draw_what_one_would(prompts, world_size, size):
    stream, shares = PromptStream(prompts, seed=3, shuffle=True), shares_of(prompts, world_size)
    for _ in range(STEPS):
        drawn, parts = stream.next(size or BATCH), [share.next(size) for share in shares]
        assert [each for part in parts for each in part] == drawn  # in the order of the ranks, and as drawn
        lengths = [len(part) for part in parts]
        assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(("estimator", "samples"), [("grpo", 3), ("remax", 4)])
@pytest.mark.parametrize("prompts_of_all", [1, 7, 24])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 32])
def test_the_plan_counts_the_samples_of_the_busiest_rank(prompts, world_size, prompts_of_all, estimator, samples):
    busiest = max(len(share.next(prompts_of_all)) for share in shares_of(prompts, world_size))
    planned = generated_by_rank(prompts_of_all, RolloutConfig(n=3), AlgorithmConfig(estimator), world_size)
    assert planned == busiest * samples


def test_skipping_leaves_prompts_out_and_never_goes_back(prompts):
    shares = shares_of(prompts, 2)
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
    share = shares_of(prompts, 2)[0]
    epochs = []
    for _ in range(5):
        share.next()
        epochs.append(share.epochs)
    assert epochs == [24 / 50, 48 / 50, 72 / 50, 96 / 50, 120 / 50]
