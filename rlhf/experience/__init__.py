"""Experience of the policy: prompts, rollouts and rewards of each step, as a batch; held-out accuracy."""
