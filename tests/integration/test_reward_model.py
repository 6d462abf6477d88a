"""A reward model scores whole chats. For any batching, on one rank or two, scores equal those of the plain model for
single chats. Tests run in float64, so that rounding errors are small."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification

from rlhf.backends.fsdp2 import shard
from rlhf.config import BackendConfig, RewardConfig, RewardModelConfig
from rlhf.data import Prompt
from rlhf.errors import UserError
from rlhf.experience.metrics import RolloutStats
from rlhf.models.loading import ModelSource, ModelStart, load_model_config, load_reward_model, load_tokenizer
from rlhf.models.packing import is_packed
from rlhf.models.packing_probe import choose_packing
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.reward import Reward
from rlhf.reward.failures import FailurePolicy
from rlhf.reward.reward_model import RewardModel
from rlhf.reward.scores import RewardItem
from rlhf.reward.weighted import Term
from rlhf.rollout import Request, Sample
from tests.support import plain_collect as collecting
from tests.support.in_float64 import TOLERANCE, in_float64
from tests.support.numeric_ranks import run_ranks, single_rank
from tests.support.plain_collect import UNFILTERED
from tests.support.tiny_models import classifier, tiny_tokenizer

CPU, DAY = torch.device("cpu"), date(2026, 3, 14)


def item(question: str, answer: str, system: str | None = None) -> RewardItem:
    messages = [{"role": "system", "content": system}] * (system is not None) + [{"role": "user", "content": question}]
    return RewardItem("sums", answer, None, {}, messages)


# The lengths differ widely and are in no order. Two are equal.
ITEMS = [
    item("What is 1 + 1?", "2"),
    item("State the final answer to the following arithmetic problem: 12 + 34 =", "The answer is 46. " * 4),
    item("1?", ""),
    item("What is 1 + 1?", "3"),
    item("What is 10 + 1?", "eleven, I think", system="Be brief."),
    item("Say hello", "hello " * 30),
    item("2 + 2 =", "4"),
]


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    with in_float64():
        yield


def build(
    folder: Path, *, sharded: bool = False, packed: bool | None = False, day: date = DAY, **settings: int
) -> RewardModel:
    source = ModelSource("reward_model.path", str(folder))
    module = load_reward_model(ModelStart(source, folder, load_model_config(source, folder))).double()
    module = shard(module, BackendConfig(), CPU) if sharded else module
    choose_packing(module, packed, "reward_model.use_remove_padding")
    config = RewardModelConfig(path=str(folder), **settings)
    return RewardModel(module, load_tokenizer(source, folder), config, CPU, day)


def scores(model: RewardModel, items: list[RewardItem]) -> list[float]:
    scores = model.score(items)
    assert not any(v.failed or v.timed_out or v.extra for v in scores)
    return [v.score for v in scores]


def plain(folder: Path, items: list[RewardItem], last: int = 10_000) -> list[float]:
    """Return the scores of transformers' class for each chat separately, without a mask or padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).double().eval()
    tokenizer = load_tokenizer(ModelSource("reward_model.path", str(folder)), folder)
    result = []
    for one in items:
        chat = [*one.messages, {"role": "assistant", "content": one.response}]
        if tokenizer.chat_template is None:
            ids = tokenizer("".join(message["content"] for message in chat))["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(chat, return_dict=False)
        with torch.no_grad():
            result.append(float(model(input_ids=torch.tensor([ids[-last:]])).logits))
    assert len(set(result)) > 1
    return result


def close(a: list[float], b: list[float]) -> bool:
    return a == pytest.approx(b, rel=TOLERANCE, abs=TOLERANCE)


# The template ends each chat with the end-of-sequence token, 1. If 1 is also the padding, the model class skips it, and
# scores at the last token before it.
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("pad", [0, 1, None, -1])
@pytest.mark.parametrize("budget", [1, 60, 16384])
@pytest.mark.parametrize("packed", [True, False])
def test_scores_equal_those_of_the_plain_model(tmp_path, architecture, pad, budget, packed):
    classifier(architecture, tmp_path, pad_token_id=pad)
    with single_rank():
        model = build(tmp_path, packed=packed, forward_max_token_len_per_gpu=budget)
        assert close(scores(model, ITEMS), plain(tmp_path, ITEMS))
        assert close(scores(model, ITEMS[::-1]), plain(tmp_path, ITEMS[::-1]))
        assert model.score([]) == []


def test_a_template_prints_the_day_of_the_start(tmp_path):
    """The day is that of the first start, so a resume on a later day gives the same scores."""
    classifier("llama", tmp_path)
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    seen: list[str] = []
    with single_rank():
        for day in (DAY, DAY, date(2026, 3, 15)):
            model = build(tmp_path, day=day)
            model._module.register_forward_pre_hook(
                lambda _, __, given: seen.append(tokenizer.decode(given["input_ids"][0])), with_kwargs=True
            )
            model.score(ITEMS[:1])
    assert seen == [f"{day} Mar 2026What is 1 + 1?2" for day in (14, 14, 15)]


@pytest.mark.parametrize("packed", [True, False])
def test_passes_are_filled_to_the_budget(tmp_path, packed):
    classifier("llama", tmp_path)
    passes: list[int] = []
    with single_rank():
        model = build(tmp_path, packed=packed, forward_max_token_len_per_gpu=150)
        model._module.register_forward_pre_hook(
            lambda _, args, kwargs: passes.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        scores(model, ITEMS * 3)
    assert all(tokens <= 150 for tokens in passes)
    lengths = [len(ids) for ids in model._tokenize(ITEMS * 3)]
    assert (sum(passes) == sum(lengths)) == packed


def test_a_bidirectional_model_sees_no_padding(tmp_path):
    classifier("bert", tmp_path)
    with single_rank():
        model = build(tmp_path, packed=None)
        assert not is_packed(model._module)
        assert close(scores(model, ITEMS), plain(tmp_path, ITEMS))


def test_the_end_of_long_chats_is_read(tmp_path):
    classifier("llama", tmp_path)
    with single_rank():
        cut = scores(build(tmp_path, max_length=9), ITEMS)
        assert close(cut, plain(tmp_path, ITEMS, last=9))
        assert not close(cut, plain(tmp_path, ITEMS))


def test_chats_are_truncated_to_the_positions_of_the_model(tmp_path):
    classifier("gpt2", tmp_path, n_positions=20)
    with single_rank():
        assert close(scores(build(tmp_path), ITEMS), plain(tmp_path, ITEMS, last=20))


def test_texts_are_concatenated_without_a_chat_template(tmp_path):
    classifier("llama", tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with single_rank():
        assert close(scores(build(tmp_path), ITEMS), plain(tmp_path, ITEMS))


@pytest.mark.parametrize("template", [True, False])
def test_special_tokens_are_the_template_s_or_else_the_tokenizer_s(tmp_path, template):
    classifier("llama", tmp_path)
    tokenizer = tiny_tokenizer()
    ends = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|system|>", "<|end|>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|system|> $A <|end|>", special_tokens=ends)
    tokenizer.chat_template = tokenizer.chat_template if template else None
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(tmp_path)
    assert len(load_tokenizer(ModelSource("reward_model.path", ""), tmp_path)("").input_ids) == 2
    with single_rank():
        assert close(scores(build(tmp_path), ITEMS), plain(tmp_path, ITEMS))


@pytest.mark.parametrize("template", [True, False])
def test_a_response_cannot_write_special_tokens(tmp_path, template):
    """Otherwise a response could end its message and praise itself as the user."""
    classifier("llama", tmp_path)
    if not template:
        (tmp_path / "chat_template.jinja").unlink()
    tokenizer = tiny_tokenizer()
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    texts = "".join(tokenizer.added_tokens_decoder[number].content for number in special)
    with single_rank():
        model = build(tmp_path)
        chats = [item("1 + 1?", "2"), item("1 + 1?", f"2{texts}"), item(f"1 + 1?{texts}", "2")]
        honest, *forged = ([token for token in ids if token in special] for ids in model._tokenize(chats))
    assert forged == [honest, honest]


def test_without_a_padding_token_any_token_may_end_a_chat(tmp_path):
    classifier("llama", tmp_path, pad_token_id=None)
    template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{{ '<|end|>' if 'Say' in messages[0]['content'] else '<|pad|>' }}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    with single_rank():
        assert close(scores(build(tmp_path), ITEMS), plain(tmp_path, ITEMS))


def test_refused_chats_name_the_reward_model(tmp_path):
    classifier("llama", tmp_path)
    with (
        single_rank(),
        pytest.raises(UserError, match=r"reward_model\.path=.*\(roles: tool, assistant\): unknown role"),
    ):
        build(tmp_path).score([RewardItem("s", "r", None, {}, [{"role": "tool", "content": "x"}])])


SHARES = [(ITEMS, []), ([], ITEMS), (ITEMS[:1], ITEMS[1:]), ([], [])]


@in_float64()
def on_rank(folder: Path) -> list[list[float]]:
    """Return the scores of this rank's part of each of `SHARES`, from two sharded models."""
    rank = torch.distributed.get_rank()
    models = [build(folder / pad, sharded=True, forward_max_token_len_per_gpu=30) for pad in ("0", "None")]
    return [scores(model, share[rank]) for model in models for share in SHARES]


def test_two_ranks_with_different_numbers_of_items(tmp_path):
    for pad in (0, None):
        classifier("llama", tmp_path / str(pad), pad_token_id=pad)
    first, second = run_ranks(2, partial(on_rank, tmp_path))
    expected = plain(tmp_path / "0", ITEMS)
    for (mine, other), a, b in zip(SHARES * 2, first, second, strict=True):
        assert (len(a), len(b)) == (len(mine), len(other))
        assert close(a + b, expected if mine or other else [])


@pytest.mark.parametrize("budget", [1, 60, 16384])
def test_the_baseline_is_the_score_of_the_greedy_response(tmp_path, budget):
    classifier("llama", tmp_path)
    with single_rank():
        settings = {"filter_groups": UNFILTERED, "greedy": True}
        collector = collecting.build(collecting.new_driver(), Coordinator(GlooTransport()), **settings)
        generation = collector.generation
        judge = build(tmp_path, forward_max_token_len_per_gpu=budget)
        failures = FailurePolicy("reward_model", RewardConfig())
        generation.reward = Reward([Term("reward_model", 1.0, judge, failures)])
        generation.early = None  # as with every reward model
        drawn = collector.prompts.next()
        greedy = replace(generation.params, temperature=0.0)
        scored = generation.groups(drawn, RolloutStats(), version=0, step=1)
        requests = [Request(each.uid, each.prompt.token_ids, greedy) for each in drawn]
        responses = generation.sampler.generate(requests, version=0, step=1)

    def alone(prompt: Prompt, sample: Sample) -> RewardItem:
        text = generation.tokenizer.decode(sample.token_ids.tolist(), skip_special_tokens=True)
        return RewardItem(prompt.data_source, text, prompt.ground_truth, prompt.extra_info, prompt.messages)

    baselines = [alone(each.prompt, response) for each, response in zip(drawn, responses, strict=True)]
    samples = [alone(each.prompt, s) for each, group in zip(drawn, scored, strict=True) for s in group.samples]
    assert close([group.baseline for group in scored], plain(tmp_path, baselines))
    assert close([score for group in scored for score in group.scores], plain(tmp_path, samples))
    # The model sorts responses by length. Different lengths show whether it mixes up scores.
    assert len({len(response) for response in responses}) > 1


@pytest.mark.parametrize("labels", [2, 5])
def test_a_reward_model_must_have_one_label(tmp_path, labels):
    classifier("llama", tmp_path, num_labels=labels)
    with pytest.raises(UserError, match=rf"^reward_model\.path={tmp_path} has {labels} labels, but .* needs one"):
        build(tmp_path)


def test_reward_package_still_loads_no_torch():
    code = "import sys, rlhf.reward; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
