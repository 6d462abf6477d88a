"""Plays games of the package `textarena`: `env=textarena env.kwargs.id=GuessTheNumber-v0`.

The policy is player 0. For a game of several players, write a subclass with the other players' moves:

    class Nim(TextArena):
        def _opponent(self, observation: str) -> str:
            return "[0 1]"

and set env.classes=[nim.py:Nim] env.kwargs={id: Nim-v0, players: 2} env.process=episode. The games use the global
generators, so each episode needs a process of its own, and a resume repeats the calls (docs/environments.md).
"""

from typing import Any

from rlhf.environments import free_text
from rlhf.environments.adapters import check_id, need_package
from rlhf.environments.class_arguments import KWARGS
from rlhf.errors import UserError


class TextArena:
    """A game. Each observation has only the messages that are new since the last turn."""

    _own_process = True

    def __init__(self, id: str, players: int = 1, **arguments: Any) -> None:
        """`arguments`: arguments of the game, such as `max_turns`."""
        import textarena

        self._game = textarena.make(id, **arguments)
        self._players = players
        # Observation wrappers repeat the whole history, so read observations without them. Actions still pass through
        # all wrappers.
        self._core = self._game
        while isinstance(self._core, textarena.Wrapper):
            self._core = self._core.env

    @classmethod
    def _preflight(cls, id: str, players: int = 1, **arguments: Any) -> None:
        """Import the game and begin one, before the processes of episodes are forked."""
        need_package(cls.__name__, "textarena", "textarena")
        from textarena.envs.registration import ENV_REGISTRY

        check_id("textarena", id, ENV_REGISTRY)
        if players > 1 and cls._opponent is TextArena._opponent:
            raise UserError(
                f"{KWARGS}.players={players}: nobody plays the other players. Write a subclass of TextArena with a "
                "method _opponent(self, observation) and name it in env.classes (docs/environments.md)."
            )
        try:
            cls(id, players, **arguments).reset(0)
        # A game may raise any error for wrong arguments, and LookupError for missing word lists.
        except Exception as error:
            why = " ".join(str(error).split())[:300] or type(error).__name__
            raise UserError(
                f"{KWARGS}.id={id}: the game does not begin: {why.rstrip('.')}. Correct {KWARGS}, or install what the "
                "game needs."
            ) from error

    def reset(self, seed: int, **row: object) -> str:
        self._game.reset(num_players=self._players, seed=seed)
        # The trainer appends the text to the row's prompt.
        return f"\n{self._until_own_turn()}"

    @free_text
    def step(self, text: str) -> str | None:
        done, _ = self._game.step(text)
        return None if done else self._until_own_turn()

    def get_reward(self) -> float:
        """Return the game's reward of player 0, or 0 for a game that has not ended."""
        rewards, _ = self._game.close()
        return float((rewards or {}).get(0, 0.0))

    def _until_own_turn(self) -> str | None:
        """Let the other players move, and return the messages for the policy; None if the game has ended."""
        while True:
            player, messages = self._core.get_observation()
            text = self._shown(player, messages)
            if player == 0:
                return text
            done, _ = self._game.step(self._opponent(text))
            if done:
                return None

    def _shown(self, player: int, messages: list[tuple[Any, ...]]) -> str:
        """Return the messages as text, without the player's own moves, which the conversation already has."""
        names = {-1: "GAME"} | self._core.state.role_mapping
        others = [(sender, text) for sender, text, *_ in messages if sender != player]
        return "\n".join(f"[{names.get(sender, f'Player {sender}')}] {text}" for sender, text in others)

    def _opponent(self, observation: str) -> str:
        """Return the move of another player, who reads `observation`."""
        raise NotImplementedError
