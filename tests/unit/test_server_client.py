"""Client of a rollout server: which answers it accepts. A small server simulates wrong answers."""

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rlhf.errors import UserError
from rlhf.rollout import Request, Sample, SamplingParams
from rlhf.rollout.servers.client import (
    RequestSettings,
    SecretRejected,
    ServerClient,
    ServerFailure,
    StaleAnswer,
    sample_of,
)
from rlhf.rollout.servers.dispatch import ServerLoad
from rlhf.rollout.servers.secret import Secret
from rlhf.rollout.vllm.requests import request_seed

SECRET = Secret("of-this-run-alone", "here")
PARAMS, VOCAB = SamplingParams(max_tokens=4), 10
REQUEST = Request(7, [1, 2, 3], PARAMS, 5)


def choice(tokens: tuple[int, ...] = (4, 9), label: str = "w1") -> dict[str, Any]:
    return {
        "index": 0,
        "token_ids": list(tokens),
        "finish_reason": "stop",
        "logprobs": {"content": [{"token_id": token, "logprob": -0.5} for token in tokens]},
        "weight_versions": [{"version": label, "start": 0, "end": len(tokens)}],
    }


def answer() -> dict[str, Any]:
    return {"request_id": "x", "choices": [choice()]}


def read(content: Any, label: str = "w1") -> Sample:
    return sample_of(json.dumps(content).encode(), REQUEST, VOCAB, label, 3)


def test_a_sample_with_its_number_and_version():
    assert read(answer()) == Sample.of(7, 5, [4, 9], [-0.5] * 2, "stop", 3)


def test_an_aborted_answer_is_a_sample_with_the_tokens_so_far():
    content = answer()
    content["choices"][0]["finish_reason"] = "abort"
    assert read(content) == Sample.of(7, 5, [4, 9], [-0.5] * 2, "partial", 3)
    begun = replace(REQUEST, response=Sample.of(7, 5, [3], [-1.0], "partial", 1))
    went_on = sample_of(json.dumps(content).encode(), begun, VOCAB, "w1", 3)
    assert went_on.versions == ((1, 1), (3, 3))
    assert went_on.finish_reason == "partial"


@pytest.mark.parametrize("labels", [None, []])
def test_an_aborted_answer_without_tokens_changes_nothing(labels):
    content = answer()
    content["choices"][0] |= {"finish_reason": "abort", "token_ids": [], "weight_versions": labels}
    assert read(content) == Sample.of(7, 5, [], [], "partial")
    begun = replace(REQUEST, response=Sample.of(7, 5, [3], [-1.0], "partial", 1))
    assert sample_of(json.dumps(content).encode(), begun, VOCAB, "w1", 3) == begun.response


MASKED = replace(REQUEST, params=replace(PARAMS, top_k=3, sampling_mask=True))


def read_masks(masks: Any) -> Sample:
    content = answer()
    content["choices"][0]["sampling_mask"] = masks
    return sample_of(json.dumps(content).encode(), MASKED, VOCAB, "w1", 3)


def test_a_sample_with_sampling_masks():
    mask = read_masks([[4, 1, 8], [9]]).sampling_mask
    assert mask is not None
    assert mask.rows(3).tolist() == [[4, 1, 8], [9, -1, -1]]
    assert read(answer() | {"choices": [choice() | {"sampling_mask": [[4], [9]]}]}).sampling_mask is None


@pytest.mark.parametrize(
    "masks",
    [
        [[4]],
        [[4], [9], [9]],
        [[4], []],
        [[4], [8]],
        [[4], 9],
        [[4, VOCAB], [9]],
        [[4, -1], [9]],
        [[4, True], [9]],
        [[4, "1"], [9]],
        [[4, 1.0], [9]],
        [[4, None], [9]],
        [[4, [1]], [9]],
        [[4, 1 << 63], [9]],
        [[4, 1 << 64], [9]],
        [[4, -(1 << 64)], [9]],
        [[9], [4]],
        [[], []],
        "49",
        {},
    ],
)
def test_broken_sampling_masks_are_a_failure_of_the_server(masks):
    with pytest.raises(ServerFailure, match="sampling mask"):
        read_masks(masks)


def test_a_server_without_sampling_masks_must_be_started_differently():
    with pytest.raises(UserError, match="--return-sampling-mask"):
        read_masks(None)


def change(key: str, value: Any) -> Callable[[dict], Any]:
    return lambda content: content["choices"][0].__setitem__(key, value)


def change_entry(key: str, value: Any) -> Callable[[dict], Any]:
    return lambda content: content["choices"][0]["logprobs"]["content"][1].__setitem__(key, value)


