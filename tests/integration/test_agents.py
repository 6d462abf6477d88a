"""Programs of `env.command`: an agent trains as a class does, resumes exactly, is confined, and leaves nothing."""

import contextlib
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.config.schema.env import EnvConfig
from rlhf.data import Prompt
from rlhf.data.turns.chat_turns import ChatTurns
from rlhf.environments.sessions import EnvironmentPool
from rlhf.experience.episode import EnvironmentClass, Episode, Stage
from rlhf.experience.episode_groups import with_one_prompt
from rlhf.experience.episodes import Asked, Episodes
from rlhf.models import tiny
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.rollout import SamplingParams
from rlhf.rollout.embedded import EmbeddedEngine
from rlhf.rollout.sample import ROW
from tests.support.played import Crash, Sampler, crash_at, facts, journal_at

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "support" / "chat_agent.py"
TOKEN_PROGRAM = ROOT / "tests" / "support" / "token_agent.py"
CLASS = f"{ROOT}/tests/support/logged_calls.py:Sums"
CALCULATOR = f"{ROOT}/rlhf/environments/bundled/calculator.py:Calculator"
CALCULATOR_AGENT = f"{ROOT}/rlhf/environments/bundled/calculator_agent.py"


@contextlib.contextmanager
def pool_of(**settings: Any):
    pool = EnvironmentPool(EnvConfig(**{"timeout_s": 60, "retries": 0} | settings)).start()
    try:
        yield pool
    finally:
        pool.close()


def agent(behavior: str, **settings: Any):
    return pool_of(command=f"python {PROGRAM} {behavior}", **settings)


def token_agent(behavior: str, **settings: Any):
    return pool_of(command=f"python {TOKEN_PROGRAM} {behavior}", **settings)


def rendered(sampler: Any) -> list[Prompt]:
    """Return prompts with two columns of token ids: the prompt's, and those after an answer."""
    chat, given = ChatTurns(sampler.tokenizer, (), announce=False), prompts(sampler)
    again = chat.observation([next(iter(chat.stop_token_ids))], [{"role": "user", "content": "Again."}])
    return [replace(each, columns={"prompt_ids": chat.prompt(each.messages), "again_ids": again}) for each in given]


class AgentPolicy(Sampler):
    """The bundled policy that calls a calculator."""

    def __init__(self) -> None:
        folder = tiny.FOLDER.parent / "tiny_agent_policy"
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.engine, self.sizes = EmbeddedEngine(AutoModelForCausalLM.from_pretrained(folder), self.tokenizer, 64), []


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler()


def prompts(sampler: Any, text: str = tiny.QUESTION, **columns: Any) -> list[Prompt]:
    rows = [text.format(28 + i, "+", 35) for i in range(2)]
    return [
        Prompt(i, [{"role": "user", "content": row}], [], "sums", str(63 + i), {}, columns=columns)
        for i, row in enumerate(rows)
    ]


def play(pool: EnvironmentPool, sampler: Any, given: list[Prompt] | None = None, journal: Any = None, **more: Any):
    """Play three episodes of each prompt; `more` is for `EnvironmentClass`."""
    (definition,) = pool.definitions
    kind = EnvironmentClass(0, definition, lambda tools: ChatTurns(sampler.tokenizer, tools, announce=False), **more)
    player = Episodes(pool.config, [kind], pool, sampler, Coordinator(GlooTransport()), 5, 96, sampler.tokenizer)
    if journal is not None:
        journal.begin(1, 0, None)
    params = [SamplingParams(max_tokens=60)] * 3
    asked = [Asked(100 + prompt.index, prompt, params) for prompt in given or prompts(sampler)]
    return player.play(asked, version=0, step=1, journal=journal)


def bits(groups: list[list[Episode]]) -> list[Any]:
    """Everything that an update uses; a class gives a reward for each turn, an agent gives one."""
    return [(*others, sum(rewards)) for *others, rewards in facts(groups)]


def failures(groups: list[list[Episode]]) -> set[str]:
    assert all(episode.phase is Stage.FAILED for group in groups for episode in group)
    return {failure for group in groups for episode in group for failure in episode.failures}


def test_an_agent_trains_on_the_bits_of_a_class_that_does_the_same(sampler):
    with pool_of(classes=[CLASS]) as of_class, agent("sums") as of_agent:
        assert bits(play(of_agent, sampler)) == bits(play(of_class, sampler))


