"""Shapes of the models that a run loads, from their files or, for the command, from config.json alone."""

from rlhf.config import Config
from rlhf.config.rules.algorithm_rules import needs_critic
from rlhf.planning.memory_plan import Models
from rlhf.planning.model_shapes import ModelShapes, of_files


def models_of(config: Config, *, from_config: bool) -> Models | None:
    """The models of a run with these settings.

    Args:
        from_config: build on the meta device, which imports torch, where the files do not say. Otherwise such a model
            makes the answer None.

    Raises:
        UserError: with `from_config`, for a model that is not there.
    """

    def find(setting: str, path: str, revision: str | None, *, classifier: bool = False) -> ModelShapes | None:
        found = of_files(path, revision)
        if found is None and from_config:
            from rlhf.planning.meta_shapes import of_config

            found = of_config(setting, path, revision, classifier=classifier)
        return found

    policy = find("model.path", config.model.path, config.model.revision)
    critic = reward_model = None
    if needs_critic(config):
        own = config.critic.path
        start = policy if own is None else find("critic.path", own, None)
        critic = None if start is None else start.valued()
    path, revision = config.reward_model.path, config.reward_model.revision
    if path is not None:
        reward_model = find("reward_model.path", path, revision, classifier=True)
    lacking = (needs_critic(config) and critic is None) or (path is not None and reward_model is None)
    return None if policy is None or lacking else Models(policy, critic, reward_model)
