"""Rules across the settings of the rollout engines."""

from collections.abc import Iterator

from rlhf.config import Config, RolloutConfig


def rollout_problems(config: Config) -> Iterator[str]:
    """What is wrong with the `rollout` settings and what must fit them."""
    r = config.rollout
    if r.n > 1 and r.temperature == 0:
        yield (
            f"rollout.temperature=0: the {r.n} samples of a prompt (rollout.n) would be equal and teach nothing; "
            "set rollout.temperature=1.0. Evaluation has its own, rollout.val_kwargs.temperature."
        )
    if r.n > 1 and r.top_k == 1:
        yield f"rollout.top_k=1: the {r.n} samples of a prompt (rollout.n) would be equal; set rollout.top_k=-1."
    if "" in r.stop:
        yield f"rollout.stop={r.stop}: an empty stop string would end every sample at once."
    if r.name == "embedded":
        yield from _only_vllm(config)
    if r.async_steps:
        yield from _one_step_ahead(config)


def _only_vllm(config: Config) -> Iterator[str]:
    default = RolloutConfig()
    for key in ("tensor_model_parallel_size", "structured_outputs"):
        value = getattr(config.rollout, key)
        if value != getattr(default, key):
            yield f"rollout.{key}={value}: has effect only with rollout=vllm or rollout=vllm_server (it is {config.rollout.name})."
    if config.rollout.engine_kwargs.vllm:
        yield f"rollout.engine_kwargs.vllm={config.rollout.engine_kwargs.vllm}: has effect only with rollout=vllm or rollout=vllm_server."


def _one_step_ahead(config: Config) -> Iterator[str]:
    ahead, correction = f"rollout.async_steps={config.rollout.async_steps}", config.algorithm.rollout_correction
    if config.rollout.name != "vllm_server":
        yield (
            f"{ahead}: only servers generate while the ranks train; set rollout=vllm_server (it is {config.rollout.name}), "
            "or rollout.async_steps=0."
        )
    if correction.rollout_is is None:
        yield (
            f"algorithm.rollout_correction.rollout_is=null: with {ahead} samples are by an older policy than the one in training; "
            "set algorithm.rollout_correction.rollout_is=token."
        )
    if config.checkpoint.journal:
        yield (
            f"checkpoint.journal=true: the journal does not keep what {ahead} generates ahead, which only checkpoints hold; "
            "set checkpoint.journal=false."
        )
