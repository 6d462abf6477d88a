"""Starts runs from Python, `rlhf.train(overrides, reward=score, callbacks=[...])`, and for the command line."""

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from rlhf.compose import compose_config
from rlhf.config import Config
from rlhf.config.library import Library
from rlhf.config.redaction import Redaction
from rlhf.config.rules.path_rules import on_one_machine
from rlhf.config.rules.validate import validate
from rlhf.config.schema.reward import REWARD_MODEL, VERIFIERS
from rlhf.config.secrets import export
from rlhf.config.user_functions import CUSTOM_CLS, file_being_loaded, find_definition
from rlhf.errors import EXIT_DONE, RunEnded, UserError
from rlhf.launch.banner import banner
from rlhf.launch.callbacks import Callback, Callbacks, load_callbacks
from rlhf.planning.check import check_engine, check_fits
from rlhf.planning.device_defaults import Machine
from rlhf.planning.devices import count_gpus, lacks_gpu
from rlhf.printable import printable_output
from rlhf.ranks.logs import restored_logging
from rlhf.ranks.next_start import changes_to_continue
from rlhf.ranks.open_files import raise_open_files


def train(
    overrides: Sequence[str] = (),
    *,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    callbacks: Sequence[Callback] = (),
    config_dir: str | Path | None = None,
) -> dict[str, Any]:
    """Train to the end of the run, as `python -m rlhf.train OVERRIDES` does. An interrupted run continues.

    Args:
        overrides: settings, `KEY=VALUE` each, as on the command line.
        reward: one or several functions for `reward.functions`. Define them at the top level of a file, because reward
            processes import them from there. A script that defines a reward must call `train` under
            `if __name__ == "__main__":`.
        callbacks: called in this process with each step, in order, after the step's record is on disk. Step 0 is the
            evaluation before the training. If a crash or a rollback repeats steps, callbacks receive these steps
            again. If a callback raises, the run saves and stops as on SIGTERM, and `train` raises the callback's error.
        config_dir: a folder with more recipes and group entries (`--config-dir`).

    Returns:
        The content of `report/report.json` of the finished run, even if a full disk has left no room for the file.

    Raises:
        UserError: a mistake in the settings, the data or the files, found before the training began.
        RunEnded: the run ended with another exit code than 0.
        BaseException: the error of a callback, after the run has saved and stopped.
    """
    if (path := file_being_loaded()) is not None:
        raise UserError(
            f"{path} calls rlhf.train while the trainer loads a function from this file. Put the call under "
            'if __name__ == "__main__":'
        )
    _check_arguments(overrides, reward, callbacks)
    if is_rank():
        raise UserError(
            "rlhf.train() does not work under torchrun. Start the command instead: "
            "torchrun ... -m rlhf.train KEY=VALUE."
        )
    raise_open_files()
    library = Library.find(None if config_dir is None else Path(config_dir))
    functions = [] if reward is None else list(reward) if isinstance(reward, Sequence) else [reward]
    config = validated(overrides, library, [file_and_name(function) for function in functions])
    with restored_logging():
        code = start(config, library.recipes(overrides), callbacks)
    if code != EXIT_DONE:
        raise RunEnded(code, config.run_dir, changes_to_continue(config.trainer))
    from rlhf.tracking.report import summarize

    # Do not read the report's file: on a full disk it is missing, or from an earlier, shorter run.
    return summarize(config.run_dir)


def _check_arguments(overrides: object, reward: object, callbacks: object) -> None:
    if isinstance(overrides, str):
        raise UserError(f"overrides={overrides!r}: a string. Give a list with one 'KEY=VALUE' per setting.")
    if not isinstance(overrides, (list, tuple)) or not all(isinstance(text, str) for text in overrides):
        raise UserError(
            f"overrides={overrides!r}: not a list of strings. Give a list with one 'KEY=VALUE' per setting."
        )
    rewards = reward if isinstance(reward, (list, tuple)) else [reward]
    if any(isinstance(one, str) for one in rewards):
        raise UserError(f"reward={reward!r}: a string, not a function. Give {_override_of(rewards)} the overrides.")
    if reward is not None and isinstance(reward, Sequence) and not reward:
        raise UserError("reward=[]: has no function. Give functions, or leave reward out for the recipe's reward.")
    if not isinstance(callbacks, (list, tuple)) or not all(map(callable, callbacks)):
        raise UserError(f"callbacks={callbacks!r}: not a list of functions. Give callbacks=[FUNCTION].")


