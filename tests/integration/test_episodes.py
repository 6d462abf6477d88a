"""Episodes with real environments in their processes, and their exact resume from the journal (promise 20)."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf.config.schema.env import EnvConfig
from rlhf.data import Prompt
from rlhf.data.turns.chat_turns import ChatTurns
from rlhf.environments.sessions import EnvironmentLate, EnvironmentPool, Session
from rlhf.errors import UserError
from rlhf.experience import episode_calls, journal_records
from rlhf.experience.episode import EnvironmentClass, Episode, Stage
from rlhf.experience.episode_groups import check_failures, fail_without_baseline, with_one_prompt
from rlhf.experience.episodes import Asked, Episodes
from rlhf.experience.journal import Journal
from rlhf.models import tiny
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.rollout import SamplingParams
from tests.support.logged_calls import CALLS
from tests.support.played import Crash, Sampler, crash_at, facts, journal_at

SPEC = str(Path(__file__).parents[1] / "support" / "logged_calls.py")
CLASSES = ("Sums", "StatefulSums", "UnsavedSums", "ForgetfulSums")
PARAMS = SamplingParams(max_tokens=60, top_k=30, sampling_mask=True)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("calls")
    folder.chmod(0o777)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CALLS, str(folder / "calls.txt"))
        yield folder / "calls.txt"


@pytest.fixture(scope="module")
def pool(calls: Path) -> Iterator[EnvironmentPool]:
    config = EnvConfig(
        classes=[f"{SPEC}:{name}" for name in CLASSES],
        pass_env=[CALLS],
        writable=[str(calls.parent)],
        timeout_s=60,
        retries=1,
    )
    made = EnvironmentPool(config).start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler()


def player(pool: EnvironmentPool, sampler: Any, name: str, **settings: Any) -> Episodes:
    tokenizer = sampler.tokenizer
    kinds = [
        EnvironmentClass(i, definition, lambda tools: ChatTurns(tokenizer, tools, announce=False))
        for i, definition in enumerate(pool.definitions)
    ]
    config = EnvConfig(**vars(pool.config) | settings)
    chosen = [kind for kind in kinds if kind.definition.label == name]
    coordinator = Coordinator(GlooTransport())
    return Episodes(config, chosen, pool, sampler, coordinator, 5, 64, tokenizer)


def prompts(sampler: Any, count: int = 2) -> list[Prompt]:
    rows = [tiny.QUESTION.format(28 + i, "+", 35) for i in range(count)]
    ids = tiny.prompt_ids(sampler.tokenizer, rows)
    return [
        Prompt(i, [{"role": "user", "content": row}], ids[i], "sums", str(63 + i), {}) for i, row in enumerate(rows)
    ]


def play(episodes: Episodes, sampler: Any, journal: Journal | None = None) -> list[list[Episode]]:
    asked = [Asked(100 + p.index, p, [PARAMS] * 3) for p in prompts(sampler)]
    if journal is not None:
        journal.begin(1, 0, None)
    return episodes.play(asked, version=0, step=1, journal=journal)


@pytest.fixture(scope="module")
def undisturbed(pool: EnvironmentPool, sampler: Sampler, calls: Path) -> tuple[list[Any], int]:
    calls.unlink(missing_ok=True)
    found = facts(play(player(pool, sampler, "Sums"), sampler))
    return found, len(calls.read_text().splitlines())


def test_a_conversation_is_what_the_engine_saw(pool, sampler):
    """Prompt and response are the requests' tokens; the mask is True exactly on what the engine returned."""
    seen: dict[tuple[int, int], list[tuple[list[int], list[int]]]] = {}

    def generate(requests, *, version, step, listener):
        made = sampler.generate(requests, version=version, step=step)
        for request, sample in zip(requests, made, strict=True):
            new = sample.token_ids[request.start :].tolist()
            seen.setdefault((request.uid, request.sample), []).append((request.context, new))
        return made

    observing = SimpleNamespace(generate=generate, tokenizer=sampler.tokenizer, background=False)
    for group in play(player(pool, observing, "Sums"), sampler):
        prompt, samples = with_one_prompt(group, 0)
        for sample in samples:
            whole = prompt + sample.token_ids.tolist()
            turns = seen[sample.uid, sample.sample]
            for before, drawn in turns:
                assert whole[: len(before)] == before
                assert whole[len(before) : len(before) + len(drawn)] == drawn
            own = sample.token_ids[sample.mask()].tolist()
            assert own == [token for _, drawn in turns for token in drawn]
            assert len(turns) > 1
            assert sample.sampling_mask is not None
            assert sample.sampling_mask.counts.tolist() == [30 * own for own in sample.mask()]
            kept = sample.sampling_mask.rows(30)[sample.mask()]
            assert (kept == np.array(own)[:, None]).any(axis=1).all()


