"""OpenAI's chat protocol as an agent sees it: what continues a conversation, and the form of answers."""

import json
import queue
import threading
import urllib.error
import urllib.request

import pytest

from rlhf.environments.chat_endpoint import MAX_REQUEST_BYTES, RETRIES, ChatEndpoint
from rlhf.environments.chat_protocol import Conversation, RejectedRequest, chunks, completion, is_reply, is_start

USER = {"role": "user", "content": "2 + 3?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}
ANSWER = {"role": "assistant", "content": " 5 ", "reasoning_content": "easy"}
USAGE = {"prompt_tokens": 7, "completion_tokens": 2}


def begun(**more) -> Conversation:
    conversation = Conversation()
    conversation.take({"messages": [USER], **more})
    return conversation


def test_the_new_messages_follow_the_answers():
    conversation = begun(tools=[TOOL])
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    conversation.answered(called)
    wire = completion(1, "m", called, USAGE)["choices"][0]["message"]
    assert wire["content"] is None
    assert json.loads(wire["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "5"}], "name": "other"}
    new = conversation.take({"messages": [USER, wire | {"refusal": None}, result], "tools": [TOOL]})
    assert new == [{"role": "tool", "tool_call_id": "c1", "content": "5", "name": "add"}]
    conversation.answered(ANSWER)
    # A program may drop thoughts and outer white space.
    again = [USER, wire, result, {"role": "assistant", "content": "5"}, USER]
    assert conversation.take({"messages": again, "tools": [TOOL]}) == [USER]


AFTER = [USER, ANSWER]
REJECTED = {
    "not a list": ({"messages": "hello"}, "a list `messages`"),
    "no role": ({"messages": [*AFTER, {"content": "x"}]}, "role"),
    "an image": ({"messages": [*AFTER, USER | {"content": [{"type": "image_url"}]}]}, "not text"),
    "nothing new": ({"messages": AFTER}, "adds no message"),
    "nothing after another answer": ({"messages": [USER, ANSWER | {"content": "6"}]}, "ends with an assistant message"),
    "another empty history": ({"messages": [USER | {"content": " "}]}, "empty"),
    "an unknown call": ({"messages": [*AFTER, {"role": "tool", "tool_call_id": "c9"}]}, "'c9'"),
    "a new system": ({"messages": [*AFTER, {"role": "system", "content": "x"}]}, "not system"),
    "two choices": ({"messages": [*AFTER, USER], "n": 2}, "n=2 is not supported"),
    "forced": ({"messages": [*AFTER, USER], "tool_choice": "required"}, "tool_choice="),
    "a form": ({"messages": [*AFTER, USER], "response_format": {"type": "json_object"}}, "response_format="),
}


@pytest.mark.parametrize("case", REJECTED)
def test_a_request_that_does_not_continue_is_rejected(case):
    request, words = REJECTED[case]
    conversation = begun()
    conversation.answered(ANSWER)
    with pytest.raises(RejectedRequest) as raised:
        conversation.take(request)
    assert words in str(raised.value)


SYSTEM = {"role": "system", "content": "Add."}
REWRITTEN = {
    "the same question again": ([USER], 1),
    "another answer": ([USER, ANSWER | {"content": "6"}, USER], 1),
    "another question": ([USER | {"content": "x"}, ANSWER, USER], 0),
    "a summary": ([SYSTEM, {"role": "user", "content": "It was 5. Go on."}], 0),
    "other tools": ([*AFTER, USER], 2),
}


@pytest.mark.parametrize("case", REWRITTEN)
def test_a_request_that_rewrites_the_history_forks(case):
    messages, kept = REWRITTEN[case]
    tools = [TOOL] if case == "other tools" else []
    conversation = begun()
    conversation.answered(ANSWER)
    fork = conversation.take({"messages": messages, "tools": tools})
    assert fork == {"messages": messages, "tools": tools, "kept": kept}
    assert is_reply(fork)
    # The next request continues the rewritten history.
    conversation.answered(ANSWER)
    assert conversation.take({"messages": [*messages, ANSWER, USER], "tools": tools}) == [USER]


def test_results_in_a_rewritten_history_have_the_names_of_their_tools():
    conversation = begun(tools=[TOOL])
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "(left out)"}
    conversation.answered(called)
    conversation.take({"messages": [USER, called, result], "tools": [TOOL]})
    conversation.answered(ANSWER)
    unknown = {"role": "tool", "tool_call_id": "c2", "content": "5"}
    fork = conversation.take({"messages": [SYSTEM, called, result, unknown, ANSWER, USER], "tools": [TOOL]})
    assert isinstance(fork, dict)
    assert fork["messages"][2:4] == [result | {"name": "add"}, unknown]


def test_a_call_needs_its_result():
    conversation = begun(tools=[TOOL])
    conversation.answered({"role": "assistant", "content": "", "tool_calls": [CALL]})
    with pytest.raises(RejectedRequest, match="calls c1 have no tool message"):
        conversation.take({"messages": [*conversation.messages, USER], "tools": [TOOL]})


@pytest.mark.parametrize("messages", [[ANSWER], [USER | {"content": " "}], []])
def test_a_first_request_needs_a_question(messages):
    with pytest.raises(RejectedRequest):
        Conversation().take({"messages": messages})


def test_a_stream_has_the_answer_once():
    message = {"role": "assistant", "content": "5", "tool_calls": [CALL]}
    events = chunks(completion(3, "m", message, USAGE), with_usage=True)
    assert events[-1] == "data: [DONE]\n\n"
    parts = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    delta, end, usage = parts
    assert delta["choices"][0]["delta"]["content"] == "5"
    assert delta["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert end["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
    assert usage["usage"]["total_tokens"] == 9
    assert len(chunks(completion(3, "m", message, USAGE), with_usage=False)) == 3


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"messages": [], "tools": []},
        {"messages": [USER]},
        {"messages": [USER], "tools": [{}]},
        {"messages": [USER], "tools": [{"function": {"name": "f", "parameters": {"properties": {"a": 1}}}}]},
        {"messages": [{"role": "root", "content": ""}], "tools": []},
    ],
)
def test_replies_of_a_process_that_runs_users_code_are_checked(value):
    assert not is_start(value)
    assert is_start({"messages": [USER], "tools": [TOOL]})
    assert is_reply(None)
    assert not is_reply([ANSWER])
    fork = {"messages": [USER, ANSWER, USER], "tools": [TOOL], "kept": 1}
    assert is_reply(fork)
    wrong = ({"kept": 4}, {"kept": -1}, {"kept": True}, {"kept": None}, {"tools": [{}]}, {"messages": []}, {"more": 1})
    assert not any(is_reply(fork | each) for each in wrong)
    assert not is_reply({"messages": [USER], "tools": []})


