"""Represents one episode as tokens: the policy's turns and the environment's answers. Makes no calls itself."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
import xxhash

from rlhf.data import Prompt
from rlhf.data.turns.chat_turns import ChatTurns
from rlhf.data.turns.tool_calls import ToolCall, Turn
from rlhf.environments.chat_protocol import Fork
from rlhf.environments.definition import Definition
from rlhf.environments.sessions import Call, Reply, Session
from rlhf.errors import UserError
from rlhf.rollout import Request, Sample, SamplingParams
from rlhf.rollout.sample import ROW, FinishReason
from rlhf.rollout.sampling_mask import SamplingMask, joined_masks, mask_part

LONGEST_TOKEN = 1024
"""Upper bound of the characters that one token stands for."""


class Stage(Enum):
    """State of an episode: it waits for calls to its environment or for a turn of the policy, or it has ended."""

    CALLS, POLICY, DONE, FAILED = range(4)


@dataclass(frozen=True)
class EnvironmentClass:
    """A class of environments with its chat."""

    index: int
    """Index in `env.classes`."""
    definition: Definition
    chat_of: Callable[[Sequence[dict[str, Any]]], ChatTurns]
    """Returns the chat whose prompt lists the given tools. An agent names its tools in its first request."""
    must_reward: bool = False
    """Whether an agent must write a reward, because `reward.functions` is empty."""


@dataclass(frozen=True)
class Limits:
    """Limits of an episode."""

    turns: int
    rows: int
    invalid_calls: int
    retries: int
    prompt_tokens: int
    vocabulary: int
    """Each token id that an agent sends must be below this number."""


@dataclass(eq=False)
class Episode:
    """Response number `sample` to the prompt `uid`.

    The tokens that the policy sampled are kept as they are; an environment's answers are appended as tokens. If an
    agent rewrites its history, the tokens of the rewritten history are appended, too, and begin a new row.
    """

    uid: int
    sample: int
    prompt: Prompt
    params: SamplingParams
    kind: EnvironmentClass
    limits: Limits
    row: dict[str, Any]
    new_session: Any
    """Returns a new `Session` with the given name."""
    attempt: int = 0
    failures: list[str] = field(default_factory=list)
    failed_calls: list[tuple[tuple[int, int, int, int, str], str]] = field(default_factory=list)
    """Key and operation of the calls that ended an attempt."""
    session: Session = field(init=False)
    phase: Stage = field(init=False)

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.session = self.new_session(f"{self.uid}-{self.sample}-{self.attempt}")
        self.phase = Stage.CALLS
        self.calls: list[Call] = [{"op": "reset", "row": self.row}]
        if self.kind.definition.is_agent:
            self.calls = [{"op": "start", "row": self.row, "vocabulary": self.limits.vocabulary}]
        self.turn = self.tool_calls = self.invalid_calls = 0
        self._past = ""
        self.prompt_ids: list[int] = []
        self.response: list[int] = []
        self.conversation: list[dict[str, Any]] = []
        self.rewards: list[float] = []
        self._log_probs: list[np.ndarray] = []
        self._masks: list[tuple[SamplingMask | None, int]] = []
        self._versions: list[tuple[int, int]] = []
        self._observations: list[tuple[int, int]] = []
        self._forks: list[tuple[int, int]] = []
        self.lacks_row = False
        """Whether `env.max_rows` ended the episode."""
        self._by_tokens = False
        """Whether the newest row is of an agent that sends and receives token ids."""
        self._reason: FinishReason = "stop"
        self._turn: tuple[Turn, list[int]] | None = None

    @property
    def key(self) -> tuple[int, int, int, int, str]:
        """Key of the next turn, or of the next calls, in the journal. It ends with a hash of all turns and replies.

        If a record is damaged, or the number of ranks has changed, a turn or reply may differ from the journal's. The
        hash then differs, too, so no later record is used: it would follow other tokens.
        """
        return self.uid, self.sample, self.attempt, self.turn, self._past

    def _remember(self, content: bytes) -> None:
        self._past = xxhash.xxh3_64_hexdigest(self._past.encode() + content)

    @property
    def rows(self) -> int:
        """Number of rows: 1, and one for each rewritten history."""
        return 1 + len(self._forks)

    @property
    def operation(self) -> str:
        """Kind of the next calls: reset, tool, step or reward; start, answer or reward of an agent."""
        return str(self.calls[0]["op"])

    def request(self) -> Request:
        """Return the request for the policy's next turn, which continues the newest row."""
        prompt_ids, start = self._row
        number = self.sample + len(self._forks) * ROW
        so_far = None
        if start < len(self.response):
            so_far = self._sample("partial").part(start, len(self.response), len(self._forks))
        return Request(self.uid, prompt_ids, self.params, number, so_far)

    @property
    def _row(self) -> tuple[list[int], int]:
        """The newest row's prompt, and the start of the row's other tokens in `response`."""
        if not self._forks:
            return self.prompt_ids, 0
        start, prompt = self._forks[-1]
        return self.response[start : start + prompt], start + prompt

    def take_turn(self, made: Sample) -> None:
        """Append the policy's turn, whose new tokens are in `made`."""
        sampled = made.token_ids.tolist()
        self._remember(np.array(sampled, np.int32).tobytes())
        before = len(self.response)
        self.response += sampled
        self._log_probs.append(made.log_probs)
        self._masks.append((made.sampling_mask, len(sampled)))
        self._versions += [(version, before + end) for version, end in made.versions]
        self.turn += 1
        turn = self._chat.parse(sampled)
        self.conversation.append(turn.message())
        self._turn = turn, sampled
        if made.finish_reason == "length" or not (turn.ended or self._by_tokens):
            return self._end("length")
        if self.kind.definition.is_agent:
            self._ask([self._answer(turn, before, made)], "")
        elif (step := self.kind.definition.step) is not None:
            self._ask([{"op": "step", "text": turn.text}], step)
        elif not turn.actions:
            self._end("stop")
        else:
            self.invalid_calls += len(turn.invalid)
            self.tool_calls += len(turn.actions)
            self._ask([{"op": "tool", "name": c.name, "arguments": c.arguments} for c in turn.calls], "")
        return None

    def _ask(self, calls: list[Call], step: str) -> None:
        if self.invalid_calls > self.limits.invalid_calls:
            self._end("stop")
        elif calls:
            self.phase, self.calls = Stage.CALLS, calls
        else:
            self._answer_tools([])

    def take_replies(self, replies: Sequence[Reply]) -> None:
        """Continue the episode with the replies to `calls`."""
        operation, self.calls = self.operation, []
        self._remember(json.dumps(replies).encode())
        if operation == "reset":
            self._chat = self.kind.chat_of(self.kind.definition.tools)
            self._start(_with_text(self.prompt.messages, self._chat.harmless(replies[0]["value"] or "")))
        elif operation == "start":
            begun = replies[0]["value"]
            self._chat = self.kind.chat_of(())
            self._by_tokens = "token_ids" in begun
            if self._by_tokens:
                self._start([], begun["token_ids"])
            else:
                self._chat = self.kind.chat_of(self._harmless(begun["tools"]))
                self._start([self._harmless(message) for message in begun["messages"]])
        elif operation == "answer":
            if (value := replies[0]["value"]) is None:
                self._end("stop")
            elif isinstance(value, dict):
                self._fork(value)
            elif self._by_tokens:
                self._observe(self._decoded(value), value)
            else:
                self._observe(value)
        elif operation == "tool":
            self._answer_tools(replies)
        elif operation == "step":
            text, reward = replies[0]["value"]
            self.rewards.append(reward)
            if text is None:
                self._end("stop")
            else:
                self._observe([{"role": "user", "content": text}])
        else:
            self.rewards.append(replies[0]["value"])
            self.phase = Stage.DONE

    def fail(self, why: str) -> None:
        """Begin again after a failure of the environment, or fail if no retries are left."""
        limit = self._limit() if self.calls and self.calls[0]["op"] == "reward" else ""
        self.failures.append(f"{why} (the episode had ended at {limit})" if limit else why)
        self.attempt += 1
        if self.attempt > self.limits.retries:
            self.phase, self.calls = Stage.FAILED, []
        else:
            self._begin()

    def _limit(self) -> str:
        """Return the setting that has ended the episode, empty if none has."""
        if self.lacks_row:
            return f"env.max_rows={self.limits.rows}"
        return f"env.max_turns={self.limits.turns}" if self.turn >= self.limits.turns else ""

    def _answer(self, turn: Turn, before: int, made: Sample) -> Call:
        """Return the call that answers the request of an agent. The answer includes the text of invalid tool calls."""
        prompt_ids, start = self._row
        usage = {"prompt_tokens": len(prompt_ids) + before - start, "completion_tokens": len(made)}
        if self._by_tokens:
            log_probs, versions = made.log_probs.tolist(), made.versions
            ids = made.token_ids.tolist()
            return {"op": "answer", "token_ids": ids, "log_probs": log_probs, "versions": versions, "usage": usage}
        self.invalid_calls += len(turn.invalid)
        self.tool_calls += len(turn.actions)
        message = turn.message()
        message["content"] = "\n".join(filter(None, [turn.text, *(call.text for call in turn.invalid)]))
        return {"op": "answer", "message": message, "usage": usage}

    def _decoded(self, tokens: list[int]) -> list[dict[str, Any]]:
        """Return an agent's tokens as a message for reward functions, special tokens included."""
        return [{"role": "user", "content": self._chat.text(tokens)}] if tokens else []

    def _harmless(self, value: Any) -> Any:
        """Return an agent's JSON with `ChatTurns.harmless` applied to each text."""
        if isinstance(value, str):
            return self._chat.harmless(value)
        if isinstance(value, dict):
            return {key: self._harmless(each) for key, each in value.items()}
        return [self._harmless(each) for each in value] if isinstance(value, list) else value

    def _start(self, messages: Sequence[dict[str, Any]], tokens: list[int] | None = None) -> None:
        """Begin the first row with `tokens`, or else with the rendered messages."""
        too_long = _too_long(messages, self.limits.prompt_tokens)
        self.prompt_ids = tokens or ([] if too_long else self._chat.prompt(messages))
        if too_long or len(self.prompt_ids) > self.limits.prompt_tokens:
            size = f"{_characters(messages)} characters" if too_long else f"{len(self.prompt_ids)} tokens"
            raise UserError(
                f"An episode of {self.kind.definition.label} begins with {size}, more than "
                f"data.max_prompt_length={self.limits.prompt_tokens}: the messages and tools, or token_ids, "
                "before the first turn. Raise data.max_prompt_length, or shorten them."
            )
        self.phase = Stage.POLICY

    def _answer_tools(self, replies: Sequence[Reply]) -> None:
        assert self._turn is not None
        made, messages = iter(replies), []
        for action in self._turn[0].actions:
            if not isinstance(action, ToolCall):
                messages.append(action.result())
                continue
            reply = next(made)
            self.invalid_calls += "rejected" in reply
            messages.append(action.result(f"error: {reply['rejected']}" if "rejected" in reply else reply["value"]))
        if self.invalid_calls > self.limits.invalid_calls:
            self._end("stop")
        else:
            self._observe(messages)

    def _observe(self, messages: list[dict[str, Any]], tokens: list[int] | None = None) -> None:
        """Append the environment's messages. End the episode instead if the policy has no turn or room left.

        `tokens`: the messages' tokens, if an agent has sent tokens.
        """
        assert self._turn is not None
        self.conversation += messages
        room = self.params.max_tokens - (len(self.response) - self._row[1])
        if self.turn >= self.limits.turns or _too_long(messages, room):
            return self._end("length")
        tokens = tokens or self._chat.observation(self._turn[1], messages)
        if len(tokens) >= room:
            return self._end("length")
        return self._append(tokens)

    def _append(self, tokens: list[int]) -> None:
        """Append tokens that the policy did not sample, and ask the policy for a turn."""
        start = len(self.response)
        self.response += tokens
        self._observations.append((start, len(self.response)))
        self._log_probs.append(np.zeros(len(tokens), np.float32))
        self._masks.append((None, len(tokens)))
        self._versions[-1] = self._versions[-1][0], len(self.response)
        self.phase = Stage.POLICY

    def _fork(self, fork: Fork) -> None:
        """Begin a row with an agent's rewritten history, if the policy has another turn, and the row has room.

        The chat template renders messages, as a server does when the agent is deployed. The policy's answers
        in this history are not trained again.
        """
        by_tokens = "token_ids" in fork
        messages = [] if by_tokens else [self._harmless(message) for message in fork["messages"]]
        kept = fork["kept"]
        new = self._decoded(fork["token_ids"][kept:]) if by_tokens else messages[kept:]
        # The conversation already has the policy's answers and the messages that the history keeps.
        self.conversation += [each for each in new if each["role"] != "assistant"]
        limits, longest = self.limits, self.limits.prompt_tokens + self.params.max_tokens
        if self.turn >= limits.turns or _too_long(messages, longest):
            return self._end("length")
        self.lacks_row = self.rows >= limits.rows
        if self.lacks_row:
            return self._end("length")
        try:
            self._chat = self.kind.chat_of(() if by_tokens else self._harmless(fork["tools"]))
            tokens = fork["token_ids"] if by_tokens else self._chat.prompt(messages)
        except UserError as error:
            # Unlike the first request, the messages depend on what the policy wrote, so do not end the run.
            self.session.drop()
            return self.fail(f"the program rewrote its history, but the new history cannot become a prompt: {error}")
        if len(tokens) >= longest:
            return self._end("length")
        self._by_tokens = by_tokens
        self._forks.append((len(self.response), min(len(tokens), limits.prompt_tokens)))
        return self._append(tokens)

    def _end(self, reason: FinishReason) -> None:
        self._reason = reason
        required = {"required": self.kind.must_reward} if self.kind.definition.is_agent else {}
        self.phase, self.calls = Stage.CALLS, [{"op": "reward"} | required]

    def finished(self, version: int) -> Sample:
        """Return the sample of a finished episode.

        The sample of a failed episode has no tokens. Its version is `version`, the number of training steps so far.
        """
        if self.phase is Stage.FAILED:
            return Sample.of(self.uid, self.sample, [], [], "failed", version)
        return self._sample(self._reason)

    def _sample(self, reason: FinishReason) -> Sample:
        ids, log_probs = np.array(self.response, np.int32), np.concatenate(self._log_probs)
        spans = tuple(self._observations)
        versions, forks = _merged(self._versions), tuple(self._forks)
        return Sample(self.uid, self.sample, ids, log_probs, reason, versions, spans, forks, joined_masks(self._masks))


