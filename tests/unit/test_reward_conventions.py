"""Reward files as verl's repository and TRL's documentation have them, in real reward processes: arguments, results,
batches, time-outs and errors of each convention."""

import dataclasses
import json
from pathlib import Path

import pytest

from rlhf.config import RewardConfig
from rlhf.errors import UserError
from rlhf.reward import RewardItem, RewardResult, build_reward
from rlhf.reward.calls import as_score

VERL = '''
import asyncio
import json
import re


def gsm8k(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    """As verl/utils/reward_score/gsm8k.py: two of the four arguments."""
    found = re.findall(r"#### (\\-?[0-9\\.\\,]+)", solution_str)
    return 0 if not found else score if found[-1] == ground_truth else format_score


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """As verl's math_dapo: a text, and a truth value, beside the score."""
    right = solution_str == ground_truth
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str, "level": extra_info["level"]}


def compute_score_batched(data_sources, solution_strs, ground_truths, extra_infos, bonus=0):
    """As verl/utils/reward_score/math_batch.py."""
    scores = []
    for source, solution, truth, info in zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True):
        assert (source, info["level"]) == ("src", 3)
        scores.append({"score": bonus + float(solution == truth), "seen": len(solution_strs)})
    return scores


def geometry(predict_str, ground_truth, use_boxed=True, format_score=0.1):
    """As verl/utils/reward_score/geo3k.py: the dispatcher calls it by position."""
    return (1 - format_score) * float(predict_str.strip() == ground_truth) + format_score * predict_str.startswith(" ")


def verified(model_output: str, ground_truth: str, timeout_score: float = 0) -> bool:
    """As math_verify.py and prime_math."""
    return str(model_output) == ground_truth


def tested(completion, test_cases, continuous=False):
    """As prime_code: the answer under another name, and a tuple whose first is the score."""
    passed = [case == completion for case in json.loads(test_cases)["outputs"]]
    return (sum(passed) / len(passed) if continuous else all(passed)), [{"res": str(each)} for each in passed]


def in_sandbox(url, semaphore, memory_limit_mb, completion, test_cases, continuous=False, timeout=10):
    """As sandbox_fusion: the dispatcher's arguments come first."""
    assert semaphore is None
    return {"score": float(test_cases == completion), "url": url, "memory": memory_limit_mb}


def with_tests(solution_str, ground_truth, test_cases):
    return {"score": float(solution_str == test_cases), "truth": ground_truth}


running = 0


async def judged(data_source, solution_str, ground_truth, extra_info):
    """As verl's generative reward models."""
    global running
    running += 1
    at_once = running
    await asyncio.sleep({"slow": 60, "later": 0.1}.get(solution_str, 0))
    running -= 1
    if solution_str == "bad":
        raise ValueError("a needle of a traceback")
    return {"score": float(len(solution_str)), "at_once": at_once, "genrm_response": f"I read {solution_str}"}
'''

TRL = r'''
import asyncio
import re


def reward_len(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def of_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def format_reward_func(completions, **kwargs):
    """Reward function that checks if the completion has a specific format."""
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]


def reward_func(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    extracted = [re.search(r"\\boxed\{(.*?)\}", c) for c in completions]
    extracted = [m.group(1) if m else None for m in extracted]
    rewards = [1.0 if e == gt else 0.0 for e, gt in zip(extracted, ground_truth)]
    if log_extra:
        log_extra("golden_answer", list(ground_truth))
        log_extra("extracted_answer", [e or "[none]" for e in extracted])
    if log_metric:
        log_metric("accuracy", sum(rewards) / len(rewards))
    return rewards


def math_reward_func(prompts, completions, task, **kwargs):
    return [float(p == c) if t == "math" else None for p, c, t in zip(prompts, completions, task)]


def coding_reward_func(prompts, completions, task, **kwargs):
    return [0.5 if t == "code" else None for t in task]


async def async_reward_func(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if completion else 0.0 for completion in completions]


def hangs(completions, **kwargs):
    while "hang" in completions:
        pass
    if "raise" in completions:
        raise ValueError("a needle of a traceback")
    return [0.0] * (len(completions) + completions.count("more"))
'''