def test_the_endpoint_wants_its_key_and_ends():
    requests: queue.Queue = queue.Queue()
    endpoint = ChatEndpoint(requests)
    endpoint.start()

    def post(path: str = "/chat/completions", key: str = endpoint.key, body: bytes = b"{}", sent: int = 0) -> tuple:
        headers = {"Authorization": f"Bearer {key}", RETRIES: str(sent)}
        request = urllib.request.Request(endpoint.url + path, body, headers)
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    try:
        assert post(key="other")[0] == 401
        assert post(path="/responses")[0] == 404
        assert requests.empty()
        answers: list[tuple] = []
        thread = threading.Thread(target=lambda: answers.append(post()))
        thread.start()
        requests.get(timeout=10).reply(completion(1, "m", ANSWER, USAGE))
        thread.join()
        assert answers[0][1]["choices"][0]["message"]["content"] == " 5 "
        assert post(body=b" " * (MAX_REQUEST_BYTES + 1))[0] == 413
        waiting = threading.Thread(target=lambda: answers.append(post()))
        waiting.start()
        assert not requests.get(timeout=10).overlaps
        # A repeated request, an equal one, and another one.
        for body, sent, overlaps in ((b"{}", 1, False), (b"{}", 0, True), (b'{"messages": []}', 1, True)):
            threading.Thread(target=post, kwargs={"body": body, "sent": sent}, daemon=True).start()
            assert requests.get(timeout=10).overlaps == overlaps
        endpoint.end()
        waiting.join()
        assert answers[1][0] == 400
        assert answers[1][1]["error"]["code"] == "context_length_exceeded"
        assert post()[0] == 400
    finally:
        endpoint.close()