def new_part(sample: Sample, start: int) -> Sample:
    """Return the sample without its first `start` tokens, which belong to earlier turns."""
    versions = tuple((version, end - start) for version, end in sample.versions if end > start)
    ids, log_probs = sample.token_ids[start:], sample.log_probs[start:]
    mask = mask_part(sample.sampling_mask, start, len(sample))
    return Sample(sample.uid, sample.sample, ids, log_probs, sample.finish_reason, versions, sampling_mask=mask)


def with_head(sample: Sample, head: Sequence[int]) -> Sample:
    """Return the sample with the tokens `head` in front, as an observation."""
    if not head:
        return sample
    n = len(head)
    return replace(
        sample,
        token_ids=np.concatenate([np.array(head, np.int32), sample.token_ids]),
        log_probs=np.concatenate([np.zeros(n, np.float32), sample.log_probs]),
        versions=tuple((version, end + n) for version, end in sample.versions),
        observations=((0, n), *((start + n, end + n) for start, end in sample.observations)),
        forks=tuple((start + n, prompt) for start, prompt in sample.forks),
        sampling_mask=joined_masks([(None, n), (sample.sampling_mask, len(sample))]),
    )


def _merged(runs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join successive runs of tokens of the same policy version."""
    merged: list[tuple[int, int]] = []
    for version, end in runs:
        if merged and merged[-1][0] == version:
            merged[-1] = version, end
        else:
            merged.append((version, end))
    return tuple(merged)


def _characters(messages: Sequence[dict[str, Any]]) -> int:
    return sum(len(content) for message in messages if isinstance(content := message["content"], str))


def _too_long(messages: Sequence[dict[str, Any]], tokens: int) -> bool:
    """Return whether the messages surely have more than `tokens` tokens. Tokenizing such texts could take minutes."""
    return _characters(messages) > tokens * LONGEST_TOKEN


def _with_text(messages: Sequence[dict[str, str]], text: str) -> list[dict[str, str]]:
    """Return the messages with `text` appended to the last user message (as in TRL), or in a new user message."""
    copied = [dict(message) for message in messages]
    if text:
        users = [message for message in copied if message["role"] == "user"]
        if users:
            users[-1]["content"] += text
        else:
            copied.append({"role": "user", "content": text})
    return copied
