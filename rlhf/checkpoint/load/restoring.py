"""Restores one checkpoint: every rank reads and verifies its own part, then verifies its share of the rest."""

import json
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from rlhf.checkpoint.commit.manifest import Manifest
from rlhf.checkpoint.load.documents import parse_document
from rlhf.checkpoint.load.fetching import Fetched
from rlhf.checkpoint.load.locations import FileLocations
from rlhf.checkpoint.load.verification import BlockNumbers, verify_share
from rlhf.checkpoint.state.run_state import RunState
from rlhf.checkpoint.state.throughput import Throughput, throughput_metrics
from rlhf.config.compare import NEW_RUN
from rlhf.errors import UserError
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.rng import seed_everything, set_rng_state
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.file_parts import shards_in_files
from rlhf.storage.layout import CARRIED, DRIVER_STATE, HF_FOLDER, INDEX, REFERENCE, SCHEDULE, rank_file
from rlhf.storage.reading import CheckedFiles
from rlhf.storage.shards import Shards, TensorReader

log = logging.getLogger(__name__)
REST = "other"
SAMPLE_SETTINGS = ("trainer.seed", "model.", "data.", "rollout.", "env.", "reward.", "reward_model.", "algorithm.")
"""Prefixes of the settings on which samples and their rewards depend."""
PROMPT_HASHES = ("fingerprint", "tokens_fingerprint")
"""Entries in the prompt stream's state: hashes of the prompts and of their tokens."""


@dataclass(frozen=True)
class LoadResult:
    """Describes the restored checkpoint, and the seconds from reading its manifest to restoring the RNG state.

    `by_part` has the bytes that all ranks read and the seconds of the slowest rank: for each role's tensors, for the
    reference's (`ref`), and for all other files, whether restored or only verified (`other`). `kept` names the parts of
    the state that the load has left as they were.
    """

    path: Path
    manifest: Manifest
    by_part: dict[str, Throughput]
    seconds: float
    kept: Sequence[str] = ()

    @property
    def total_bytes(self) -> int:
        return sum(moved.bytes for moved in self.by_part.values())

    def metrics(self) -> dict[str, float]:
        """Return bytes, seconds and bytes per second: totals as `perf/load_*`, each part's as `perf/load_*/PART`."""
        return throughput_metrics("load", Throughput(self.total_bytes, self.seconds), self.by_part)


def load_state(
    located: FileLocations,
    state: RunState,
    load_contents: list[str],
    seed: int,
    coordinator: Coordinator,
    changed: Collection[str] = (),
) -> LoadResult:
    """Restore `state` and this rank's generators from a checkpoint, in place. Collective; may be repeated.

    Ranks first fetch the files that they need from other nodes' disks. Raises DamagedCheckpoint on every rank
    unless each byte of the checkpoint matches its hash; by then tensors may be overwritten, but nothing else. Raises
    DamagedCheckpoint also if content of an invalid form matches its hash; `state` is then undefined. A part
    that the stored driver state lacks starts afresh, with a warning. If settings `changed` since the save make
    generators or carried-over samples obsolete, these are not restored.
    """
    started = time.monotonic()
    loading = _Loading(located, state, load_contents, coordinator, changed)
    fetched = Fetched(located, coordinator)
    try:
        if len(located.by_domain) > 1:
            for request in (loading.request_indices, loading.request_rest):
                loading.raise_together(coordinator.combine(request, _combined))
                fetched.get(loading.files, loading.wanted)
        loading.raise_together(coordinator.combine(loading.read, _combined))
        numbers = BlockNumbers(located, loading.files)
        verified = coordinator.bitwise_or(numbers.bits(loading.files.checked))
        found = coordinator.combine(lambda: loading.verify_rest(numbers, verified), _combined)
        loading.raise_together(found)
        loading.raise_together(coordinator.combine(lambda: loading.apply(seed), _combined))
        size = sum(coordinator.all_gather(fetched.bytes)) if len(located.by_domain) > 1 else 0
        if size and coordinator.is_leader:
            log.info("Fetched %.1f MiB of %s from other nodes' disks.", size / 2**20, located.path.name)
    finally:
        fetched.remove()
    return LoadResult(located.path, located.manifest, found.by_part, time.monotonic() - started)


