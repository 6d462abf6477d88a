"""Evaluation of the policy on held-out prompts, on its cadence; the ranks share the prompts."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rlhf.config import TrainerConfig
from rlhf.data import PromptSet
from rlhf.events import announce
from rlhf.experience.metrics import Summary, merge
from rlhf.experience.policy_sampler import PolicySampler
from rlhf.experience.responses import score_responses
from rlhf.experience.shown_samples import shown_answers
from rlhf.experience.timeouts import tell_timeouts
from rlhf.ranks.coordinator import Coordinator
from rlhf.reward import Reward
from rlhf.rollout import Request, SamplingParams
from rlhf.tracking.sample_files import ShownSample


@dataclass
class Evaluator:
    """Scores the policy on the held-out prompts. A response that the first reward gives at least 1 counts as right."""

    prompts: PromptSet | None
    sampler: PolicySampler
    params: SamplingParams
    reward: Reward
    tokenizer: PreTrainedTokenizerBase
    coordinator: Coordinator
    config: TrainerConfig
    show: Callable[[list[ShownSample]], None]
    """Called with all samples of an evaluation on the leader, with none elsewhere."""

    def before_training(self) -> dict[str, float]:
        """The starting policy's figures, when `trainer.val_before_train` asks for them."""
        return self.evaluate(0) if self.config.val_before_train and self.prompts is not None else {}

    def maybe_evaluate(self, step: int, *, last: bool) -> dict[str, float]:
        """The figures after `step` if the cadence says so, or if it is the last one; else nothing."""
        every = self.config.test_freq
        due = self.prompts is not None and every and (last or step % every == 0)
        return self.evaluate(step) if due else {}

    def evaluate(self, step: int) -> dict[str, float]:
        """`val/accuracy` and `val/reward` of the policy after `step` steps. Collective."""
        assert self.prompts is not None
        started = time.monotonic()
        announce("evaluation.before")
        mine = [self.prompts[i] for i in range(self.coordinator.rank, len(self.prompts), self.coordinator.world_size)]
        requests = [Request(prompt.index, prompt.token_ids, self.params) for prompt in mine]
        samples = self.sampler.generate(requests, version=step, step=step)
        self.sampler.rest()
        scored = score_responses(self.reward, self.tokenizer, zip(mine, samples, strict=True))
        tell_timeouts(f"Evaluation after step {step}", self.reward.take_timeouts(), self.coordinator)
        self.show(shown_answers(list(zip(mine, samples, strict=True)), scored, self.tokenizer, self.coordinator))
        results = [result for of_prompt in scored for result in of_prompt]
        seen = {
            "val/accuracy": Summary.of(float(r.correct) for r in results),
            "val/reward": Summary.of(r.score for r in results),
        }
        every = merge(seen, self.coordinator)
        announce("evaluation.after")
        figures = {name: summary.mean for name, summary in every.items()}
        return figures | {"timing_s/testing": time.monotonic() - started}
