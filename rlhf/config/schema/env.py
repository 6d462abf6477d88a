"""Section `env`: environments, with which the policy interacts over several turns."""

from dataclasses import dataclass
from typing import Any

from rlhf.config.schema.fields import setting


@dataclass
class EnvConfig:
    classes: list[str] = setting([])
    """Environment classes, `path/to/file.py:Class`. With several, the column `environment` names the class of each
    row. Empty: each response is one turn."""
    kwargs: dict[str, Any] = setting({})
    """Arguments of the classes' constructors; each class gets those it accepts. The program of `env.command` gets them
    as JSON in the variable RLHF_KWARGS."""
    command: str | None = setting(None)
    """Program to run for each episode, such as 'python agent.py'. It calls the model at OPENAI_BASE_URL."""
    template: str | None = setting(None)
    """Chat template (Jinja file) for episodes; null: the tokenizer's, or a bundled one if the tokenizer's
    template changes earlier turns."""
    announce_tools: bool = setting(True)
    """List the tools in the system message if the chat template does not print them."""
    max_turns: int = setting(8, ge=1)
    """Largest number of the policy's turns in an episode. After that many turns the episode ends and is scored."""
    max_rows: int = setting(8, ge=1)
    """Largest number of training rows of an episode. The program of `env.command` begins a new row each time it
    rewrites its history. A row beyond `max_rows` ends the episode, which is scored."""
    max_invalid_calls: int = setting(3, ge=0)
    """Invalid tool calls (unknown tool, wrong arguments) that an episode may make; one more ends the episode."""
    timeout_s: float = setting(30.0, gt=0)
    """Time limit in seconds of each call (`reset`, a tool, `get_reward`), after which the environment's process is
    killed."""
    retries: int = setting(1, ge=0)
    """Restarts of an episode whose environment raised, hung or died. If the last restart fails, too, the sample has
    failed and is not trained on."""
    max_failed: float = setting(0.5, ge=0, le=1)
    """Largest fraction of failed samples in a step; with more, the run stops."""
    reward_weight: float = setting(1.0)
    """Weight of the environment's reward, which is added to `reward.functions`."""
    process: str = setting("pooled", choices=("pooled", "episode"))
    """`pooled`: each process runs many environments. `episode`: each episode has a process of its own, for code with
    global state."""
    num_workers: int = setting(2, ge=1, resume="harmless")
    """Processes per rank with `env.process=pooled`."""
    max_concurrent: int = setting(64, ge=1, resume="harmless")
    """Concurrent calls per rank. If the classes are not thread-safe, set it to `env.num_workers`."""
    pass_env: list[str] = setting([])
    """Environment variables to pass to the processes, as `reward.pass_env`."""
    network: bool = setting(False)
    """Give the processes access to the network and to this machine's sockets."""
    writable: list[str] = setting([])
    """Folders that the processes may write to, besides their own temporary folder (HOME and TMPDIR)."""
    memory_gb: float | None = setting(8.0, gt=0)
    """GiB that each process may allocate; null sets no limit."""

    @property
    def used(self) -> bool:
        """Return whether the responses are episodes."""
        return bool(self.classes) or self.command is not None

    @property
    def shown(self) -> str:
        """Return the setting and the value that make the responses episodes, for messages."""
        return f"env.command={self.command}" if self.command is not None else f"env.classes={self.classes}"