def test_the_bundled_agent_trains_on_the_bits_of_the_calculator_class():
    policy = AgentPolicy()
    with pool_of(classes=[CALCULATOR]) as of_class, pool_of(command=f"python {CALCULATOR_AGENT}") as of_agent:
        given = prompts(policy, "State the final answer to the following arithmetic problem: {} {} {} + 21 =")
        found = play(of_agent, policy, given)
        assert bits(found) == bits(play(of_class, policy, given))
    assert any(episode.tool_calls for group in found for episode in group)
    assert any(message["role"] == "tool" for group in found for episode in group for message in episode.conversation)


@pytest.mark.parametrize("event", ["env.answered", "env.recorded", "env.turn"])
def test_a_crash_anywhere_changes_no_bit(event, sampler, tmp_path):
    """The program is started again and receives the recorded answers (promise 20)."""
    with agent("sums") as pool:
        expected, crashes = facts(play(pool, sampler)), 0
        for nth in range(1, 60):
            sampler.sizes.clear()
            try:
                with crash_at(event, nth):
                    found = facts(play(pool, sampler, journal=journal_at(tmp_path)))
                break
            except Crash:
                crashes += 1
        assert crashes >= 3
        assert found == expected


def test_a_rewritten_history_begins_a_row(sampler):
    """Each row is what the engine saw, and each sampled token is in the loss once, where the policy sampled it."""
    seen: dict[tuple[int, int], list[tuple[list[int], list[int]]]] = {}

    def generate(requests, *, version, step, listener):
        made = sampler.generate(requests, version=version, step=step, listener=listener)
        for request, sample in zip(requests, made, strict=True):
            new = sample.token_ids[request.start :].tolist()
            seen.setdefault((request.uid, request.sample), []).append((request.context, new))
        return made

    observing = SimpleNamespace(generate=generate, tokenizer=sampler.tokenizer, background=False)
    with agent("compact") as pool:
        groups = play(pool, observing)
    forked = 0
    for group in groups:
        assert {episode.phase for episode in group} == {Stage.DONE}, failures(groups)
        prompt, samples = with_one_prompt(group, 0)
        for episode, sample in zip(group, samples, strict=True):
            rows = sample.rows(prompt)
            assert len(rows) == episode.rows
            # A turn without an end token ends an episode early.
            forked += episode.rows == 4
            assert [row.response.sample for row in rows] == [sample.sample + n * ROW for n in range(len(rows))]
            for prompt_ids, response in rows:
                whole = [*prompt_ids, *response.token_ids.tolist()]
                turns = seen.pop((response.uid, response.sample))
                for before, drawn in turns:
                    assert whole[: len(before)] == before
                    assert whole[len(before) : len(before) + len(drawn)] == drawn
                assert response.token_ids[response.mask()].tolist() == [t for _, drawn in turns for t in drawn]
                assert len(prompt_ids) <= 96
                assert len(response) <= 60
            if episode.rows == 4:
                texts = [sampler.tokenizer.decode(row.prompt_ids) for row in rows]
                assert "It was" in texts[1]
                assert "calc" not in texts[1]
                assert "The last one." in sampler.tokenizer.decode([*rows[3].prompt_ids, *rows[3].response.token_ids])
                roles = [message["role"] for message in episode.conversation]
                assert roles.count("assistant") == episode.turn == 6
                assert "A new question." in [message["content"] for message in episode.conversation]
    assert seen == {}
    assert forked


def test_a_crash_changes_no_bit_of_a_forked_episode(sampler, tmp_path):
    with agent("compact") as pool:
        expected, crashes = facts(play(pool, sampler)), 0
        for event in ("env.answered", "env.recorded", "env.turn"):
            for nth in range(1, 20):
                try:
                    with crash_at(event, nth):
                        found = facts(play(pool, sampler, journal=journal_at(tmp_path / event)))
                    break
                except Crash:
                    crashes += 1
            assert found == expected
        assert crashes >= 9


def test_an_equal_request_after_its_answer_is_a_new_row(sampler, tmp_path):
    """Agents ask again for a better answer, or for the best of several. A killed run repeats the same turns."""
    with agent("best") as pool:
        groups = play(pool, sampler)
        assert [(e.phase, e.turn, e.rows) for group in groups for e in group] == [(Stage.DONE, 4, 4)] * 6
        assert any(e.rewards[0] > 1 for group in groups for e in group)
        with pytest.raises(Crash), crash_at("env.turn", 3):
            play(pool, sampler, journal=journal_at(tmp_path))
        assert facts(play(pool, sampler, journal=journal_at(tmp_path))) == facts(groups)


def test_the_rows_of_an_episode_are_limited(sampler):
    with agent("compacts", max_rows=3) as pool:
        for group in play(pool, sampler):
            ended = [(e.phase, e.rows, e.turn, e.lacks_row, e.finished(0).finish_reason) for e in group]
            assert ended == [(Stage.DONE, 3, 3, True, "length")] * 3


