"""Secrets in settings: their values are never stored, shown or compared."""

import json
from typing import Any

import pytest
import yaml

from rlhf.checkpoint.commit.identity import Identity
from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.checkpoint.load.compatibility import check_compatible
from rlhf.compose import compose_config
from rlhf.config import Config
from rlhf.config.compare import ResolvedConfig, compare_text, not_compared, trajectory
from rlhf.config.library import Library
from rlhf.config.overrides import hydra_value, publishable
from rlhf.config.redaction import Redaction
from rlhf.config.resolved import from_yaml, to_yaml
from rlhf.config.rules.validate import validate
from rlhf.config.secrets import export, masked
from rlhf.errors import UserError
from rlhf.evaluate.results import RESULT, stored_result
from rlhf.evaluate.target_settings import PlannedEvaluation
from rlhf.evaluate.targets import EvaluationTarget
from tests.support.published import publish
from tests.support.refusals import says

LITERALS = ("typed-by-hand", "of-the-query", "of-a-list", "of-a-user", "of-a-login", "hf_abcdefghijklmnopqrstuvwx")
VARIABLES = {"JUDGE": "of-the-judge", "ADDRESS": "http://judge/v1?token=of-the-address", "MY_TOKEN": "of-a-name"}
KWARGS = (
    "reward.kwargs={api_key: typed-by-hand, judge: '${oc.env:JUDGE}', address: '${oc.env:ADDRESS}', margin: 0.5,"
    " url: 'http://a/b?token=of-the-query', note: hf_abcdefghijklmnopqrstuvwx, secret: [of-a-list, {user: of-a-user}],"
    " name: plain}"
)
SETTINGS = (
    KWARGS,
    "checkpoint.remote='file:///tmp/copies?key=of-the-query&also=${oc.env:JUDGE}'",
    "rollout.servers.urls=['http://me:of-a-login@host:1']",
    "tracking.wandb.entity=${oc.env:MY_TOKEN}",
    "trainer.experiment_name=${oc.env:NAME}",
)


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (VARIABLES | {"NAME": "mine"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.environ", dict(__import__("os").environ))


def composed(*more: str) -> Config:
    return compose_config(["trainer.total_training_steps=3", *more], Library.find(None))


def plain(config: Config) -> Any:
    return json.loads(json.dumps([config.reward.kwargs, config.checkpoint.remote, config.rollout.servers.urls]))


def assert_without_secrets(text: str) -> None:
    for secret in (*LITERALS, *VARIABLES.values()):
        assert secret not in text


def test_a_stored_configuration_has_no_secret_and_restores_all():
    config = composed(*SETTINGS)
    text = to_yaml(config)
    assert_without_secrets(text)
    says(text, "experiment_name: mine", "judge: ${oc.env:JUDGE}", "margin: 0.5", "remote: file:///tmp/copies?")
    export(config)
    restored = from_yaml(text)
    assert restored == config
    assert plain(restored) == plain(config)
    assert plain(restored)[0]["api_key"] == "typed-by-hand"
    assert to_yaml(restored) == text


def test_trackers_and_messages_get_no_secret():
    config = composed(*SETTINGS)
    shown = masked(config)
    assert_without_secrets(json.dumps(shown))
    assert shown["reward"]["kwargs"]["name"] == "plain"
    assert shown["data"]["prompt_key"] == config.data.prompt_key
    (change,) = compare_text(to_yaml(composed()), config).trajectory
    assert_without_secrets(str(change))
    assert_without_secrets(repr(config))
    assert_without_secrets(json.dumps(trajectory(config)))


@pytest.mark.parametrize("name", [*VARIABLES, "typed", "absent"])
def test_another_secret_is_no_changed_setting(name, monkeypatch):
    stored, before = to_yaml(composed(*SETTINGS)), trajectory(composed(*SETTINGS))
    settings = SETTINGS
    if name == "typed":
        settings = tuple(text.replace("typed-by-hand", "new").replace("of-the-query", "new") for text in SETTINGS)
    elif name in VARIABLES:
        monkeypatch.setenv(name, f"{VARIABLES[name]}-new")
    present = composed(*settings)
    if name == "absent":  # the stored settings need no variable
        for variable in VARIABLES:
            monkeypatch.delenv(variable)
    diff = compare_text(stored, present)
    assert (diff.harmless, diff.trajectory) == ([], [])
    assert trajectory(present) == before
    assert ResolvedConfig.of(present).text == stored


@pytest.mark.parametrize("change", ["margin: 0.5,margin: 0.6", "name: plain,name: other", "${oc.env:JUDGE},other"])
def test_another_value_is_a_changed_setting(change):
    old, new = change.split(",")
    diff = compare_text(to_yaml(composed(KWARGS)), composed(KWARGS.replace(old, new)))
    assert [each.key for each in diff.trajectory] == ["reward.kwargs"]


def test_a_checkpoint_with_resolved_secrets_is_equal():
    """Release 0.1.0 stored secrets in this form."""
    config = composed(KWARGS)
    stored = yaml.safe_load(to_yaml(config))
    stored["reward"]["kwargs"] = plain(config)[0]
    assert stored["reward"]["kwargs"]["judge"] == "of-the-judge"
    assert compare_text(yaml.safe_dump(stored), config).trajectory == []


def test_a_missing_variable_is_an_error_of_the_command(monkeypatch):
    monkeypatch.delenv("JUDGE")
    with pytest.raises(UserError) as raised:
        composed(KWARGS)
    says(raised.value, "reward.kwargs.judge", "JUDGE")


@pytest.mark.parametrize("text", ["a ${b} c", r"a \${b}", "$", "${"])
def test_a_text_that_looks_like_an_interpolation_is_restored(text):
    config = composed()
    config.data.system_prompt = text
    restored = from_yaml(to_yaml(config))
    assert restored.data.system_prompt == text
    assert compare_text(to_yaml(config), config).trajectory == []


def test_queries_of_addresses_are_redacted():
    found = Redaction()("copied to s3://bucket/folder?key=abc&b=c (http://host/?token=1), why?")
    assert found == "copied to s3://bucket/folder?REDACTED (http://host/?REDACTED), why?"


@pytest.mark.parametrize(
    "token",
    [
        "sk-proj-abcdefgh_ijklmnop-12",
        "sk-ant-api03-ab_c-defghi",
        "github_pat_11ABCDEFG0_abcdefghi",
        "glpat-abcd_12345678901",
        "AIzaSyA_1234567890abcdef",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl-_x",
    ],
)
def test_whole_tokens_are_redacted(token):
    assert (
        Redaction()(f"failed with {token}, hf_model_with_a_long_name")
        == "failed with REDACTED, hf_model_with_a_long_name"
    )


@pytest.mark.parametrize(
    "text", ["ssh://git@github.com/x", "hdfs://me@host/x", "abfs://data@account/x", '{"a":"s3://b","to":"c@d"}']
)
def test_names_before_an_at_sign_that_are_no_secrets_stay(text):
    assert Redaction()(text) == text


def test_slacks_webhooks_are_redacted():
    found = Redaction()("at https://hooks.slack.com/services/T0123/B0123/abcDEF: 404")
    assert found == "at https://hooks.slack.com/services/REDACTED: 404"


def test_whole_logins_are_redacted():
    found = Redaction()("of http://abc@host/x, http://me:p@ss@host:1 and http://host?to=a@b, by me@host")
    assert found == "of http://REDACTED@host/x, http://REDACTED@host:1 and http://host?REDACTED, by me@host"


@pytest.mark.parametrize(
    "kwargs",
    [
        "{headers: {Authorization: 'Bearer typed-by-hand'}}",
        "{apikey: typed-by-hand}",
        "{accessToken: typed-by-hand}",
        "{api_keys: [typed-by-hand]}",
        "{command: 'curl http://host/v1?token=typed-by-hand -s'}",
        "{nested: {list_of_tokens: [typed-by-hand, typed-by-hand]}}",
        "{DB_PASSWORD_1: typed-by-hand, openai_api_key_2: typed-by-hand, token3: typed-by-hand}",
        "{note: 'Bearer typed-by-hand ${oc.env:JUDGE}', default: '${oc.env:ABSENT,hf_abcdefghijklmnopqrstuvwx}'}",
        "{pwd: typed-by-hand, db-pwd-2: typed-by-hand}",
        "{hdrs: ['Authorization: Bearer typed-by-hand', 'Authorization: Basic typed-by-hand']}",
        "{hdrs: ['X-Api-Key: typed-by-hand', 'Cookie: typed-by-hand'], note: 'use Bearer typed-by-hand'}",
        "{arguments: [--api-key, typed-by-hand, '--token=typed-by-hand', --apiKey, typed-by-hand]}",
        "{url: 'https://typed-by-hand@host/x', urls: ['see https://typed-by-hand@host:1 first']}",
        "{url: 'https://me:typed-by-hand@${oc.env:NAME}/x', other: 'https://typed-by-hand@${oc.env:NAME}/x'}",
        "{openaiApiKey: typed-by-hand, clientSecret: typed-by-hand, HTTPAuthToken: typed-by-hand, jwt: typed-by-hand}",
        "{auth_header: typed-by-hand, db_creds: typed-by-hand, cred: typed-by-hand, db-pw: typed-by-hand}",
        "{dsn: 'host=h password=typed-by-hand user=u', url: 'https://host/x#access_token=typed-by-hand'}",
    ],
)
def test_other_names_and_forms_of_secrets(kwargs):
    config = composed(f"reward.kwargs={kwargs}")
    assert "typed-by-hand" in str(plain(config))
    assert_without_secrets(to_yaml(config))
    assert_without_secrets(json.dumps(masked(config)))
    export(config)
    assert from_yaml(to_yaml(config)) == config


@pytest.mark.parametrize(
    "setting",
    [
        "tracking.mlflow.tracking_uri=https://typed-by-hand@host/x",
        "tracking.mlflow.tracking_uri='https://typed-by-hand@${trainer.project_name}/x'",
        "tracking.mlflow.tracking_uri='https://me:typed-by-hand@${oc.env:NAME}/x'",
        "rollout.servers.urls=['http://typed-by-hand@host:1']",
    ],
)
def test_a_login_without_a_password_is_a_secret(setting):
    """A token as the whole login, as in `https://TOKEN@host`, was stored in each checkpoint."""
    config = composed(setting)
    assert_without_secrets(to_yaml(config))
    assert_without_secrets(json.dumps(masked(config)))
    export(config)
    assert from_yaml(to_yaml(config)) == config


def test_logins_from_variables_stay_interpolations():
    url = "http://me:${oc.env:MY_TOKEN}@host/x"
    config = composed(f"tracking.mlflow.tracking_uri='{url}'")
    assert yaml.safe_load(to_yaml(config))["tracking"]["mlflow"]["tracking_uri"] == url


def test_names_that_only_resemble_secrets_are_stored_and_compared():
    names = ("tokenizer", "maxTokens", "token_level", "keyboard", "authors", "passed", "patience", "pattern")
    names += ("monkey", "keyword", "secretary", "power", "tokenType", "credit", "header")
    kwargs = dict.fromkeys(names, "64") | {"answerKey": "final", "mail": "me@example.org", "path": "hdfs://me@host/x"}
    config = composed(f"reward.kwargs={hydra_value(kwargs)}")
    assert masked(config)["reward"]["kwargs"] == kwargs
    assert yaml.safe_load(to_yaml(config))["reward"]["kwargs"] == kwargs


def test_the_command_of_an_alert_keeps_its_secrets():
    command = "[curl,-H,'Authorization: Bearer typed-by-hand',--oauth2-bearer,typed-by-hand,-s]"
    config = composed(f"tracking.alerts.command={command}")
    assert config.tracking.alerts.command[2] == "Authorization: Bearer typed-by-hand"
    assert_without_secrets(to_yaml(config))
    assert_without_secrets(json.dumps(masked(config)))
    assert masked(config)["tracking"]["alerts"]["command"][::5] == ["curl", "-s"]
    export(config)
    assert from_yaml(to_yaml(config)) == config


def test_numbers_and_other_texts_stay_visible():
    kwargs = {"max_tokens": 512, "stop_tokens": [7, 8], "tokens_1": "64", "options": ["max_tokens=9", "a: b"]}
    config = composed(f"reward.kwargs={hydra_value(kwargs)}")
    assert masked(config)["reward"]["kwargs"] == kwargs
    assert yaml.safe_load(to_yaml(config))["reward"]["kwargs"] == kwargs
    assert publishable(kwargs) == kwargs
    assert publishable({"tokens": ["typed-by-hand"], "pwd": "typed-by-hand"}) == {
        "tokens": "REDACTED",
        "pwd": "REDACTED",
    }
    assert publishable({"password": 1234, "max_tokens": None}) == {"password": "REDACTED", "max_tokens": None}


@pytest.mark.parametrize(
    "pair",
    [
        ("{answer_key: final}", "{answer_key: boxed}"),
        ("{label_keys: [extra_info.answer, b_2]}", "{label_keys: [extra_info.answer, b_3]}"),
        ("{key: groundTruth}", "{key: ground_truth}"),
        ("{options: [--text-key, final, 'text_key=final']}", "{options: [--text-key, boxed, 'text_key=final']}"),
        ("{stop_token: '</think>', pad-tokens: ['[PAD]']}", "{stop_token: '<|im_end|>', pad-tokens: ['[PAD]']}"),
    ],
)
def test_columns_and_special_tokens_are_stored_and_compared(pair):
    """A resume accepted another `answer_key` without a message, because this name counted as a secret's."""
    first, second = (composed(f"reward.kwargs={kwargs}") for kwargs in pair)
    assert [each.key for each in compare_text(to_yaml(first), second).trajectory] == ["reward.kwargs"]
    assert publishable(first.reward.kwargs) == first.reward.kwargs == masked(first)["reward"]["kwargs"]
    assert from_yaml(to_yaml(first)) == first


def test_the_value_of_a_variable_does_not_decide_what_is_compared(monkeypatch):
    monkeypatch.setenv("COUNT", "64")
    config = composed("reward.kwargs={judge_key: '${oc.env:NAME}', max_tokens: '${oc.env:COUNT}'}")
    assert compare_text(to_yaml(config), config).trajectory == []


@pytest.mark.parametrize(
    "item",
    [
        *(f"{name}: typed" for name in ("api_key", "apiKeys", "x-access-key-2", "SECRET_KEY", "signing_key", "token")),
        *(
            f"judge_key: {value}"
            for value in ("abcdefghijklmnopqrst", "a1b2c3d4", "typed-by-hand", "a_b_c_d_e", "pass word")
        ),
    ],
)
def test_other_keys_stay_secret(item):
    config = composed(f"reward.kwargs={{{item}}}")
    (value,) = config.reward.kwargs.values()
    assert value not in to_yaml(config)
    assert value not in json.dumps(masked(config))
    assert "REDACTED" in str(publishable(config.reward.kwargs))


def test_secrets_that_are_not_compared_are_named(tmp_path, caplog, monkeypatch):
    """A resume, or a stored result, hid another model in the query of a judge's address."""
    assert not_compared(composed(*SETTINGS[1:])) == []
    config = composed(KWARGS)
    names = [f"reward.kwargs.{each}" for each in ("api_key", "judge", "address", "url", "note", "secret.0", "secret.1")]
    assert all(name in ", ".join(not_compared(config)) for name in names)
    path = publish(tmp_path, 2, config=to_yaml(config))
    identity, manifest = Identity.of_run("fsdp2", to_yaml(config), {}, [1]), read_manifest(path)
    with caplog.at_level("INFO", logger="rlhf"):
        check_compatible(
            path, manifest, ResolvedConfig.of(config), identity, ["model"], moving_reference=False, allow_change=False
        )
    says(caplog.text, "cannot be compared", "reward.kwargs.api_key", "reward.kwargs.url")
    caplog.clear()
    monkeypatch.setattr("rlhf.evaluate.results.files_of", lambda planned: {})
    config.trainer.default_local_dir = str(tmp_path)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / RESULT).write_text(json.dumps({"config": to_yaml(config), "files": {}, "result": {"step": 2}}))
    planned = PlannedEvaluation(EvaluationTarget("a"), config, again=False)
    assert stored_result(planned) == {"step": 2}
    says(caplog.text, "stored result of a", "cannot be compared", "reward.kwargs.url")


def test_variables_are_redacted_by_name():
    values = {"API_KEY_2": "of-a-key", "PWD": "/home/someone", "MAX_TOKENS": "123456789", "HF_TOKENS": "of-tokens"}
    found = Redaction(values)("of-a-key of-tokens /home/someone 123456789, Authorization: Bearer X, Bearer Y")
    assert found == "REDACTED REDACTED /home/someone 123456789, REDACTED, REDACTED"


def test_keys_with_similar_names_keep_their_own_secrets():
    config = composed("reward.kwargs={api-key: first, api_key: second, a: {b_key: third}, a_b: {key: fourth}}")
    export(config)
    assert from_yaml(to_yaml(config)) == config


def test_the_message_about_a_setting_without_effect_has_no_secret():
    with pytest.raises(UserError) as raised:
        validate(composed("rollout.engine_kwargs.vllm.hf_token=typed-by-hand"))
    says(raised.value, "rollout.engine_kwargs.vllm={hf_token:REDACTED}", "rollout=vllm")
