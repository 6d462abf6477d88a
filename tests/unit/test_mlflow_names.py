"""Names, parameters and addresses for MLflow, within its limits; needs no package of MLflow."""

import pytest

from rlhf.config import MlflowConfig
from rlhf.errors import UserError
from rlhf.tracking.mlflow_run import LONGEST_NAME, LONGEST_VALUE, check_server, metric_name, params_of


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("actor/pg_loss", "actor/pg_loss"),
        ("val-core/openai/gsm8k/acc/mean@4", "val-core/openai/gsm8k/acc/mean_at_4"),
        ("val-core//tmp/rows.jsonl/acc/mean@1", "val-core/tmp/rows.jsonl/acc/mean_at_1"),
        ("val-aux/../x/./reward", "val-aux/_/x/_/reward"),
        ("reward/größe (%)", "reward/gr__e ____3ce2c229"),
        ("/", "_"),
    ],
)
def test_every_metric_has_a_name_that_the_server_takes(name: str, allowed: str) -> None:
    assert metric_name(name) == allowed


def test_long_names_stay_different() -> None:
    first, second = metric_name("a" * 300 + "1"), metric_name("a" * 300 + "2")
    assert first != second
    assert len(first) == len(second) == LONGEST_NAME


def test_names_in_another_script_stay_different() -> None:
    """The second one's values were dropped."""
    assert metric_name("val-core/数学/acc/mean@1") != metric_name("val-core/代码/acc/mean@1")


def test_settings_are_parameters_with_dotted_names() -> None:
    settings = {"actor": {"optim": {"lr": 1e-6}, "none": None}, "empty": {}, "files": ["a"], "long": "x" * 9000}
    params = dict(params_of(settings))
    assert params.pop("long") == "x" * (LONGEST_VALUE - 3) + "..."
    assert params == {"actor.optim.lr": "1e-06", "actor.none": "null", "empty": "{}", "files": '["a"]'}


def test_a_server_must_be_named() -> None:
    with pytest.raises(UserError, match=r"Set tracking\.mlflow\.tracking_uri=http://HOST:PORT, or MLFLOW_TRACKING_URI"):
        check_server(MlflowConfig(), {})
    for config, variables in (
        (MlflowConfig("sqlite:///a.db"), {}),
        (MlflowConfig(), {"MLFLOW_TRACKING_URI": "./runs"}),
    ):
        with pytest.raises(UserError, match="must be the address of an MLflow server"):
            check_server(config, variables)
    check_server(MlflowConfig("https://mlflow.example.org"), {})
    check_server(MlflowConfig(), {"MLFLOW_TRACKING_URI": "http://127.0.0.1:5000"})