@dataclass
class _Outcome:
    """Reports damage, one line each, and throughput so far: of one rank, or combined over all ranks."""

    damage: list[str] = field(default_factory=list)
    by_part: dict[str, Throughput] = field(default_factory=dict)


def _combined(ranks: list[_Outcome]) -> _Outcome:
    """Combine reports: each line once, the sum of the bytes, the seconds of the slowest rank."""
    parts = [rank.by_part for rank in ranks]
    return _Outcome(
        list(dict.fromkeys(line for rank in ranks for line in rank.damage)),
        {
            name: Throughput(sum(part[name].bytes for part in parts), max(part[name].seconds for part in parts))
            for name in ranks[0].by_part
        },
    )


class _Loading:
    """Restores a checkpoint on one rank. Records damage instead of raising, so that a rank that finds damage makes the
    same calls as its peers."""

    def __init__(
        self,
        located: FileLocations,
        state: RunState,
        contents: list[str],
        coordinator: Coordinator,
        changed: Collection[str],
    ) -> None:
        self._changed = changed
        self._located, self._path, self._manifest = located, located.path, located.manifest
        self._state, self._contents = state, contents
        self._coordinator, self._rank, self._world_size = coordinator, coordinator.rank, coordinator.world_size
        self.files = CheckedFiles(located.path, located.manifest.files)
        self.outcome = _Outcome()
        self.wanted: dict[str, Collection[int]] = {}
        """The blocks of each file that this rank needs."""
        self._documents: dict[str, Any] = {}

    def raise_together(self, outcome: _Outcome) -> None:
        """Raise DamagedCheckpoint with all ranks' damage, if any."""
        if outcome.damage:
            # Promise 4, promise 6: damage found by one rank makes every rank reject this checkpoint.
            raise DamagedCheckpoint(f"{self._path} is damaged: " + "; ".join(outcome.damage))

    def request_indices(self) -> _Outcome:
        """Add the index files, which `request_rest` reads, to `wanted`."""
        names = [f"{folder}/{INDEX}" for _, folder, *_ in self._tensors()]
        self.wanted = {name: self.files.blocks(name) for name in names if name in self._manifest.files}
        return self.outcome

    def request_rest(self) -> _Outcome:
        """Add all blocks that `read` reads to `wanted`."""
        self.wanted |= {name: self.files.blocks(name) for name in self._own_documents()}
        for part, folder, shards, what, setting in self._tensors():
            with self._recording_damage():
                if PurePosixPath(folder).name == HF_FOLDER:
                    self.wanted |= {name: self.files.blocks(name) for name in self._manifest.in_folder(folder)}
                else:
                    reader, shards = self._open(part, folder, shards, what, setting)
                    self.wanted |= reader.blocks(shards)
        return self.outcome

    def read(self) -> _Outcome:
        for part, folder, shards, what, setting in self._tensors():
            with self._timing(part), self._recording_damage():
                reader, shards = self._open(part, folder, shards, what, setting)
                reader.read_into(shards)
        with self._timing(REST):
            for name in self._own_documents():
                with self._recording_damage():
                    self._documents[name] = parse_document(name, self.files.content(name), self._manifest.step)
        return self.outcome

    def verify_rest(self, numbers: BlockNumbers, verified: bytes) -> _Outcome:
        """Verify this rank's share of the blocks that no rank has verified, that is, of the blocks not in `verified`. A
        damaged model in `hf_model` is damage, even if the run itself does not read that model."""
        # The first domain that has a file verifies the file. Domain 0 reports files that no domain has.
        domain = self._coordinator.domain
        names = [name for name in self._manifest.files if self._located.source_domain(name) == domain]
        with self._timing(REST):
            rest = numbers.not_in(verified, self.files, names)
            self.outcome.damage += verify_share(self.files, names, rest, self._coordinator).values()
        return self.outcome

    def apply(self, seed: int) -> _Outcome:
        """Restore everything except tensors that `read` has restored."""
        state = self._state
        for role in state.roles.values():
            role.after_load()
        if "extra" in self._contents:
            for name, role in state.roles.items():
                if self._reads(file := f"{name}/{SCHEDULE}"):
                    with self._recording_other_form(file):
                        role.load_extra_state(self._documents[file])
        saved = self._documents[DRIVER_STATE]
        if state.carried is not None and self._samples_are_obsolete(saved):
            state.carried.load_tensors([])
            if self._manifest.in_folder(CARRIED) and self._rank == 0:
                text = "%s has samples for later steps, from other settings or files; they are dropped."
                log.warning(text, self._path)
        elif state.carried is not None:
            with self._recording_other_form(CARRIED):
                state.carried.load_tensors([self._documents[name] for name in self._carried()])
        elif self._manifest.in_folder(CARRIED) and self._rank == 0:
            log.warning(
                "%s has samples carried over to later steps; this run carries none, so they are dropped.", self._path
            )
        state.driver.load_state_dict(saved)
        for name, stateful in state.stateful.items():
            if name not in saved and self._rank == 0 and not self._manifest.imported:
                log.warning("%s has no state of %s, which starts afresh.", self._path, name)
            with self._recording_other_form(f"{DRIVER_STATE}: {name}"):
                stateful.load_state_dict(saved[name] if name in saved else json.loads(state.initial[name]))
        # Restore the generators last, because other loads may advance them.
        if "extra" in self._contents:
            with self._recording_other_form(self._rng_file):
                self._set_rng(seed)
        return self.outcome

    def _samples_are_obsolete(self, saved: Mapping[str, Any]) -> bool:
        """Return whether carried samples come from other settings, files or prompts than this run's."""
        if any(key.startswith(SAMPLE_SETTINGS) for key in self._changed):
            return True
        prompts = json.loads(self._state.initial.get("data", "{}"))
        before = saved.get("data", {})
        return any(before.get(key, prompts[key]) != prompts[key] for key in PROMPT_HASHES if key in prompts)

    def _tensors(self) -> Iterator[tuple[str, str, Shards, str, str]]:
        """Yield, for each folder of tensors to read: the key in `by_part`, the folder, the shards to fill, and for
        error messages a description and the setting that names the model."""
        for name, role in self._state.roles.items():
            if name not in self._manifest.roles:
                if self._manifest.imported:
                    continue
                raise UserError(
                    f"{self._path} has no {name}; it holds {', '.join(self._manifest.roles)}. Use the settings of the "
                    f"run that saved it; or {NEW_RUN}."
                )
            setting = "critic.path" if name == "critic" else "model.path"
            if {"model", "hf_model"} & set(self._contents):
                folder = "model" if "model" in self._contents else HF_FOLDER
                yield name, f"{name}/{folder}", role.model_shards(), f"{name}'s weights", setting
            if "optimizer" in self._contents and self._reads(f"{name}/optimizer/{INDEX}"):
                yield name, f"{name}/optimizer", role.optimizer_shards(), f"{name}'s optimizer", setting
        if self._state.reference is not None and self._reads(f"{REFERENCE}/{INDEX}"):
            yield "ref", REFERENCE, self._state.reference.shards(), "reference weights", "model.path"

    def _reads(self, name: str) -> bool:
        """Return whether this run reads the file. An imported checkpoint may lack files that other checkpoints have."""
        return not self._manifest.imported or name in self._manifest.files

    def _open(self, part: str, folder: str, shards: Shards, what: str, setting: str) -> tuple[TensorReader, Shards]:
        """Open a folder of `_tensors`. Also return `shards`, renamed and cut to match the folder's tensors."""
        if PurePosixPath(folder).name == HF_FOLDER:
            # Take the names from the manifest, not from the directory: only files in the manifest can be verified.
            files = [f for f in map(PurePosixPath, self._manifest.files) if f.parent == PurePosixPath(folder)]
            weights = [f.name for f in files if f.suffix == ".safetensors"]
            reader = TensorReader.of_whole_tensors(self.files, folder, weights)
            # Release 0.1.0 stored most weights under the module's names, even if Hugging Face files use other names.
            parts = self._state.roles[part].hf_parts()
            shards = shards_in_files(shards, {name: parts[name] for name in parts.keys() - reader.tensors.keys()})
        else:
            reader = TensorReader.of_component(self.files, folder, self._rank, self._world_size)
        if mismatches := reader.mismatches(shards):
            shown = "; ".join(mismatches[:5]) + (f"; and {len(mismatches) - 5} more" if len(mismatches) > 5 else "")
            raise UserError(
                f"{what} in {self._path} do not fit the architecture of {setting}: {shown}. Set {setting} to the model "
                "that the checkpoint was trained from."
            )
        if (rounded := reader.converted_dtypes(shards)) and self._rank == 0:
            log.warning(
                "%s in %s were rounded to %s (checkpoint.hf_dtype): the run continues from the rounded weights.",
                what.capitalize(),
                self._path,
                " and ".join(sorted(set(rounded.values()))),
            )
        return reader, shards

    def _own_documents(self) -> list[str]:
        names = [DRIVER_STATE]
        if self._state.carried is not None:
            names += self._carried()
        if "extra" in self._contents:
            names += [name for role in self._state.roles if self._reads(name := f"{role}/{SCHEDULE}")]
            names += [name for name in [self._rng_file] if name in self._manifest.files]
        return names

    def _carried(self) -> list[str]:
        """Return the carried-sample files that this rank (r of W) restores: the files of saved ranks r, r + W, ..."""
        saved = range(self._rank, self._manifest.world_size, self._world_size)
        names = [f"{CARRIED}/{rank_file(rank)}" for rank in saved]
        return [name for name in names if name in self._manifest.files]

    @property
    def _rng_file(self) -> str:
        return f"rng/{rank_file(self._rank)}"

    def _set_rng(self, seed: int) -> None:
        if "trainer.seed" in self._changed:
            seed_everything(seed + self._manifest.step, self._rank)
            return
        if self._rng_file in self._documents:
            # Promise 7: with the generators, the run has everything on which the next step depends.
            set_rng_state(self._documents[self._rng_file])
            return
        if self._rank == self._manifest.world_size and not self._manifest.imported:  # one warning for all ranks
            text = "%s has no RNG state for rank %d and above; the generators of these ranks are seeded afresh."
            log.warning(text, self._path, self._rank)
        seed_everything(seed + self._manifest.step, self._rank)

    @contextmanager
    def _recording_damage(self) -> Iterator[None]:
        try:
            yield
        except DamagedCheckpoint as problem:
            self.outcome.damage.append(str(problem))

    @contextmanager
    def _recording_other_form(self, name: str) -> Iterator[None]:
        """Record errors from content of an invalid form as damage of `name`. Each byte matches its hash, so only a
        forged checkpoint has such content."""
        try:
            yield
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # an error of the device, not of the content
            raise
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError) as error:
            log.debug("Content of an invalid form in %s", name, exc_info=True)
            self.outcome.damage.append(f"{name}: has an invalid form ({type(error).__name__}: {error})")

    @contextmanager
    def _timing(self, name: str) -> Iterator[None]:
        """Add the bytes and seconds of the `with` body to the throughput of the part `name`."""
        before, started = self.files.bytes_read, time.monotonic()
        yield
        total = self.outcome.by_part.get(name, Throughput())
        self.outcome.by_part[name] = Throughput(
            total.bytes + self.files.bytes_read - before, total.seconds + time.monotonic() - started
        )