@pytest.mark.parametrize("event", ["env.answered", "env.recorded", "env.turn", "journal.append"])
@pytest.mark.parametrize("name", ["Sums", "StatefulSums"])
def test_a_crash_anywhere_changes_no_bit_and_repeats_no_journaled_call(
    name, event, pool, sampler, undisturbed, calls, tmp_path
):
    calls.unlink(missing_ok=True)
    crashes = 0
    for nth in range(1, 40):
        try:
            with crash_at(event, nth):
                found = facts(play(player(pool, sampler, name), sampler, journal_at(tmp_path)))
            break
        except Crash:
            crashes += 1
    assert crashes >= 3
    assert found == undisturbed[0]
    counts = Counter(calls.read_text().splitlines())
    if event in ("env.recorded", "env.turn"):
        assert set(counts.values()) == {1}
        assert counts.total() == undisturbed[1]


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Sampler:
    """An engine with four rows for six samples, which hands over each turn as soon as it is complete."""
    monkeypatch.setattr(episode_calls, "PAUSE_S", 0.0)
    made = Sampler(rows=4)
    made.listens = True
    return made


@pytest.fixture(scope="module")
def late(pool: EnvironmentPool) -> list[Any]:
    """Facts of episodes whose calls begin after each generation, on four rows."""
    other = Sampler(rows=4)
    return facts(play(player(pool, other, "Sums"), other))


def test_environments_answer_while_the_engine_generates(pool, listening, late, calls, monkeypatch):
    answered, generate = list[int](), listening.generate

    def counted(requests, **arguments):
        before = len(calls.read_text().splitlines())
        made = generate(requests, **arguments)
        answered.append(len(calls.read_text().splitlines()) - before)
        return made

    monkeypatch.setattr(listening, "generate", counted)
    assert facts(play(player(pool, listening, "Sums"), listening)) == late
    assert any(answered)


@pytest.mark.parametrize("event", ["env.answered", "env.recorded", "env.turn", "journal.append", "journal.fsync"])
def test_a_crash_between_early_calls_changes_no_bit(event, pool, listening, late, tmp_path):
    crashes = 0
    for nth in range(1, 60):
        try:
            with crash_at(event, nth):
                found = facts(play(player(pool, listening, "StatefulSums"), listening, journal_at(tmp_path)))
            break
        except Crash:
            crashes += 1
    assert crashes >= 3
    assert found == late


def test_a_call_that_is_late_during_a_generation_is_made_again(pool, listening, late, monkeypatch):
    """The engine may take the processors that the environment needs."""
    made, names = Session.make, list[str]()

    def make(session: Session, calls: Any) -> Any:
        if calls[0]["op"] == "step" and session.name not in names:
            names.append(session.name)
            session.drop()
            raise EnvironmentLate("step took longer than env.timeout_s=60")
        return made(session, calls)

    monkeypatch.setattr(Session, "make", make)
    found = play(player(pool, listening, "Sums"), listening)
    early = [not episode.failures for group in found for episode in group]
    assert len(names) >= 6
    assert any(early)
    expected = [fact for fact, same in zip(late, early, strict=True) if same]
    assert [fact for fact, same in zip(facts(found), early, strict=True) if same] == expected


