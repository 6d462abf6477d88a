"""The checkpointer of a run: saves on its cadence, finds the way back at the start, and knows nothing of how training works."""

import logging
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import xxhash

import rlhf
from rlhf.checkpoint.commit import clean_leftovers
from rlhf.checkpoint.coordinator import Coordinator
from rlhf.checkpoint.driver_state import DriverState
from rlhf.checkpoint.errors import SaveFailed
from rlhf.checkpoint.resume import check_compatible, find_intact, load_state
from rlhf.checkpoint.run_dir import resume_source
from rlhf.checkpoint.snapshot import Carried, Reference, Role, RunState, Stateful, take_snapshot
from rlhf.checkpoint.writer import Identity, SaveResult, write_checkpoint
from rlhf.config import Config
from rlhf.config.files import to_yaml
from rlhf.errors import UserError

log = logging.getLogger(__name__)


class Checkpointer:
    """Saves and restores a run. All methods are collective.

    `parts` are what the driver state holds beside `driver`, by name. `reference` is None unless the reference policy moves. `fingerprints`
    identify the files that settings name (`model.path`, ...).
    """

    def __init__(
        self,
        config: Config,
        coordinator: Coordinator,
        roles: Mapping[str, Role],
        driver: DriverState,
        parts: Mapping[str, Stateful],
        reference: Reference | None,
        fingerprints: Mapping[str, str],
        carried: Carried | None,
    ) -> None:
        self._config, self._run_dir, self._coordinator = config, config.run_dir, coordinator
        self._state = RunState(roles, driver, parts, reference, carried)
        self._config_yaml = to_yaml(config)
        self._identity = Identity(
            backend=config.backend.name,
            config_hash=xxhash.xxh3_128(self._config_yaml.encode()).hexdigest(),
            fingerprints=dict(fingerprints),
            versions={
                "rlhf": rlhf.__version__,
                "torch": version("torch"),
                "transformers": version("transformers"),
                "python": platform.python_version(),
            },
        )
        self._saved_step: int | None = None
        # Step of the reference's last change -> the newest checkpoint that holds it as it was then.
        self._reference_at: dict[int, Path] = {}

    def resume(self) -> bool:
        """Restore the newest intact checkpoint; False, and nothing changed, for a run that has none yet.

        In a running process it is the way back to that checkpoint: everything is as it was after that save, or after the resume from it.
        Raises UserError when the checkpoint and the configuration do not fit, or when no intact checkpoint is left.
        """
        # Ranks may be restarted without a new set-up of the directory; no save is in flight here.
        self._coordinator.on_leader(lambda: clean_leftovers(self._run_dir))
        found = find_intact(
            self._run_dir, self._coordinator, self._coordinator.on_leader(lambda: resume_source(self._config))
        )
        if found is None:
            return False
        path, manifest = found
        wanted = self._config.checkpoint.load_contents or self._config.checkpoint.contents
        fingerprints, moving = self._identity.fingerprints, self._state.reference is not None
        self._coordinator.on_leader(
            lambda: check_compatible(path, manifest, self._config, fingerprints, wanted, moving_reference=moving)
        )
        seed, rank, world_size = self._config.trainer.seed, self._coordinator.rank, self._coordinator.world_size
        self._coordinator.everywhere(lambda: load_state(path, manifest, self._state, wanted, seed, rank, world_size))
        self._holds_now(path, manifest.step)
        if self._coordinator.is_leader:
            size = manifest.total_bytes + manifest.linked_bytes
            log.info("Resumed step %d from %s (%.1f MiB).", manifest.step, path, size / 2**20)
            if manifest.world_size != world_size:
                log.warning(
                    "It was saved by %d ranks and goes on with %d: the state is exact, the bits of further steps are not promised.",
                    manifest.world_size,
                    world_size,
                )
        return True

    def _holds_now(self, path: Path, step: int) -> None:
        """Note that the checkpoint `path` of `step` is equal to the live state."""
        self._saved_step = step
        if self._state.reference is not None:
            self._reference_at = {self._state.reference.updated_at: path}

    def maybe_save(self, step: int, *, last: bool = False) -> SaveResult | None:
        """Save if the cadence says so, or if this is the run's `last` step."""
        every = self._config.trainer.save_freq
        return self.save(step) if every and (last or step % every == 0) else None

    def save(self, step: int) -> SaveResult | None:
        """Save now, unless this step is saved already. A failure ends the run, or is reported, as `checkpoint.on_save_error` says."""
        if step == self._saved_step:
            return None
        settings = self._config.checkpoint
        reference = self._state.reference
        reference_at = None if reference is None else self._reference_at.get(reference.updated_at)
        snapshot = take_snapshot(
            step, settings.contents, self._state, self._config_yaml, self._coordinator.rank, reference_at
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
        self._holds_now(result.path, step)
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
