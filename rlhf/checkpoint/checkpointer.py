"""The checkpointer of a run: saves on its cadence, finds the way back at the start, and knows nothing of how training works."""

import logging
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import xxhash

import rlhf
from rlhf.checkpoint.commit import clean_leftovers
from rlhf.checkpoint.coordinator import Coordinator
from rlhf.checkpoint.errors import SaveFailed
from rlhf.checkpoint.resume import check_compatible, find_intact, load_state
from rlhf.checkpoint.run_dir import resume_source
from rlhf.checkpoint.snapshot import Role, take_snapshot
from rlhf.checkpoint.writer import Identity, SaveResult, write_checkpoint
from rlhf.config import Config
from rlhf.config.files import to_yaml
from rlhf.errors import UserError

log = logging.getLogger(__name__)


class Checkpointer:
    """Saves and restores a run. All methods are collective.

    `driver_state` returns the JSON-able driver state of this moment; `fingerprint` identifies the files of model.path.
    """

    def __init__(
        self,
        config: Config,
        coordinator: Coordinator,
        roles: Mapping[str, Role],
        driver_state: Callable[[], dict[str, Any]],
        fingerprint: str,
    ) -> None:
        self._config, self._run_dir, self._coordinator = config, config.run_dir, coordinator
        self._roles, self._driver_state = roles, driver_state
        self._config_yaml = to_yaml(config)
        self._identity = Identity(
            backend=config.backend.name,
            config_hash=xxhash.xxh3_128(self._config_yaml.encode()).hexdigest(),
            model_fingerprint=fingerprint,
            versions={
                "rlhf": rlhf.__version__,
                "torch": version("torch"),
                "transformers": version("transformers"),
                "python": platform.python_version(),
            },
        )
        self._saved_step: int | None = None

    def resume(self) -> dict[str, Any] | None:
        """Restore the newest intact state and return its driver state; None for a run that has no checkpoint yet.

        Raises UserError when the checkpoint and the configuration do not fit, or when no intact checkpoint is left.
        """
        # Ranks may be restarted without a new set-up of the directory; no save is in flight when they start.
        self._coordinator.on_leader(lambda: clean_leftovers(self._run_dir))
        found = find_intact(
            self._run_dir, self._coordinator, self._coordinator.on_leader(lambda: resume_source(self._config))
        )
        if found is None:
            return None
        path, manifest = found
        wanted = self._config.checkpoint.load_contents or self._config.checkpoint.contents
        fingerprint = self._identity.model_fingerprint
        self._coordinator.on_leader(lambda: check_compatible(path, manifest, self._config, fingerprint, wanted))
        rank, world_size = self._coordinator.rank, self._coordinator.world_size
        states = self._coordinator.everywhere(
            lambda: load_state(path, manifest, self._roles, wanted, self._config.trainer.seed, rank)
        )
        self._saved_step = manifest.step
        if self._coordinator.is_leader:
            log.info("Resumed step %d from %s (%.1f MiB).", manifest.step, path, manifest.total_bytes / 2**20)
            if manifest.world_size != world_size:
                log.warning(
                    "It was saved by %d ranks and goes on with %d: the state is exact, the bits of further steps are not promised.",
                    manifest.world_size,
                    world_size,
                )
        return states[0]

    def maybe_save(self, step: int, *, last: bool = False) -> SaveResult | None:
        """Save if the cadence says so, or if this is the run's `last` step."""
        every = self._config.trainer.save_freq
        return self.save(step) if every and (last or step % every == 0) else None

    def save(self, step: int) -> SaveResult | None:
        """Save now, unless this step is saved already. A failure ends the run, or is reported, as `checkpoint.on_save_error` says."""
        if step == self._saved_step:
            return None
        settings = self._config.checkpoint
        snapshot = take_snapshot(
            step, settings.contents, self._roles, self._driver_state(), self._config_yaml, self._coordinator.rank
        )
        try:
            result = write_checkpoint(snapshot, self._run_dir, self._identity, self._coordinator, settings.max_to_keep)
        except SaveFailed as error:
            if settings.on_save_error == "continue":
                if self._coordinator.is_leader:
                    log.error("%s Training goes on (checkpoint.on_save_error=continue).", error)
                return None
            if error.unfixable:
                raise UserError(f"{error} Mend it and run the same command again.") from error
            raise
        self._saved_step = step
        if self._coordinator.is_leader:
            size = result.total_bytes / 2**20
            log.info(
                "Saved %s: %.1f MiB in %.2f s (%.0f MiB/s).",
                result.path,
                size,
                result.seconds,
                size / max(result.seconds, 1e-9),
            )
        return result