def test_journaled_turns_are_not_generated_again(pool, sampler, undisturbed, tmp_path):
    play(player(pool, sampler, "Sums"), sampler, journal_at(tmp_path))
    sampler.sizes.clear()
    assert facts(play(player(pool, sampler, "Sums"), sampler, journal_at(tmp_path))) == undisturbed[0]
    assert sampler.sizes == []


def crashed_in_turn(nth: int, name: str, pool: EnvironmentPool, sampler: Any, folder: Path) -> list[list[Episode]]:
    """Play, crash after the `nth` round of generation, and play again from the journal."""
    with pytest.raises(Crash), crash_at("env.turn", nth):
        play(player(pool, sampler, name), sampler, journal_at(folder))
    return play(player(pool, sampler, name), sampler, journal_at(folder))


def test_without_a_state_the_calls_are_repeated_to_the_same_bits(pool, sampler, undisturbed, tmp_path):
    assert facts(crashed_in_turn(3, "UnsavedSums", pool, sampler, tmp_path)) == undisturbed[0]


def test_other_answers_to_repeated_calls_are_a_failure(pool, sampler, tmp_path):
    found = crashed_in_turn(3, "ForgetfulSums", pool, sampler, tmp_path)
    failures = [failure for group in found for episode in group for failure in episode.failures]
    assert len(failures) == 6
    assert all("another result than before" in failure for failure in failures)
    # The retry begins a new episode, which is complete.
    assert all(episode.phase is Stage.DONE and episode.attempt == 1 for group in found for episode in group)


def without_record(folder: Path, turn: int, operation: str) -> None:
    """Damage the record of the first episode's reply after its `turn`th turn."""
    (file,) = (folder / "journal").iterdir()
    content = file.read_bytes()
    payloads, _ = journal_records.payloads(content)
    (found,) = [
        payload for payload in payloads[1:] for document, _ in [journal_records.from_payload(payload or b"{}")]
        if document["turn"][:4] == [100, 0, 0, turn] and document.get("operation", "").startswith(operation)
    ]  # fmt: skip
    file.write_bytes(content.replace(found, bytes(len(found))))


def test_turns_after_a_damaged_reply_are_made_from_the_new_reply(pool, sampler, tmp_path):
    """The environment answers differently when its call is made again, so journaled turns would follow other tokens."""
    with pytest.raises(Crash), crash_at("env.turn", 3):
        play(player(pool, sampler, "ForgetfulSums"), sampler, journal_at(tmp_path))
    without_record(tmp_path, 1, "step")
    contexts = list[list[int]]()

    def generate(requests, *, version, step, listener):
        contexts.extend(request.context for request in requests if (request.uid, request.sample) == (100, 0))
        return sampler.generate(requests, version=version, step=step)

    observing = SimpleNamespace(generate=generate, tokenizer=sampler.tokenizer, background=False)
    episode = play(player(pool, observing, "ForgetfulSums"), observing, journal_at(tmp_path))[0][0]
    assert not episode.failures
    whole = episode.prompt_ids + episode.finished(0).token_ids.tolist()
    assert len(contexts) == episode.turn - 1 == 2
    assert all(whole[: len(context)] == context for context in contexts)


@pytest.mark.parametrize("name", ["Sums", "UnsavedSums"])
def test_an_object_whose_call_was_made_again_gets_the_calls_of_later_records(
    name, pool, sampler, undisturbed, tmp_path
):
    with pytest.raises(Crash), crash_at("env.turn", 3):
        play(player(pool, sampler, name), sampler, journal_at(tmp_path))
    without_record(tmp_path, 1, "step")
    sampler.sizes.clear()
    assert facts(play(player(pool, sampler, name), sampler, journal_at(tmp_path))) == undisturbed[0]
    assert sampler.sizes == []


