"""vLLM's token protocol as an agent sees it: what continues a row, and the form of answers."""

import json

import pytest

from rlhf.environments.chat_protocol import RejectedRequest, is_reply, is_start
from rlhf.environments.token_protocol import TokenHistory, token_chunks

CALL = {
    "token_ids": [7, 99, 2],
    "log_probs": [-0.5, float("-inf"), float("nan")],
    "versions": [(3, 1), (4, 3)],
    "usage": {"prompt_tokens": 2, "completion_tokens": 3},
}


def begun() -> TokenHistory:
    """A history after its first answer, with a token that is in no tokenizer."""
    history = TokenHistory(50)
    assert history.take({"token_ids": [5, 6]}) == {"token_ids": [5, 6]}
    history.answer(1, {"token_ids": [5, 6]}, CALL)
    return history


def test_tokens_after_the_answer_continue_the_row():
    history = begun()
    assert history.take({"token_ids": [5, 6, 7, 99, 2, 8, 9]}) == [8, 9]
    history.answer(2, {"token_ids": []}, CALL | {"token_ids": [1]})
    assert history.take({"token_ids": [5, 6, 7, 99, 2, 8, 9, 1, 4]}) == [4]


REWRITTEN = {
    "another answer": ([5, 6, 7, 98 - 60, 2, 8], 3),
    "another prompt": ([6, 6, 7], 0),
    "a part of it": ([5, 6, 7, 99], 4),
    "the same prompt": ([5, 6], 2),
}


@pytest.mark.parametrize("case", REWRITTEN)
def test_other_tokens_fork(case):
    tokens, kept = REWRITTEN[case]
    history = begun()
    fork = history.take({"token_ids": tokens})
    assert fork == {"token_ids": tokens, "kept": kept}
    assert is_reply(fork)
    history.answer(2, {"token_ids": tokens}, CALL)
    assert history.take({"token_ids": [*tokens, 7, 99, 2, 8]}) == [8]


def with_sampling(**params: object) -> dict:
    return {"token_ids": [5], "sampling_params": params}


REJECTED = {
    "no body": (None, "`token_ids`"),
    "no tokens": ({"messages": []}, "`token_ids`"),
    "empty": ({"token_ids": []}, "at least one token id"),
    "nothing new": ({"token_ids": [5, 6, 7, 99, 2]}, "adds no token"),
    "negative": ({"token_ids": [5, -1]}, "token_ids[1]=-1 is not a token id from 0 to 49"),
    "beyond the vocabulary": ({"token_ids": [5, 6, 50]}, "token_ids[2]=50 is not a token id from 0 to 49"),
    "a sampled token elsewhere": ({"token_ids": [99]}, "token_ids[0]=99"),
    "no number": ({"token_ids": [True, 6]}, "token_ids[0]=true"),
    "a text": ({"token_ids": ["x" * 1000]}, "token_ids[0]="),
    "huge": ({"token_ids": [10**4000]}, "token_ids[0]=1000"),
    "an image": ({"token_ids": [5], "features": {"mm_hashes": {}}}, "features="),
    "text": ({"token_ids": [5], "output_mode": "text"}, 'output_mode="text" is not supported. Remove it'),
    "a list": ({"token_ids": [5], "sampling_params": [1]}, "sampling_params is not a JSON object"),
    "options": ({"token_ids": [5], "stream_options": [1]}, "stream_options is not a JSON object"),
    "two choices": (with_sampling(n=2), "sampling_params.n=2 is not supported"),
    "a stop string": (with_sampling(stop=["x"]), "sampling_params.stop="),
    "a grammar": (with_sampling(structured_outputs={"json": "{}"}), "sampling_params.structured_outputs="),
    "more log-probs": (with_sampling(logprobs=5), "sampling_params.logprobs=5: only sampled tokens have log-probs"),
    "log-probs of the prompt": (with_sampling(prompt_logprobs=0), "sampling_params.prompt_logprobs=0"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_a_request_that_cannot_be_answered_is_rejected(case):
    request, words = REJECTED[case]
    with pytest.raises(RejectedRequest) as raised:
        begun().take(request)
    assert words in str(raised.value)
    assert len(str(raised.value)) < 200


def test_parameters_of_sampling_are_ignored():
    """As in the chat protocol: the trainer's settings sample."""
    request = with_sampling(temperature=0, max_tokens=1, top_p=0.5, stop_token_ids=[3], skip_special_tokens=False)
    assert TokenHistory(50).take(request | {"priority": 1, "cache_salt": "s"}) == {"token_ids": [5]}


def test_an_answer_has_the_fields_of_vllm():
    request = {"token_ids": [5, 6], "model": "m", "sampling_params": {"logprobs": 0}}
    answer = TokenHistory(50).answer(4, request, CALL)
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer
    (choice,) = answer.pop("choices")
    assert answer == {
        "request_id": "generate-tokens-4",
        "model": "m",
        "created": 0,
        "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
        "output_mode": "tokens",
        **dict.fromkeys(("prompt_logprobs", "prompt_token_id_logprobs", "prompt_token_ids", "mm_placeholders")),
        **dict.fromkeys(("metrics", "kv_transfer_params", "ec_transfer_params")),
    }
    content = choice.pop("logprobs")["content"]
    assert choice == {
        "index": 0,
        "token_ids": [7, 99, 2],
        "finish_reason": "stop",
        "stop_reason": None,
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}],
        "routed_experts": None,
        "sampling_mask": None,
    }
    assert [(each["token_id"], each["token"], each["logprob"]) for each in content] == [
        (7, "token_id:7", -0.5),
        (99, "token_id:99", -9999.0),
        (2, "token_id:2", -9999.0),
    ]
    assert content[0]["top_logprobs"] == [{"token_id": 7, "logprob": -0.5, "rank": None}]
    without = TokenHistory(50).answer(4, {"token_ids": [5, 6]}, CALL)
    assert without["choices"][0]["logprobs"] is None


def test_a_stream_has_the_answer_once():
    request = {"token_ids": [5, 6], "request_id": "r", "return_token_ids": True}
    answer = TokenHistory(50).answer(1, request, CALL)
    events = token_chunks(answer, with_usage=True)
    assert events[-1] == "data: [DONE]\n\n"
    whole, usage = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert (whole["request_id"], whole["prompt_token_ids"], whole["usage"]) == ("generate-tokens-r", [5, 6], None)
    assert whole["choices"] == answer["choices"]
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 5)
    assert len(token_chunks(answer, with_usage=False)) == 2


def test_replies_of_a_process_that_runs_users_code_are_checked():
    assert is_start({"token_ids": [5]})
    assert is_reply([5, 6])
    wrong = ([], [-1], [1 << 31], [True], [5.0], "5", None)
    assert not any(is_start({"token_ids": each}) for each in wrong)
    assert not any(is_reply(each) for each in wrong if each is not None)
    fork = {"token_ids": [5, 6], "kept": 2}
    assert is_reply(fork)
    assert not any(is_reply(fork | each) for each in ({"kept": 3}, {"kept": -1}, {"kept": None}, {"more": 1}))
    assert not is_reply({"token_ids": [5]})