def _override_of(rewards: Sequence[object]) -> str:
    """Return what to give instead of strings, as part of an error's remedy. Named verifiers belong to the overrides."""
    named = [one for one in rewards if one in (*VERIFIERS, REWARD_MODEL)]
    if len(named) < len(rewards):
        return "the function itself, or reward.functions=[FILE.py:NAME] among"
    return f"reward={named[0]} among" if len(named) == 1 else f"reward.functions=[{','.join(map(str, named))}] among"


def validated(
    overrides: Sequence[str],
    library: Library,
    reward_functions: Sequence[str] = (),
    machine: Machine | None = None,
) -> Config:
    """Return the checked configuration. Raise UserError for all mistakes.

    `reward_functions`, if any, replace `reward.functions`. Device defaults are for `machine`, or for this machine if
    `machine` is None.
    """
    config = compose_config(list(overrides), library, machine)
    if reward_functions:
        config.reward.functions = list(reward_functions)
    validate(config)
    return config


def is_rank() -> bool:
    """Return whether torchrun or a similar launcher started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start(config: Config, recipes: Sequence[str], callbacks: Sequence[Callback] = ()) -> int:
    """Supervise the run, start it on Ray, or run one rank under another launcher. Return an exit code of `rlhf.errors`.

    The supervisor calls `callbacks` after the functions of `trainer.callbacks`.

    Raises:
        UserError: a mistake, found before the training began.
        BaseException: the error of a callback, after the run has saved and ended.
    """
    export(config)
    if is_rank():
        reject_callbacks(config)
        text = banner(config, recipes) if os.environ["RANK"] == "0" else ""
        if text:
            sys.stderr.write(f"{Redaction(os.environ)(printable_output(text))}\n")
        check_inputs(config)
        from rlhf.worker import main_under_torchrun

        return main_under_torchrun(config, text)
    if config.launcher.name == "ray":
        if callbacks:
            raise UserError("callbacks: they run in the supervisor, which launcher=ray replaces. Give callbacks=[].")
        check_files(config)
        from rlhf.launch.ray.driver import run_on_ray

        return run_on_ray(config, recipes)
    if config.trainer.nnodes > 1:
        raise UserError(
            f"trainer.nnodes={config.trainer.nnodes}: this command starts the ranks of one machine only. Set "
            "launcher=ray, give the same settings to python -m rlhf.launch.slurm or rlhf.launch.kubernetes, or start "
            "torchrun on each machine."
        )
    from rlhf.launch.supervisor import supervise

    watching = Callbacks([*load_callbacks(config.trainer), *callbacks])
    code = supervise(config, lambda: check_inputs(config), banner(config, recipes), watching)
    if watching.error is not None:
        raise watching.error
    return code


def reject_callbacks(config: Config) -> None:
    """Raise UserError for callbacks in a run whose ranks have no supervisor."""
    if config.trainer.callbacks:
        raise UserError(
            f"trainer.callbacks={config.trainer.callbacks}: callbacks run in the supervisor, which torchrun and other "
            "launchers of several machines replace. Set trainer.callbacks=[], or follow metrics.jsonl in the run "
            "directory."
        )


def evaluate_policy(config: Config, title: str) -> int:
    """Evaluate the policy of `config` under a supervisor, or as one rank under torchrun. Return an exit code."""
    export(config)
    if is_rank():
        check_inputs(config, trains=False)
        from rlhf.worker import main_under_torchrun

        return main_under_torchrun(config, title, evaluates=True)
    from rlhf.launch.supervisor import supervise

    return supervise(config, lambda: check_inputs(config, trains=False), title, evaluates=True)


def check_inputs(config: Config, *, trains: bool = True) -> None:
    """Raise UserError for mistakes whose checks need slow imports. Call this after all quick checks.

    With `trains=False`, do not check the memory plan, only whether vLLM can split the policy over an engine's GPUs.
    """
    from rlhf.models.config_check import check_flash_attention

    if config.trainer.device == "cuda" and lacks_gpu():
        raise UserError(
            "trainer.device=cuda, but this machine has no GPU, or no driver for it. Set trainer.device=cpu."
        )
    if (attention := config.model.attn_implementation) == "flash_attention_2":
        cuda = config.trainer.device == "cuda" or (config.trainer.device == "auto" and count_gpus() > 0)
        check_flash_attention(attention, cuda, config.backend.autocast)
    (check_fits if trains else check_engine)(config)
    check_files(config)


def check_files(config: Config) -> None:
    """Raise UserError for mistakes in models, data, rewards and trackers. The checks do not depend on the devices."""
    from rlhf.data import check_sources
    from rlhf.data.turns.chat_turns import env_template
    from rlhf.environments.class_checks import check_environments, preflight_environments
    from rlhf.launch.preflight_import import preflight_import
    from rlhf.models.template_check import check_rendering
    from rlhf.reward import check_reward
    from rlhf.reward.preflight_start import preflight_start
    from rlhf.tracking import check_trackers
    from rlhf.tracking.alerts import check_alerts

    check_trackers(config.trainer.logger, config.tracking)
    if os.environ.get("RANK", "0") == "0":  # only this process sends alerts
        check_alerts(config.tracking.alerts)
    check_reward(config.reward, config.reward_model, without_functions=config.env.used)
    check_environments(config.env)
    if config.env.used and config.env.template is not None:
        env_template(config.env.template)
    # Under torchrun, only one rank of each node imports the files.
    leads = os.environ.get("LOCAL_RANK", "0") == "0"
    with (
        preflight_import(_files_of_ranks(config) if leads else []),
        preflight_start(config.reward if leads else None),
        preflight_environments(config.env if leads else None),
    ):
        if on_one_machine():  # on several machines, the ranks check which machine has the files
            _check_models(config)
        row = check_sources(config.data, config.reward, config.trainer.seed, config.env)
        if row is not None and on_one_machine():
            variables = config.data.apply_chat_template_kwargs
            check_rendering(config.model.path, config.model.chat_template, row.where, row.messages, variables)


def _check_models(config: Config) -> None:
    from rlhf.models.adapter_folder import check_adapter_folder
    from rlhf.models.config_check import check_critic, check_policy, check_reward_model
    from rlhf.models.folder_check import check_folder
    from rlhf.models.hub_names import check_name
    from rlhf.models.template_check import check_template
    from rlhf.planning.adapter_check import check_adapters
    from rlhf.planning.model_shapes import shapes_from_files
    from rlhf.storage.layout import scan

    # A resumed run loads weights and adapters from a checkpoint (its own or an imported one), not from these folders.
    begins = config.trainer.resume_mode != "resume_path" and not scan(config.run_dir) and not config.checkpoint.remote
    trusts = config.model.trust_remote_code
    check_name("model.path", config.model.path, config.model.revision)
    check_folder("model.path", config.model.path, weights=begins)
    check_policy(config.model.path, trusts, config.data.max_prompt_length, config.data.max_response_length)
    check_template(config.model.path, config.model.chat_template)
    check_adapter_folder(config.model.lora, config.model.path, needed=begins)
    if (shapes := shapes_from_files(config.model.path, config.model.revision)) is not None:
        check_adapters(config.model, shapes)
    if config.critic.path is not None:
        check_name("critic.path", config.critic.path, None)
        check_folder("critic.path", config.critic.path, tokenizer=False, weights=begins)
        check_critic(config.critic.path, trusts)
    if config.reward_model.path is not None:
        check_name("reward_model.path", config.reward_model.path, config.reward_model.revision)
        check_folder("reward_model.path", config.reward_model.path)
        check_reward_model(config.reward_model.path, trusts)


def _files_of_ranks(config: Config) -> list[tuple[str, str]]:
    """Return each setting, with its value, that names a user's file for the ranks to import."""
    named = {
        CUSTOM_CLS: config.data.custom_cls.spec,
        "algorithm.adv_estimator": config.algorithm.adv_estimator,
        "actor.policy_loss.loss_mode": config.actor.policy_loss.loss_mode,
    }
    return [(setting, spec) for setting, spec in named.items() if spec is not None and ".py:" in spec]


def file_and_name(function: Callable[..., Any]) -> str:
    """Return `path/to/file.py:name` of a function. Raise UserError if the function is not at a file's top level."""
    name = getattr(function, "__qualname__", repr(function))
    if not isinstance(function, FunctionType):
        raise UserError(f"reward={name}: of type {type(function).__name__}, not a plain function. Write one with def.")
    path = inspect.getsourcefile(function)
    if path is None or not Path(path).is_file():
        raise UserError(
            f"reward={name}: defined at a prompt or in a notebook, where the reward processes cannot find it. Write it "
            "into a file (in a notebook, a cell that begins with %%writefile rewards.py), and import it from there."
        )
    if not name.isidentifier():
        raise UserError(
            f"reward={name}: a lambda, a method or a function inside another, which the reward processes cannot find "
            f"in {path}. Define it with def at the top level of the file."
        )
    spec = f"{Path(path).absolute()}:{name}"
    find_definition("reward", spec)
    return spec