def test_a_reply_that_ended_the_run_is_not_used_again(sampler, tmp_path):
    """A service may have begun the episode with too long a text. The same command must work once it is shorter."""
    short, file = tmp_path / "short", tmp_path / "long.py"
    file.write_text(
        "import os\nfrom rlhf.environments import free_text\n\n\nclass Long:\n    def reset(self, **row):\n"
        f"        return None if os.path.exists({str(short)!r}) else '9 ' * 90\n\n"
        "    @free_text\n    def step(self, text):\n        return None, 1.0\n"
    )
    config = EnvConfig(classes=[f"{file}:Long"], timeout_s=60, writable=[str(tmp_path)])  # so it can read the file, too
    one = EnvironmentPool(config).start()
    for _ in range(2):
        with pytest.raises(UserError, match=r"data\.max_prompt_length"):
            play(player(one, sampler, "Long"), sampler, journal_at(tmp_path))
    short.touch()
    found = play(player(one, sampler, "Long"), sampler, journal_at(tmp_path))
    one.close()
    assert all(episode.phase is Stage.DONE and not episode.failures for group in found for episode in group)


def test_siblings_draw_different_tokens(undisturbed):
    tokens = [tokens for _, tokens, *_ in undisturbed[0]]
    assert len(set(tokens[:3])) > 1


def test_too_many_failures_stop_the_run(pool, sampler):
    groups = play(player(pool, sampler, "Sums"), sampler)
    episodes = [episode for group in groups for episode in group]
    check_failures(episodes, 0.0, Coordinator(GlooTransport()))
    for episode in episodes[:2]:
        episode.phase, episode.failures = Stage.FAILED, ["it burnt"]
    check_failures(episodes, 0.34, Coordinator(GlooTransport()))
    with pytest.raises(UserError, match=r"(?s)env\.max_failed=0\.3.*it burnt"):
        check_failures(episodes, 0.3, Coordinator(GlooTransport()))


def test_without_its_baseline_every_sample_of_a_prompt_has_failed(pool, sampler):
    """All samples of the prompt count as failed before the run decides whether too many samples have failed."""
    groups = play(player(pool, sampler, "Sums"), sampler)
    groups[0][2].phase, groups[0][2].failures = Stage.FAILED, ["it burnt"]
    fail_without_baseline(groups, 2)
    assert [[episode.phase for episode in group] for group in groups] == [[Stage.FAILED] * 3, [Stage.DONE] * 3]
    assert all("it burnt" in episode.failures[-1] for episode in groups[0])
    with pytest.raises(UserError, match=r"3 of 6 samples failed"):
        check_failures([episode for group in groups for episode in group], 0.4, Coordinator(GlooTransport()))


def test_journaled_replies_to_other_tokens_are_not_used(pool, sampler, tmp_path):
    """On another number of ranks, a turn that is generated again may differ from the turn that was answered."""
    journal = journal_at(tmp_path)
    play(player(pool, sampler, "Sums"), sampler, journal)
    journal.begin(1, 0, None)
    other = Sampler()
    other.engine.generate, real = (
        (lambda requests, *, seed, step: real(requests, seed=4, step=step)),
        other.engine.generate,
    )
    journal._known.turns.clear()
    asked = [Asked(100 + p.index, p, [PARAMS] * 3) for p in prompts(sampler)]
    found = player(pool, other, "Sums").play(asked, version=0, step=1, journal=journal)
    expected = play(player(pool, other, "Sums"), other)
    texts = [[message["content"] for e in group for message in e.conversation if message["role"] == "assistant"]
             for group in found]  # fmt: skip
    assert [[e.rewards for e in group] for group in found] == [[e.rewards for e in group] for group in expected]
    assert texts[0]
