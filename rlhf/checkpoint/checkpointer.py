"""Saves a run every `trainer.save_freq` steps, and resumes the run at its start."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from rlhf.checkpoint.commit.deleter import Deleter
from rlhf.checkpoint.commit.identity import Identity
from rlhf.checkpoint.commit.removal import clean_leftovers
from rlhf.checkpoint.load.compatibility import same_bits_problems
from rlhf.checkpoint.load.restoring import LoadResult
from rlhf.checkpoint.load.resume import restore
from rlhf.checkpoint.memory.snapshots import MemorySnapshots
from rlhf.checkpoint.remote.copies import RemoteCopies
from rlhf.checkpoint.save.background import SaveInFlight
from rlhf.checkpoint.save.host_memory import check_memory
from rlhf.checkpoint.save.pending import PendingCheckpoint, begin_checkpoint
from rlhf.checkpoint.save.snapshot import Snapshot, take_snapshot
from rlhf.checkpoint.save.staging import Stager
from rlhf.checkpoint.save.writer import SaveResult, write_checkpoint
from rlhf.checkpoint.start.run_dir import resume_source
from rlhf.checkpoint.state.run_state import RunState
from rlhf.config.compare import ResolvedConfig
from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.config.schema.trainer import TrainerConfig
from rlhf.errors import Preempted, Unsaved, UserError
from rlhf.events import announce
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.next_start import changes_to_continue, next_start
from rlhf.ranks.run_events import record_event
from rlhf.ranks.transport import LostPeer
from rlhf.storage.disk_errors import SaveFailed
from rlhf.storage.layout import scan, step_of

log = logging.getLogger(__name__)


class Checkpointer:
    """Saves and restores a run. All methods are collective, except `metrics` and `failed`.

    With `checkpoint.async_save`, `save` only copies the state. A thread writes and commits the copy on its own process
    group, at most one at a time. The next save, a resume or `finish` reports the outcome and raises its error.

    Args:
        run_dir: the run directory.
        trainer: save frequency, resume mode and the grace period at the end.
        settings: contents of a checkpoint, kind of save, retention.
        config: the resolved configuration, which a resume compares with the stored configuration.
        identity: the run's entries in manifests.
        coordinator: the ranks, which all make the same calls.
        state: live objects to save and restore.
    """

    def __init__(
        self,
        run_dir: Path,
        trainer: TrainerConfig,
        settings: CheckpointConfig,
        config: ResolvedConfig,
        identity: Identity,
        coordinator: Coordinator,
        state: RunState,
    ) -> None:
        self._run_dir, self._trainer, self._settings, self._config = run_dir, trainer, settings, config
        self._identity, self._coordinator, self._state = identity, coordinator, state
        self._deleter = Deleter()
        copies = coordinator.is_leader and settings.remote is not None
        self._copies = RemoteCopies(run_dir, trainer, settings) if copies else None
        # Create the group here, where all ranks call together. The thread must not use the training's process groups.
        timeout = timedelta(seconds=settings.timeout_s)
        self._background = coordinator.duplicate(timeout) if settings.async_save else None
        self._stager = Stager()
        self._memory: MemorySnapshots | None = None
        if settings.memory.freq:
            self._memory = MemorySnapshots(run_dir, settings, config.text, identity, coordinator, state)
        self._in_flight: SaveInFlight | None = None
        self._result: SaveResult | None = None
        self.loaded: LoadResult | None = None
        self.not_copied: list[int] = []
        """The steps that `checkpoint.remote` still lacks; valid on the leader after `committing`."""
        self._saved_step: int | None = None
        self._started = False
        # Step of the reference's last change -> the newest checkpoint that contains the reference after this change.
        self._reference_at: dict[int, Path] = {}

    def resume(self) -> bool:
        """Restore the newest intact checkpoint or snapshot, or return False if the run has neither.

        In a process that has already trained, this is a rollback. A rollback ignores snapshots: they
        exist only if memory was free, and later steps must not depend on that. Raises UserError when the checkpoint
        does not fit the configuration, when no intact checkpoint is left, when a rollback would not restore all of the
        state, or when a machine lacks memory for background saves or snapshots.
        """
        self._settle()
        timeout_s = self._settings.timeout_s
        # Remove the leftovers of killed saves. No save is in flight here, so removal is safe.
        self._coordinator.on_domain_leaders(lambda: self._deleter.wait(timeout_s) and clean_leftovers(self._run_dir))
        rolls_back, self._started = self._started, True
        if self._memory is not None:
            self._memory.tidy()
        loaded = restore(
            self._run_dir,
            self._trainer,
            self._settings,
            self._config,
            self._state,
            self._identity,
            self._coordinator,
            resume_source(self._trainer),
            None if self._memory is None or rolls_back else self._memory.place,
        )
        if self._memory is not None:
            self._memory.forget(after=-1 if loaded is None else loaded.manifest.step)
        if not rolls_back:
            self._check_memory()
        if self._copies is not None:
            self._copies.start()  # after the resume, which moves damaged checkpoints away
        if loaded is None:
            return False
        if rolls_back:
            _reject_partial(loaded)
        self.loaded, manifest = loaded, loaded.manifest
        if self._memory is None or loaded.path.parent != self._memory.place.folder:
            updated_at = None if self._state.reference is None else self._state.reference.updated_at
            self._record_saved(loaded.path, manifest.step, updated_at)
        elif self._coordinator.is_leader:
            self._warn_of_lost_save(manifest.step)
        if self._coordinator.is_leader:
            size, seconds = loaded.total_bytes / 2**20, loaded.seconds
            log.info("Resumed step %d from %s: %.1f MiB in %.2f s.", manifest.step, loaded.path, size, seconds)
            facts = {"seconds": round(seconds, 3), "bytes": loaded.total_bytes}
            record_event(self._run_dir, "rolled back" if rolls_back else "resumed", step=manifest.step, **facts)
            for difference in same_bits_problems(manifest, self._identity, self._coordinator.world_size):
                log.warning("%s: the state is exact, but later steps may not be bit-identical.", difference)
        return True

    def _warn_of_lost_save(self, step: int) -> None:
        """Log a warning if the run resumes `step` from memory and lacks the last save that was due before `step`.

        No later step repeats that save.
        """
        every = self._trainer.save_freq
        due = (step - 1) // every * every if every else 0
        source = resume_source(self._trainer)  # a fork's run directory lacks the source's steps
        if due > max(step_of(path) or 0 for path in (*scan(self._run_dir), source or Path())):
            text = "The crash ended the save of step %d: step %d has no checkpoint, and the run continues from memory."
            log.warning(text, due, due)

    def _check_memory(self) -> None:
        """Raise UserError on every rank if a machine lacks memory for the copies. A rollback has the memory already."""
        if self._background is not None:
            copied = self._state.copied_bytes(self._settings.contents, self._settings.hf_adapter)
            check_memory(copied, self._coordinator)
        if self._memory is not None:
            self._memory.check_room()

    def save_restored(self, *, last: bool, rolls_back: bool = False) -> SaveResult | None:
        """Save the step that `resume` has restored, if the step lacks a checkpoint that it needs.

        A step restored from memory needs a checkpoint if a save of the step was due. With `rolls_back` (the run may
        roll back), any step needs a checkpoint if the run directory has none. Raises UserError if a rollback to the
        run directory's checkpoint would not restore all of the state.
        Call when the metric history is open. Return the same as `save`.
        """
        every = self._trainer.save_freq
        if self.loaded is None:
            return None
        lacks = rolls_back and not any(self._coordinator.on_domain_leaders(lambda: bool(scan(self._run_dir))))
        if lacks:
            # `resume` counts the source of a fork as saved. But an imported source may lack moments, and a rollback to
            # it would keep the moments that the rejected batch has changed.
            self._saved_step = None
        elif rolls_back:
            _reject_partial(self.loaded)
        if not lacks and not (every and (last or self.loaded.manifest.step % every == 0)):
            return None
        return self.save(self.loaded.manifest.step, self.loaded.manifest.metrics, last=last)

    def _record_saved(self, path: Path, step: int, reference_at: int | None) -> None:
        self._saved_step = step
        self._reference_at = {} if reference_at is None else {reference_at: path}

    def maybe_save(self, step: int, metrics: Mapping[str, float], *, last: bool = False) -> SaveResult | None:
        """Save every `trainer.save_freq` steps and at the `last` step, unless `trainer.save_freq` is 0. Return the
        same as `save`. Also publish a snapshot in memory every `checkpoint.memory.freq` steps."""
        # Promise 21.
        if self._memory is not None:
            self._memory.take(step, metrics)
        every = self._trainer.save_freq
        if every and (last or step % every == 0):
            return self.save(step, metrics, last=last)
        if self._in_flight is not None and self._in_flight.over and not self.failed:
            self._settle()
        return self._pop_result()

    def save(self, step: int, metrics: Mapping[str, float] | None = None, *, last: bool = False) -> SaveResult | None:
        """Save `step` with its `metrics`, unless that step is saved already. First wait for the save in flight.

        Return the save that finished since the last call. `checkpoint.on_save_error` decides whether a failure ends
        the run or is only logged; a failed `last` save always ends the run.
        """
        called = time.monotonic()
        self._settle()
        if step == self._saved_step:
            return self._pop_result()
        announce("commit.snapshot")
        started = time.monotonic()
        reference, settings = self._state.reference, self._settings
        updated_at = None if reference is None else reference.updated_at
        unchanged = None if updated_at is None else self._reference_at.get(updated_at)
        rank, text = self._coordinator.rank, self._config.text
        snapshot = take_snapshot(
            step, settings.contents, self._state, text, rank, unchanged, metrics, settings.hf_dtype, settings.hf_adapter
        )
        save = SaveInFlight(step, updated_at, settings.timeout_s, last)
        if self._background is None:
            save.run(lambda: self._write(snapshot, self._coordinator, called, started))
            self._in_flight = save
            self._settle()
            return self._pop_result()
        try:
            pending = begin_checkpoint(snapshot, self._run_dir, self._coordinator)
        except SaveFailed as error:
            self._raise_or_continue(error, last)
            return self._pop_result()
        background, staged = self._background, self._stager.copy(snapshot, pending.linked)
        blocked = time.monotonic() - called
        save.start(lambda: self._write(staged, background, called, started, pending, blocked))
        self._in_flight = save
        return self._pop_result()

    def _write(
        self,
        snapshot: Snapshot,
        coordinator: Coordinator,
        called: float,
        started: float,
        pending: PendingCheckpoint | None = None,
        blocked: float | None = None,
    ) -> SaveResult:
        result = write_checkpoint(
            snapshot,
            self._run_dir,
            self._identity,
            coordinator,
            self._settings,
            self._deleter,
            pending,
            cancel_copy=(lambda: None) if self._copies is None else self._copies.cancel_copy,
        )
        now = time.monotonic()
        result = replace(
            result,
            seconds=now - started,
            blocked_seconds=now - called if blocked is None else blocked,
            wait_seconds=started - called,
        )
        if coordinator.is_leader:
            size, seconds = result.total_bytes / 2**20, max(result.seconds, 1e-9)
            text = "Saved %s: %.1f MiB in %.2f s (%.0f MiB/s); the training waited %.2f s."
            log.info(text, result.path, size, seconds, size / seconds, result.blocked_seconds)
            facts = {"seconds": round(seconds, 3), "bytes": result.total_bytes}
            record_event(self._run_dir, "saved", step=snapshot.step, **facts)
        if self._copies is not None:
            self._copies.published(result.path)
        return result

    def metrics(self) -> dict[str, float]:
        """Return the metrics of copies to `checkpoint.remote` and of snapshots in memory, where the run has them."""
        copies = {} if self._copies is None else self._copies.metrics()
        return copies if self._memory is None else copies | self._memory.metrics()

    def leave(self, step: int, metrics: Mapping[str, float]) -> NoReturn:
        """Save `step`, wait for the save, and raise Preempted. Raise Unsaved if the save failed, or UserError if a
        restart would fail too."""
        # Keep this call outside the `try` block. The loop also calls `leave` after a failed save without a stop
        # request: the error of that save must propagate, so that the ranks restart.
        self._settle()
        try:
            self.save(step, metrics, last=True)
            self.finish(log_wait=False)
            self._drop_snapshots()
        except SaveFailed as error:
            then = next_start(next(iter(scan(self._run_dir)), None), self._trainer)
            # Promise 18.
            raise Unsaved(f"Asked to stop: left without saving step {step}. {error} {then}") from error
        raise Preempted(f"Asked to stop: saved step {step} and left. {next_start('there', self._trainer)}")

    def finish(self, *, log_wait: bool = True) -> SaveResult | None:
        """Wait for the save in flight and for removals; return and raise the same as `save`."""
        self._settle(log_wait=log_wait)
        if self._memory is not None:
            self._memory.finish()
        self._deleter.wait(self._settings.timeout_s)
        return self._pop_result()

    def _drop_snapshots(self) -> None:
        if self._memory is not None:
            self._memory.drop()

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Run a block; after a normal end or a UserError, the last save is committed.

        After another error on this rank, wait for the save in flight too, for a quarter of the grace period at most:
        that save may be the only progress of a run that crashes at the same step again and again. Wait for copies to
        the remote up to `checkpoint.timeout_s` at the end, a quarter of the grace period on an early exit, and not at
        all after a crash.
        """
        copies_s = grace_s = self._trainer.preempt_grace_s / 4
        try:
            try:
                yield
            except UserError:
                try:
                    self.finish()
                except Exception as error:
                    log.error("%s", error)  # raising it would hide why the run ends
                raise
            self.finish()
            self._drop_snapshots()
            copies_s = self._settings.timeout_s
        except (UserError, Preempted, Unsaved):
            raise
        except BaseException as error:
            copies_s = 0.0
            if isinstance(error, Exception):
                end = time.monotonic() + grace_s
                if self._in_flight is not None:
                    self._in_flight.wait_for_end(grace_s)
                if self._memory is not None:
                    self._memory.wait_for_end(max(0.0, end - time.monotonic()))
            raise
        finally:
            if self._copies is not None:
                self.not_copied = self._copies.finish(copies_s)

    @property
    def failed(self) -> bool:
        """Return whether the save in flight failed on this rank and must end the run.

        `leave` or `finish` then raises the error on all ranks.
        """
        save = self._in_flight
        return save is not None and save.error is not None and not self._continues_after(save.error, save.last)

    def _settle(self, *, log_wait: bool = True) -> None:
        if (save := self._in_flight) is None:
            return
        if log_wait and not save.over and self._coordinator.is_leader:
            log.info("Waiting for the checkpoint of step %d, which is still being written.", save.step)
        try:
            result = save.wait()
        except SaveFailed as error:
            self._in_flight = None
            self._raise_or_continue(error, save.last)
            return
        self._in_flight, self._result = None, result
        self._record_saved(result.path, save.step, save.reference_at)

    def _continues_after(self, error: BaseException, last: bool) -> bool:
        # After the loss of a rank, no later save can succeed.
        lost = isinstance(error.__cause__, LostPeer)
        return self._settings.on_save_error == "continue" and isinstance(error, SaveFailed) and not lost and not last

    def _raise_or_continue(self, error: SaveFailed, last: bool) -> None:
        if self._coordinator.is_leader:
            record_event(self._run_dir, "save failed", cause=str(error))
        if self._continues_after(error, last):
            if self._coordinator.is_leader:
                log.error("%s Training goes on (checkpoint.on_save_error=continue).", error)
            return
        if error.unfixable:
            changes = changes_to_continue(self._trainer)
            raise UserError(f"{error} Fix it and run the same command{changes} again.") from error
        raise error

    def _pop_result(self) -> SaveResult | None:
        result, self._result = self._result, None
        return result


def _reject_partial(loaded: LoadResult) -> None:
    """Raise UserError if a rollback to this checkpoint restores only a part of the state."""
    # Promise 16.
    if loaded.kept:
        raise UserError(
            f"guards.action=rollback: {loaded.path} lacks {', '.join(loaded.kept)}, so a rollback to it would keep "
            "the changes that rejected batches made to these parts. Set guards.action=skip, at least until the run has "
            "saved its next checkpoint."
        )
