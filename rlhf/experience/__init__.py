"""What the policy does and what it gets for it: prompts, rollouts and rewards of a step; held-out accuracy."""