def test_a_program_that_the_limit_of_rows_ended_before_its_reward_is_told_so(sampler):
    with agent("compacts", max_rows=3) as pool:
        (failure,) = failures(play(pool, sampler, must_reward=True))
        assert "wrote no reward" in failure
        assert "env.max_rows=3" in failure


def test_a_long_rewritten_history_is_in_part_an_observation(sampler):
    with agent("long") as pool:
        for group in play(pool, sampler):
            for episode in group:
                assert (episode.phase, episode.rows, episode.rewards) == (Stage.DONE, 2, [1.0]), episode.failures
                assert not episode.lacks_row
                row = episode.finished(0).rows(episode.prompt_ids)[1]
                assert len(row.prompt_ids) == 96
                assert row.response.observations[0][0] == 0


@pytest.mark.parametrize(("behavior", "network"), [("draws", False), ("paths", False), ("paths", True)])
def test_a_program_sends_the_same_requests_when_it_starts_again(behavior, network, sampler):
    """Otherwise its episode would fail after a kill."""
    with agent(behavior, network=network) as one, agent(behavior, network=network) as other:
        assert facts(play(one, sampler)) == facts(play(other, sampler))


@pytest.mark.parametrize("behavior", ["late", "again", "impatient", "steal"])
def test_each_program_has_its_own_reward(behavior, sampler):
    with agent(behavior) as pool:
        for group in play(pool, sampler):
            assert [(e.phase, e.rewards, e.failures) for e in group] == [(Stage.DONE, [1.0], [])] * 3


WRONG = {
    "silent": ("without a request", "nothing to do"),
    "crash": ("exit code 1", "ValueError: the agent burnt"),
    "twice": ("rejected: ", "before the answer to another request"),
    "same_at_once": ("rejected: ", "before the answer to another request"),
    "no_number": ("RLHF_REWARD_FILE", "'good'", "finite number"),
    "no_reward": ("wrote no reward", "reward.functions"),
    "pipe": ("RLHF_REWARD_FILE is not a file",),
    "nested": ("rejected", "nested more than 100 levels"),
    "nested_more": ("rejected", "nested more than 100 levels"),
    "nested_call": ("rejected", "nested more than 100 levels"),
    "unsupported": ("rejected", "n=2 is not supported"),
}


@pytest.mark.parametrize("behavior", WRONG)
def test_a_wrong_program_fails_its_episodes_and_says_why(behavior, sampler):
    with agent(behavior) as pool:
        (failure, *others) = failures(play(pool, sampler, must_reward=True))
        assert not others
        for word in WRONG[behavior]:
            assert word in failure


def test_a_program_that_hangs_is_killed_at_its_deadline(sampler):
    with agent("hang", timeout_s=6) as pool:
        (failure,) = failures(play(pool, sampler))
        assert "answer took longer than env.timeout_s=6" in failure


def test_a_program_without_end_is_scored_at_the_last_turn(sampler):
    with agent("flood", max_turns=2) as pool:
        for group in play(pool, sampler):
            assert [(e.phase, e.turn, e.rewards, e.finished(0).finish_reason) for e in group] == [
                (Stage.DONE, 2, [0.0], "length")
            ] * 3


def left() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "left-by-an-agent" in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_nothing_that_a_program_started_outlives_its_episode(sampler):
    with agent("stay") as pool:
        for group in play(pool, sampler):
            assert [e.rewards for e in group] == [[1.0]] * 3
        deadline = time.monotonic() + 20
        while left() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left() == []
        assert pool._host._processes == {}


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces")
def test_a_program_reaches_only_its_endpoint(sampler):
    with socket.create_server(("127.0.0.1", 0)) as server, agent("escape") as pool:
        port = server.getsockname()[1]
        groups = play(pool, sampler, prompts(sampler, port=port))
        for group in groups:
            for episode in group:
                assert episode.phase is Stage.DONE, episode.failures
                assert sampler.tokenizer.decode(episode.prompt_ids).count("nothing") == 1
    with socket.create_server(("127.0.0.1", 0)) as server, agent("escape", network=True) as pool:
        given = prompts(sampler, port=server.getsockname()[1])
        texts = [sampler.tokenizer.decode(e.prompt_ids) for group in play(pool, sampler, given) for e in group]
        assert all("the machine" in text for text in texts)


