"""A taskset of verifiers: a number to guess in three turns, with hints, played as an interaction."""

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]


class GuessData(vf.TaskData):
    secret: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class GuessConfig(vf.TasksetConfig):
    tasks: int = 8


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    def load(self):
        for secret in range(self.config.tasks):
            yield GuessTask(GuessData(prompt="Guess 0 to 9.", secret=secret), self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        found = near = 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(2):
                if segment.terminated or found:
                    break
                found = float(segment.last_reply.strip() == str(task.data.secret))
                near = sum(map(ord, segment.last_reply)) % 97 / 970
                segment = await interaction.turn("wrong" if not found else "right")
        interaction.trace.record_reward("found", found + near)