BROKEN: dict[str, tuple[Callable[[dict], Any], str]] = {
    "no choices": (lambda c: c.pop("choices"), "one choice"),
    "a choice of another kind": (lambda c: c.__setitem__("choices", [1]), "one choice"),
    "none": (lambda c: c["choices"].pop(), "one choice"),
    "one too many": (lambda c: c["choices"].append(choice()), "one choice"),
    "no tokens": (change("token_ids", None), "token_ids"),
    "none at all": (change("token_ids", []), "0 tokens"),
    "too long": (change("token_ids", [1] * 5), "5 tokens"),
    "not in the vocabulary": (change("token_ids", [4, VOCAB]), "0 to 9"),
    "negative": (change("token_ids", [4, -1]), "0 to 9"),
    "true": (change("token_ids", [4, True]), "0 to 9"),
    "unknown reason": (change("finish_reason", "error"), "finish_reason 'error'"),
    "unhashable reason": (change("finish_reason", []), "finish_reason"),
    "no log-probs": (change("logprobs", None), "not one log-prob for each"),
    "too few log-probs": (lambda c: c["choices"][0]["logprobs"]["content"].pop(), "not one log-prob for each"),
    "log-prob of another token": (change_entry("token_id", 5), "no finite log-prob of token 9"),
    "NaN": (change_entry("logprob", math.nan), "no finite log-prob"),
    "infinite": (change_entry("logprob", -math.inf), "no finite log-prob"),
    "vLLM's stand-in for NaN": (change_entry("logprob", -9999.0), "no finite log-prob"),
    "above 0": (change_entry("logprob", 0.5), "no finite log-prob"),
    "a word": (change_entry("logprob", "-0.5"), "no finite log-prob"),
    "no label": (change("weight_versions", None), "weight_versions"),
    "a label for a part": (change("weight_versions", [{"version": "w1", "start": 0, "end": 1}]), "weight_versions"),
    "spans with a gap": (
        change("weight_versions", [{"version": "w1", "start": 0, "end": 1}, {"version": "w1", "start": 2, "end": 2}]),
        "weight_versions",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_answer_is_a_failure_of_the_server(name):
    content = answer()
    breaks, reason = BROKEN[name]
    breaks(content)
    with pytest.raises(ServerFailure, match=reason):
        read(content)


@given(st.binary() | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(json.dumps))
def test_garbage_is_a_failure_of_the_server(garbage):
    with pytest.raises(ServerFailure):
        sample_of(garbage if isinstance(garbage, bytes) else garbage.encode(), REQUEST, VOCAB, "w1", 3)


def test_deep_garbage_is_a_failure_of_the_server():
    with pytest.raises(ServerFailure, match="not JSON"):
        sample_of(b"[" * 100_000, REQUEST, VOCAB, "w1", 3)


def test_an_answer_by_other_weights_is_refused():
    with pytest.raises(StaleAnswer, match=r"\['w1'\], not 'w2'"):
        read(answer(), label="w2")
    content = answer()
    content["choices"][0]["weight_versions"] = [
        {"version": "w1", "start": 0, "end": 1},
        {"version": "w2", "start": 1, "end": 2},
    ]
    with pytest.raises(StaleAnswer, match="'w2'"):
        read(content)


SETTINGS = RequestSettings([9], {}, VOCAB)


def ask(handler: Callable, use: Callable, answer_timeout_s: float = 30.0, settings: RequestSettings = SETTINGS) -> Any:
    """Return `use(client)`, where the client's server answers every request by `handler`."""

    async def run() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        try:
            async with aiohttp.ClientSession() as session:
                client = ServerClient(session, f"http://127.0.0.1:{port}", settings, answer_timeout_s, SECRET)
                return await use(client)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def generate() -> Callable:
    return lambda client: client.generate(REQUEST, 11, "w1", 3)


def test_a_generate_request_has_the_documented_fields():
    bodies = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append((request.method, request.path, await request.json()))
        return web.json_response(answer())

    assert ask(handler, generate()).sample == 5
    method, path, body = bodies[0]
    assert (method, path, body["token_ids"]) == ("POST", "/inference/v1/generate", [1, 2, 3])
    assert {"n": 1, "seed": 11, "max_tokens": 4, "stop_token_ids": [9]}.items() <= body["sampling_params"].items()


def test_greedy_requests_to_servers_with_sampling_masks():
    """Such servers require a temperature and top_k."""
    asked = []

    async def handler(request: web.Request) -> web.Response:
        params = (await request.json())["sampling_params"]
        asked.append((params["temperature"], params["top_k"]))
        return web.json_response({"choices": [choice() | {"sampling_mask": [[4], [9]]}]})

    greedy = replace(REQUEST, params=replace(PARAMS, temperature=0.0))
    for settings in (replace(SETTINGS, sampling_mask=True), SETTINGS):
        for request in (greedy, MASKED):
            sample = ask(handler, lambda client, r=request: client.generate(r, 11, "w1", 3), settings=settings)
            assert (sample.sampling_mask is not None) == (request is MASKED)
    assert asked == [(1.0, 1), (1.0, 3), (0.0, -1), (1.0, 3)]


def test_a_continued_response_is_asked_for_and_returned_whole():
    so_far = Sample.of(REQUEST.uid, REQUEST.sample, [5], [-0.5], "partial", 2)
    request, bodies = replace(REQUEST, response=so_far), []

    async def handler(asked: web.Request) -> web.Response:
        bodies.append(await asked.json())
        return web.json_response(answer())

    whole, new = (ask(handler, lambda client, r=r: client.generate(r, 11, "w1", 3)) for r in (request, REQUEST))
    assert bodies[0]["token_ids"] == [*REQUEST.token_ids, 5]
    assert bodies[0]["sampling_params"]["max_tokens"] == 3
    assert whole.token_ids.tolist() == [5, *new.token_ids.tolist()]
    assert whole.log_probs.tolist() == [-0.5, *new.log_probs.tolist()]
    assert whole.versions == ((2, 1), (3, 1 + len(new)))
    seeds = [request_seed(1, 2, r) for r in (REQUEST, request)]
    assert len(set(seeds)) == 2


def test_health_weight_label_and_version_are_read():
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"/health": {}, "/weight_info": {"weight_version": "w5"}}.get(request.path, {}))

    assert ask(handler, lambda client: client.weight_label()) == "w5"
    with pytest.raises(ServerFailure, match="version is missing"):
        ask(handler, lambda client: client.version())


