"""A guessing game of several turns: the policy names a number, the game answers higher or lower."""

from rlhf.environments import free_text


class GuessNumber:
    """The policy guesses `secret`. The row's prompt names the range; `env.max_turns` limits the guesses."""

    def reset(self, secret: int, **row: object) -> None:
        self.secret = secret
        self.found = False

    @free_text
    def step(self, text: str) -> str | None:
        guess = text.strip()
        if not guess.isdecimal():
            return "a number please"
        self.found = int(guess) == self.secret
        return None if self.found else "higher" if int(guess) < self.secret else "lower"

    def get_reward(self) -> float:
        return float(self.found)
