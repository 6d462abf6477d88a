"""An agent for tests that sends token ids: `python token_agent.py BEHAVIOR`. It needs the standard library alone."""

import json
import os
import sys
import urllib.error
import urllib.request

from chat_agent import ROW, ask, reward

URL = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/inference/v1/generate"
KEY = os.environ["OPENAI_API_KEY"]
LOG_PROBS = {"logprobs": 1, "temperature": 0.0, "stop_token_ids": [1]}


def generate(tokens: list, key: str = KEY, retries: int = 0, **more: object) -> bytes:
    body = json.dumps({"token_ids": tokens, "sampling_params": LOG_PROBS, **more}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    headers["x-stainless-retry-count"] = str(retries)
    with urllib.request.urlopen(urllib.request.Request(URL, body, headers)) as answer:
        return answer.read()


def sampled(tokens: list, **more: object) -> list[int]:
    return json.loads(generate(tokens, **more))["choices"][0]["token_ids"]


def letters(text: str) -> list[int]:
    """Return any token ids: how an agent tokenizes is its own business."""
    return [5 + ord(letter) % 40 for letter in text]


def chat() -> None:
    """Do as `tokens` over the other protocol."""
    messages = [*ROW["messages"]]
    messages += [ask(messages), {"role": "user", "content": "Again."}]
    ask(messages)
    reward(1)


def tokens() -> None:
    first = [*ROW["prompt_ids"], *sampled(ROW["prompt_ids"])]
    sampled([*first, *ROW["again_ids"]])
    reward(1)


def log_probs() -> None:
    """Write the sum of the answers' log-probs, of which the second is streamed."""
    answer = json.loads(generate(ROW["prompt_ids"], model="policy", request_id="mine", return_token_ids=True))
    (choice,) = answer["choices"]
    ids, entries = choice["token_ids"], choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == ids
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": len(ids)}]
    assert (answer["request_id"], answer["prompt_token_ids"]) == ("generate-tokens-mine", ROW["prompt_ids"])
    context = [*ROW["prompt_ids"], *ids, *ROW["again_ids"]]
    streamed = generate(context, stream=True, stream_options={"include_usage": True}).decode()
    *events, done = streamed.strip().split("\n\n")
    assert done == "data: [DONE]"
    whole, usage = (json.loads(event.removeprefix("data: ")) for event in events)
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "stop"
    assert usage["usage"]["prompt_tokens"] == len(context)
    assert usage["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert "logprobs" in choice
    reward(sum(entry["logprob"] for entry in [*entries, *choice["logprobs"]["content"]]))


def repeat() -> None:
    """Send the same request twice, as a client does that did not wait for the answer."""
    first = generate(letters("What?"))
    assert generate(letters("What?"), retries=1) == first
    generate(letters("What?"))  # a new request
    reward(1)


def rewrite() -> None:
    """Continue, replace the history, use the other protocol, and come back."""
    first = letters(ROW["messages"][-1]["content"])
    first += sampled(first)
    first += letters("More.")
    first += sampled(first)
    summary = letters("A summary.") + first[-3:]
    summary += sampled(summary)
    sampled([*summary, *letters("Go on.")])
    text = ask([{"role": "user", "content": "In words."}])["content"]
    reward(len(text) + len(sampled(first[:10])))


def flood() -> None:
    history = ROW["prompt_ids"]
    while True:
        history += sampled(history) + ROW["again_ids"]


def large() -> None:
    """Send an observation that leaves no room for an answer."""
    history = ROW["prompt_ids"]
    sampled(history + sampled(history) + letters("x" * 200))


def other_key() -> None:
    rejected([5], key="guess")


def unknown() -> None:
    rejected([5, 1 << 40])


def other_path() -> None:
    global URL
    URL += "_more"
    rejected([5])


def rejected(ids: list, **more: object) -> None:
    try:
        generate(ids, **more)
    except urllib.error.HTTPError as error:
        sys.exit(f"{error.code} {error.read().decode()}")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
