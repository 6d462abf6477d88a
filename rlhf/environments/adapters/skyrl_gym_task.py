"""Runs environments of the package `skyrl_gym`: `env=skyrl_gym env.kwargs.id=gsm8k_multi_turn`.

A row has the columns that SkyRL's data have. Without a column `reward_spec`, the adapter makes one from the row's
reference answer. A resume repeats the calls (docs/environments.md).
"""

from typing import Any

from rlhf.environments import free_text
from rlhf.environments.adapters import check_id, need_package
from rlhf.environments.class_arguments import KWARGS
from rlhf.errors import UserError

Messages = list[dict[str, str]]


class SkyRLGym:
    """An environment that derives from `BaseTextEnv`. The reward of an episode is the sum of its turns' rewards."""

    def __init__(self, id: str, config: dict[str, Any] | None = None) -> None:
        """`config`: the environment's own settings, such as `search_url` of the environment `search`."""
        self._id, self._config = id, config or {}

    @classmethod
    def _preflight(cls, id: str, config: dict[str, Any] | None = None) -> None:
        """Import the environment's class before the processes of episodes are forked."""
        need_package(cls.__name__, "skyrl-gym", "skyrl-gym")
        from skyrl_gym.envs.registration import load_env_creator, registry

        check_id("skyrl_gym", id, registry)
        try:
            load_env_creator(registry[id].entry_point)
        except ImportError as error:
            raise UserError(f"{KWARGS}.id={id}: {error}. Install the packages that this environment needs.") from error

    def reset(self, prompt: str | Messages, ground_truth: object = None, **row: object) -> str | None:
        import skyrl_gym
        from omegaconf import OmegaConf

        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        defaults = {"reward_spec": {"method": "rule", "ground_truth": ground_truth}, "extra_info": {}}
        config = OmegaConf.create(self._config)
        self._task = skyrl_gym.make(self._id, env_config=config, extras=defaults | row)
        begun, _ = self._task.init([dict(message) for message in messages])
        return _added(messages, begun)

    @free_text
    def step(self, text: str) -> tuple[str | None, float]:
        made = self._task.step(text)
        if made.get("postprocessed_action") not in (None, text):
            raise RuntimeError(
                "the environment rewrites the policy's text (postprocessed_action), but the run trains on the "
                "sampled text"
            )
        answer = None if made["done"] else "\n".join(message["content"] for message in made["observations"])
        return answer, float(made["reward"])

    def close(self) -> None:
        if hasattr(self, "_task"):
            self._task.close()


def _added(prompt: Messages, begun: Messages) -> str | None:
    """Return the text that the environment appends to the prompt's last message; None if it appends nothing."""
    if begun == prompt:
        return None
    last, now = prompt[-1], begun[-1]
    added = now["content"].removeprefix(last["content"])
    if begun[:-1] != prompt[:-1] or {**last, "content": last["content"] + added} != now or last["role"] != "user":
        raise RuntimeError("the environment rewrites the prompt; it may only append to the last user message")
    return added