METRICS = """# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
vllm:prompt_tokens_total{engine="0",model_name="policy"} 80.0
vllm:generation_tokens_total{engine="0",model_name="policy"} 1.5e+02
vllm:generation_tokens_total{engine="1",model_name="policy"} 7.0
vllm:generation_tokens_created{engine="0",model_name="policy"} 1.7e+09
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_running{engine="1",model_name="policy"} 4.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0
"""


def test_the_load_is_summed_over_prompts_responses_and_engines():
    async def handler(request: web.Request) -> web.Response:
        assert request.path == "/metrics"
        return web.Response(text=METRICS)

    assert ask(handler, lambda client: client.load()) == ServerLoad(237.0, 7, 2)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("vllm:num_requests_running 3.0\n", UserError, "without --disable-log-stats"),
        ("vllm:generation_tokens_total{} many\n", ServerFailure, "/metrics: could not convert"),
        ("vllm:generation_tokens_total{} 1\nvllm:num_requests_running{} NaN\n", ServerFailure, "/metrics: a count"),
    ],
)
def test_a_server_without_token_counts_is_an_error(text, error, words):
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=text)

    with pytest.raises(error, match=words):
        ask(handler, lambda client: client.load())


def test_the_length_of_a_server_is_that_of_its_model():
    answers = iter([{"data": [{"max_model_len": 64}, {"max_model_len": None}]}, {"data": []}, {"data": [7]}, {}])

    async def handler(request: web.Request) -> web.Response:
        assert request.path == "/v1/models"
        return web.json_response(next(answers))

    assert ask(handler, lambda client: client.max_model_len()) == 64
    for _ in range(3):
        with pytest.raises(ServerFailure, match="max_model_len is missing"):
            ask(handler, lambda client: client.max_model_len())


def test_the_secret_is_shown_on_every_route_and_taken_nowhere_else():
    asked, elsewhere = [], []

    async def handler(request: web.Request) -> web.Response:
        if request.path == "/elsewhere":
            elsewhere.append(request.headers.get("Authorization"))
        asked.append((request.path, request.headers.get("Authorization")))
        return web.Response(status=307, headers={"Location": "/elsewhere"})

    calls: list[Callable] = [generate()]
    calls += [lambda c: c.weight_label(), lambda c: c.version(), lambda c: c.load()]
    for call in calls:
        with pytest.raises(ServerFailure, match="HTTP 307"):
            ask(handler, call)
    assert {path for path, _ in asked} == {"/inference/v1/generate", "/health", "/version", "/metrics"}
    assert {shown for _, shown in asked} == {"Bearer of-this-run-alone"}
    assert not elsewhere


@pytest.mark.parametrize("asks", [True, False])
def test_requires_secret_reports_whether_the_server_checks_the_secret(asks):
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=401 if asks and "Authorization" not in request.headers else 200)

    assert ask(handler, lambda client: client.requires_secret()) is asks


def test_a_wrong_secret_raises_secret_rejected():
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=401, text="no")

    with pytest.raises(SecretRejected, match="/version: HTTP 401: no"):
        ask(handler, lambda client: client.version())


def test_an_error_of_the_server_is_its_failure():
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=503, text="no\nengine")

    with pytest.raises(ServerFailure, match=r"HTTP 503: no engine"):
        ask(handler, generate())


def test_a_dropped_connection_is_a_failure_of_the_server():
    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    with pytest.raises(ServerFailure, match="Server"):
        ask(handler, generate())


def test_a_server_that_hangs_has_a_deadline():
    async def handler(request: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.Response()

    with pytest.raises(ServerFailure, match="no answer in time") as caught:
        ask(handler, lambda client: client.weight_label(), answer_timeout_s=0.1)
    assert caught.value.hung


def test_a_request_that_vllm_refuses_is_the_users_mistake():
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "bad grammar", "code": 400}}, status=400)

    with pytest.raises(UserError, match=r"bad grammar.*rollout\.structured_outputs"):
        ask(handler, generate())


def test_any_other_bad_request_is_a_failure_of_the_server():
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=400, text="<html>")

    with pytest.raises(ServerFailure, match="HTTP 400"):
        ask(handler, generate())