OURS = '''
import torch_like

def plain(solution_str, prompt, messages, level, hint="none", scale=1):
    """The prompt, the chat and columns of the plain layout, by their names."""
    assert messages == [{"role": "user", "content": prompt}]
    return {"score": scale * level, "prompt": prompt, "hint": hint, "seen": [solution_str, {"deep": None}]}

def notes(solution_str):
    return {"score": torch_like.Zero(), "nan": [float("nan")], "long": "x" * 20_000, "of": object, 7: {(1,): 2}}
'''
TORCH_LIKE = """
class Zero:
    ndim = 0
    def item(self): return 0.25
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    for name, text in {"verl": VERL, "trl": TRL, "ours": OURS, "torch_like": TORCH_LIKE}.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture
def scored(folder):
    """Results of the functions on items, in one process each."""
    made = []

    def score(functions: str, items: list[RewardItem], **settings) -> list[RewardResult]:
        full = [f"{folder}/{function}" for function in functions.split()]
        made.append(build_reward(RewardConfig(functions=full, **{"num_workers": 1} | settings)))
        return made[-1].score(items)

    score.made = made
    yield score
    for reward in made:
        reward.close()


def of_prompt(group: int, *responses: str, truth: str = "42", prompt: object = "", **columns) -> list[RewardItem]:
    """Samples of one prompt, as a text or as a chat."""
    chat = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    columns |= {"prompt": prompt}
    item = RewardItem("src", "", truth, {"level": 3}, chat, columns, group=group)
    return [dataclasses.replace(item, response=text, token_ids=[7] * len(text)) for text in responses]


def scores(results: list[RewardResult]) -> list[float]:
    return [result.score for result in results]


def test_files_of_verls_repository_run_as_they_are(scored):
    items = of_prompt(0, "so #### 42", "so #### 41", "42")
    assert scores(scored("verl.py:gsm8k", items, kwargs={"format_score": 0.1})) == [1.0, 0.1, 0.0]
    right, wrong = scored("verl.py:compute_score", of_prompt(0, "42", "7"))
    assert right == RewardResult(1.0, {"compute_score": 1.0}, {"acc": 1.0, "level": 3.0}, notes={"pred": "42"})
    assert (wrong.score, wrong.extra["acc"], wrong.notes) == (-1.0, 0.0, {"pred": "7"})


def test_files_that_verl_calls_by_position_run_as_they_are(scored):
    assert scores(scored("verl.py:geometry", of_prompt(0, " 42", "42", "7"))) == [1.0, 0.9, 0.0]
    assert scores(scored("verl.py:geometry", of_prompt(0, "42"), kwargs={"format_score": 0.5})) == [0.5]
    assert scores(scored("verl.py:verified", of_prompt(0, "42", "7"))) == [1.0, 0.0]
    cases = json.dumps({"outputs": ["x", "y"]})
    (half,) = scored("verl.py:tested", of_prompt(0, "x", truth=cases), kwargs={"continuous": True})
    assert (half.score, half.notes) == (0.5, {"metadata": [{"res": "True"}, {"res": "False"}]})
    assert scores(scored("verl.py:tested", of_prompt(0, "x", truth=cases))) == [0.0]
    given = {"url": "http://a", "semaphore": None, "memory_limit_mb": 512}
    (result,) = scored("verl.py:in_sandbox", of_prompt(0, "42"), kwargs=given)
    assert (result.score, result.extra, result.notes) == (1.0, {"memory": 512.0}, {"url": "http://a"})


def test_a_column_of_the_name_stays_one_beside_solution_str(scored):
    (result,) = scored("verl.py:with_tests", of_prompt(0, "x", test_cases="x"))
    assert (result.score, result.notes) == (1.0, {"truth": "42"})


def test_arguments_of_any_length_are_on_no_command_line(scored, folder):
    (folder / "rubric.py").write_text(
        "import sys\ndef of(solution_str, rubric): return {'score': len(rubric), 'argv': '-'.join(sys.argv)}\n"
    )
    (result,) = scored("rubric.py:of", of_prompt(0, "42"), kwargs={"rubric": "word " * 50_000})
    assert result.score == 250_000
    assert "word" not in result.notes["argv"]


def test_verls_batched_functions_get_all_samples_of_a_prompt(scored):
    items = [*of_prompt(0, "42", "7"), *of_prompt(1, "1", "2", "3", truth="3")]
    results = scored("verl.py:compute_score_batched", items, num_workers=2, kwargs={"bonus": 2})
    assert scores(results) == [3.0, 2.0, 2.0, 2.0, 3.0]
    assert [result.extra["seen"] for result in results] == [2, 2, 3, 3, 3]


def test_async_functions_of_verl_run_at_once_and_each_sample_has_its_time(scored):
    items = of_prompt(0, "a", "slow", *["later"] * 6, "bcd")
    results = scored("verl.py:judged", items, timeout_s=1.0, failed_score=-1.0)
    assert scores(results) == [1.0, -1.0, *[5.0] * 6, 3.0]
    assert [result.timeouts for result in results] == [0, 1, *[0] * 7]
    assert [result.extra.get("at_once") for result in results] == [1.0, None, *map(float, range(3, 10))]
    assert results[0].notes == {"genrm_response": "I read a"}
    (timed_out,) = scored.made[0].pop_timeouts()
    assert timed_out.count == 1
    assert "response='slow'" in timed_out.example


def test_one_of_several_concurrent_calls_may_fail(scored):
    results = scored("verl.py:judged", of_prompt(0, "a", "bad", "bc"), on_error="score", failed_score=-1.0)
    assert [(result.score, result.failures) for result in results] == [(1.0, 0), (-1.0, 1), (2.0, 0)]
    with pytest.raises(UserError, match=r"(?s)response='bad'.*a needle of a traceback"):
        scored("verl.py:judged", of_prompt(0, "a", "bad", "bc"))


def test_functions_of_trls_documentation_run_as_they_are(scored):
    texts = of_prompt(0, "a", "bc", prompt="The sky is")
    assert scores(scored("trl.py:reward_len", texts)) == [1.0, 2.0]
    assert scores(scored("trl.py:of_tokens", texts)) == [1.0, 2.0]
    assert scores(scored("trl.py:async_reward_func", [*texts, *of_prompt(1, "")])) == [1.0, 1.0, 0.0]
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the sky?"}]
    chats = of_prompt(0, "<think>so</think><answer>42</answer>", "42", prompt=chat)
    assert scores(scored("trl.py:format_reward_func", chats)) == [1.0, 0.0]


def test_a_trl_column_overrides_the_reference_and_logged_values_are_kept(scored):
    items = of_prompt(0, r"\boxed{2}", "7", truth="other", ground_truth="2")
    right, wrong = scored("trl.py:reward_func", items)
    notes = {"golden_answer": "2", "extracted_answer": "2"}
    assert right == RewardResult(1.0, {"reward_func": 1.0}, {"accuracy": 0.5}, notes=notes)
    assert (wrong.score, wrong.notes["extracted_answer"]) == (0.0, "[none]")
    without_column = of_prompt(0, r"\boxed{42}", prompt="")
    assert scores(scored("trl.py:reward_func", without_column)) == [1.0]


def test_a_function_that_returns_none_gives_no_score(scored):
    items = [*of_prompt(0, "x", "y", prompt="x", task="math"), *of_prompt(1, "x", prompt="x", task="code")]
    functions = "trl.py:math_reward_func trl.py:coding_reward_func"
    results = scored(functions, items, weights=[1.0, 2.0])
    assert scores(results) == [1.0, 0.0, 1.0]
    # The first function that gives a score decides correctness; a function that gives none has no term.
    assert [list(result.terms) for result in results] == [["math_reward_func"]] * 2 + [["coding_reward_func"]]
    assert [result.correct for result in results] == [True, False, False]
    with pytest.raises(
        UserError, match=r"None of math_reward_func, coding_reward_func returned a score for a sample: .*'x'"
    ):
        scored(functions, of_prompt(0, "x", prompt="x", task="poem"))
    (nothing,) = scored(functions, of_prompt(0, "x", task="poem"), on_error="score", failed_score=-3.0)
    assert nothing == RewardResult(-3.0, {"math_reward_func": -3.0}, failures=1)


def test_a_batch_that_hangs_or_fails_takes_its_prompts_samples_with_it(scored):
    items = [*of_prompt(0, "a"), *of_prompt(1, "hang", "b"), *of_prompt(2, "raise", "c"), *of_prompt(3, "more")]
    results = scored("trl.py:hangs", items, timeout_s=2.0, on_error="score", failed_score=-1.0)
    assert scores(results) == [0.0, -1.0, -1.0, -1.0, -1.0, -1.0]
    assert [(result.timeouts, result.failures) for result in results] == [(0, 0), *[(1, 0)] * 2, *[(0, 1)] * 3]
    (timed_out,) = scored.made[0].pop_timeouts()
    assert (timed_out.count, "response='hang'" in timed_out.example) == (2, True)
    with pytest.raises(UserError, match=r"(?s)On 2 samples, the first of them: .*response='raise'.*a needle") as caught:
        scored("trl.py:hangs", of_prompt(2, "raise", "c"))
    assert str(caught.value).count("ValueError: ") == 1
    assert "rlhf/reward" not in str(caught.value)
    with pytest.raises(UserError, match="returned 2 scores for 1 samples"):
        scored("trl.py:hangs", of_prompt(2, "more"))


def test_a_long_wait_is_announced_and_samples_are_counted_one_by_one(scored, monkeypatch):
    reported: list[str] = []
    monkeypatch.setattr("rlhf.events._listeners", [reported.append])
    monkeypatch.setattr("rlhf.reward.pool.ANNOUNCE_S", 0.1)
    scored("trl.py:hangs", of_prompt(0, "hang", "b", "c"), timeout_s=0.2)
    assert reported.count("reward.wait") >= 3
    assert [event for event in reported if event != "reward.wait"] == ["reward.scored"] * 3


def test_prompt_chat_and_columns_arrive_by_name(scored):
    items = [*of_prompt(0, "a", prompt="Why?", level=2, hint="h"), *of_prompt(1, "b", prompt="How?", level=3)]
    first, second = scored("ours.py:plain", items, kwargs={"scale": 10})
    assert (first.score, second.score, first.extra) == (20.0, 30.0, {})
    assert first.notes == {"prompt": "Why?", "hint": "h", "seen": ["a", {"deep": None}]}
    assert second.notes["hint"] == "none"


def test_notes_are_json_of_bounded_length(scored):
    (result,) = scored("ours.py:notes", of_prompt(0, "a"))
    assert (result.score, result.extra) == (0.25, {})
    assert result.notes["nan"] == ["NaN"]
    assert result.notes["long"] == "x" * 10_000 + " ..."
    assert result.notes["of"].startswith("<class")
    assert RewardResult(**json.loads(json.dumps(dataclasses.asdict(result)))) == result


@pytest.mark.parametrize(
    "value",
    [10**400, 10**5000, {"score": 10**400}, {"score": 1, "k": 10**5000}, (10**400, 1)],
    ids=["number", "long", "score", "other", "first"],
)
def test_numbers_beyond_floats_are_one_message(value):
    with pytest.raises(UserError, match=r"f\.py:f returned .*\(int\)\. Return a finite number"):
        as_score(value, "f.py:f")


def test_a_note_that_cannot_be_shown_is_a_text():
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    assert as_score({"score": 1, "n": deep, "m": [10**5000]}, "f").notes == dict.fromkeys(
        "nm", "a list that cannot be shown"
    )


def test_openrlhfs_signature_is_rejected_with_the_parameters_to_use(tmp_path):
    (tmp_path / "remote.py").write_text("def reward_func(queries, prompts, labels): ...\n")
    with pytest.raises(
        UserError, match=r"has OpenRLHF's parameters .*Take completions for the responses, and the data"
    ):
        build_reward(RewardConfig(functions=[f"{tmp_path}/remote.py:reward_func"]))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"scales": 2}, "scales is not a parameter of any of reward.functions="),
        ({"scales": 2}, "Did you mean scale?"),
        ({"solution_str": "x"}, "solution_str is an argument that the trainer passes"),
    ],
)
def test_kwargs_that_nothing_takes_are_refused(folder, kwargs, message):
    with pytest.raises(UserError, match=r"^reward\.kwargs=") as caught:
        build_reward(RewardConfig(functions=[f"{folder}/ours.py:plain"], kwargs=kwargs))
    assert message in str(caught.value)
