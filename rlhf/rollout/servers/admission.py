"""Checks a rollout server that has just started: its vLLM release, token counters, adapters, length and secret."""

import logging

from rlhf.config.vllm_versions import server_problem
from rlhf.errors import UserError
from rlhf.rollout.servers.client import SecretRejected, ServerClient
from rlhf.rollout.servers.secret import VARIABLE, Secret

log = logging.getLogger(__name__)


class Admission:
    """Checks the servers of a fleet, and warns once of each server without a secret.

    `adapter_rank` and `longest`: as in `RequestSettings`.
    """

    def __init__(self, secret: Secret, adapter_rank: int | None, longest: int | None) -> None:
        self._secret, self._adapter_rank, self._longest = secret, adapter_rank, longest
        self._warned: set[str] = set()

    async def check(self, client: ServerClient, url: str, *, ours: bool) -> None:
        """Check that the server can be used. `ours`: this run started the server.

        Raises:
            ServerFailure: no answer, or an unexpected one.
            UserError: the server must be started differently.
        """
        try:
            problem = server_problem(await client.version())
        except SecretRejected as rejected:
            if ours:  # another process answers at the port, so this run's server will exit
                raise
            raise UserError(
                f"The rollout server {url} expects another secret than this run's ({self._secret.source}). Start the "
                f"server with this run's secret in {VARIABLE}, or the trainer with the server's secret."
            ) from rejected
        if problem:
            raise UserError(f"The rollout server {url} cannot be used: {problem}.")
        await client.load()
        if self._adapter_rank is not None and not await client.serves_adapters():
            raise UserError(
                f"rollout.lora=native: the rollout server {url} serves no adapters. Start it with --enable-lora "
                f"--max-lora-rank {self._adapter_rank}, or set rollout.lora=merged."
            )
        if self._longest is not None and not ours and (length := await client.max_model_len()) < self._longest:
            raise UserError(
                f"The rollout server {url} has --max-model-len={length}, and would cut responses: "
                f"data.max_prompt_length plus data.max_response_length is {self._longest}. Start the server with "
                f"--max-model-len {self._longest} or more, or lower data.max_response_length."
            )
        if not ours and url not in self._warned and not await client.requires_secret():
            self._warned.add(url)
            log.warning(
                "Rollout server %s asks for no secret: everyone who reaches its port can replace its weights and "
                "make it fetch any URL. Start it with this run's secret (%s) in the variable %s (docs/rollout.md).",
                url,
                self._secret.source,
                VARIABLE,
            )