def test_token_ids_train_on_the_bits_of_the_chat(sampler):
    """The program renders the prompts and the messages between turns as the chat template does."""
    with token_agent("chat") as by_chat, token_agent("tokens") as by_tokens:
        found, expected = play(by_tokens, sampler, rendered(sampler)), play(by_chat, sampler, rendered(sampler))
    assert facts(found) == facts(expected)
    turns = 0
    for group, others in zip(found, expected, strict=True):
        assert with_one_prompt(group, 0)[0] == with_one_prompt(others, 0)[0]
        for episode, other in zip(group, others, strict=True):
            assert episode.phase is Stage.DONE, episode.failures
            texts = [[m["content"] for m in e.conversation if m["role"] == "assistant"] for e in (episode, other)]
            assert texts[0] == texts[1]
            turns = max(turns, episode.turn)
            if episode.turn == 2:
                assert "Again." in episode.conversation[1]["content"]
    assert turns == 2


def test_an_answer_has_the_log_probs_of_the_sample(sampler):
    with token_agent("log_probs") as pool:
        for group in play(pool, sampler, rendered(sampler)):
            for episode in group:
                assert episode.phase is Stage.DONE, episode.failures
                sample = episode.finished(0)
                assert episode.turn == 2
                assert episode.rewards == [sum(sample.log_probs[sample.mask()].tolist())]


def test_a_crash_changes_no_bit_of_an_episode_of_token_ids(sampler, tmp_path):
    """The program continues, rewrites its history and changes the protocol twice."""
    with token_agent("rewrite") as pool:
        groups, crashes = play(pool, sampler), 0
        assert {e.phase for group in groups for e in group} == {Stage.DONE}
        assert max(e.rows for group in groups for e in group) == 4
        for event in ("env.answered", "env.recorded", "env.turn"):
            for nth in range(1, 20):
                try:
                    with crash_at(event, nth):
                        found = facts(play(pool, sampler, journal=journal_at(tmp_path / event)))
                    break
                except Crash:
                    crashes += 1
            assert found == facts(groups)
        assert crashes >= 9


def test_a_repeated_request_of_token_ids_has_one_answer(sampler):
    with token_agent("repeat") as pool:
        for group in play(pool, sampler):
            assert [(e.phase, e.turn, e.rows, e.rewards) for e in group] == [(Stage.DONE, 2, 2, [1.0])] * 3


@pytest.mark.parametrize(("behavior", "settings", "turns"), [("flood", {"max_turns": 2}, 2), ("large", {}, 1)])
def test_limits_end_an_episode_of_token_ids(behavior, settings, turns, sampler):
    with token_agent(behavior, **settings) as pool:
        for group in play(pool, sampler, rendered(sampler)):
            ended = [(e.phase, e.turn, e.finished(0).finish_reason) for e in group]
            assert ended == [(Stage.DONE, turns, "length")] * 3


WRONG_TOKENS = {
    "other_key": ("exit code 1", "401", "the key is not OPENAI_API_KEY"),
    "unknown": ("rejected", "token_ids[1]=1099511627776 is not a token id from 0 to "),
    "other_path": ("exit code 1", "404", "/inference/v1/generate_more is not served here"),
}


@pytest.mark.parametrize("behavior", WRONG_TOKENS)
def test_a_wrong_request_of_token_ids_says_why(behavior, sampler):
    with token_agent(behavior) as pool:
        (failure, *others) = failures(play(pool, sampler))
        assert not others
        for word in WRONG_TOKENS[behavior]:
            assert word in failure


OPENAI = """
import json, os
import openai

row, client = json.loads(os.environ["RLHF_ROW"]), openai.OpenAI(max_retries=0)
messages = list(row["messages"])
answer = client.chat.completions.create(model="any", messages=messages)
assert answer.usage.completion_tokens > 0
messages += [answer.choices[0].message, {"role": "user", "content": "Again."}]
stream = client.chat.completions.create(
    model="any", messages=messages, stream=True, stream_options={"include_usage": True}
)
parts = list(stream)
text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
assert parts[-1].usage.total_tokens > answer.usage.total_tokens
assert [model.id for model in client.models.list()] == ["rlhf"]
with open(os.environ["RLHF_REWARD_FILE"], "w") as file:
    file.write(str(len(text)))
"""


def test_openais_client_runs_unchanged(sampler, tmp_path):
    pytest.importorskip("openai")
    (tmp_path / "client.py").write_text(OPENAI)
    tmp_path.chmod(0o755)
    with pool_of(command=f"python {tmp_path}/client.py", timeout_s=120) as pool:
        for group in play(pool, sampler):
            for episode in group:
                assert episode.phase is Stage.DONE, episode.failures
                assert episode.turn == 2
                answers = [m["content"] for m in episode.conversation if m["role"] == "assistant"]
                assert episode.rewards == [float(len(answers[1]))]
