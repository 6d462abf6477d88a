"""Stores samples and rewards on disk before training on them, so that a crash loses none (the rollout journal)."""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any

import xxhash

from rlhf.events import announce
from rlhf.experience import journal_records as records
from rlhf.experience.groups import Group
from rlhf.ranks.coordinator import Coordinator
from rlhf.reward import RewardResult
from rlhf.rollout import Sample
from rlhf.rollout.sample_codec import layout_of, to_arrays, to_bytes
from rlhf.storage.files import append_durably, fsync_dir, fsync_file, make_dir_durably, remove_file, truncate
from rlhf.storage.layout import scan, step_of

log = logging.getLogger(__name__)
FOLDER = "journal"
FORMAT = 6
_Key = tuple[int, int]  # index of the generation within the step, and uid of the prompt
_NAME = re.compile(r"step_(\d+)\.rank_(\d+)")


EpisodeKey = tuple[int, int, int, int, str]
"""Prompt's uid, sample, attempt, turn, and a hash of the attempt's earlier turns and replies."""


@dataclass
class _Stored:
    """Samples and rewards of a step."""

    samples: dict[_Key, list[Sample]] = field(default_factory=dict)
    results: dict[int, list[RewardResult]] = field(default_factory=dict)
    """The rewards of each prompt's newest samples, by uid."""
    newest: dict[int, int] = field(default_factory=dict)
    """Index of the generation that added each prompt's newest samples, by uid. Prompts with episodes are not here."""
    turns: dict[EpisodeKey, Sample] = field(default_factory=dict)
    calls: dict[tuple[EpisodeKey, str], dict[str, Any]] = field(default_factory=dict)

    def update(self, other: "_Stored") -> None:
        """Add the records of `other`, which replace this object's records of the same prompts."""
        of_episodes = (uid for uid, *_ in (*other.turns, *(key for key, _ in other.calls)))
        self.drop_results(chain(other.newest, of_episodes))
        for each in fields(self):
            getattr(self, each.name).update(getattr(other, each.name))

    def drop_results(self, uids: Iterable[int]) -> None:
        """Drop the rewards of older samples, turns or replies of these prompts."""
        for uid in uids:
            self.results.pop(uid, None)


@dataclass(frozen=True)
class _File:
    path: Path
    step: int
    rank: int


class Journal:
    """Stores this rank's samples and rewards, and returns those that any rank stored before a crash.

    Each step and rank has an append-only file of records, `journal/step_N.rank_RRRRR`. The first record contains what
    the samples depend on: the trajectory hash, the policy's number of steps, and a hash of the previous step's batch.
    If any of the three differs, the journal drops the file and the files of later steps. So after a rollback or a
    change of rewards, the journal never returns samples of other weights. The first step after a resume accepts any
    hash of a batch, because the checkpoint determines the weights. The journal returns rewards only if the reward
    functions' files are unchanged.

    Rank r of n owns the files of the ranks r, r + n, r + 2n and so on, since an earlier start may have had more ranks.
    A rank whose files lack samples also reads other ranks' files. A journal makes no collective calls. If a write
    fails, the journal logs a warning and the run goes on, because only a restart after a crash needs the journal.

    Args:
        trajectory: `rlhf.assemble.trajectory_hash` of the run.
        scored_by: a hash of the reward functions' files.
    """

    def __init__(self, run_dir: Path, trajectory: str, scored_by: str, coordinator: Coordinator) -> None:
        self._run_dir, self._folder = run_dir, run_dir / FOLDER
        self._rank, self._world_size = coordinator.rank, coordinator.world_size
        self._trajectory, self._scored_by = trajectory, scored_by
        self._header: dict[str, Any] = {}
        self._known = _Stored()
        self._generation = 0
        self._unread: list[_File] = []
        self._writable = True
        self.written = 0
        """Bytes written since `begin`."""
        try:
            if self._folder.is_dir():
                # An earlier process may have been killed before it synced a file's name. The records read below must
                # survive a power cut.
                fsync_dir(self._folder)
        except OSError as error:
            log.warning("%s can't be synced; after a crash its samples are generated again: %s", self._folder, error)

    def begin(self, step: int, version: int, after: str | None) -> None:
        """Begin `step`, whose samples are by the policy after `version` steps. Remove files that no resume needs.

        `after` is the hash of the previous step's batch over all ranks, or None if this process did not train on it.
        """
        self._header = {"format": FORMAT, "run": self._trajectory, "step": step, "version": version, "after": after}
        self._known, self._unread, self._writable, self.written = _Stored(), [], True, 0
        self._generation = 0
        self.drop_published(up_to=version)
        try:
            files = [file for file in self._files() if file.step == step]
            # Read this rank's own file last, because a later file's samples of a prompt replace earlier ones.
            for file in sorted(filter(self._owns, files), key=lambda file: file.rank == self._rank):
                self._known.update(self._read(file))
            self._unread = [file for file in files if not self._owns(file)]
        except OSError as error:
            self._known, self._writable = _Stored(), False
            log.warning(
                "Step %d does not use the rollout journal, because its files can't be read or removed: %s", step, error
            )

    def has(self, step: int) -> bool:
        """Return whether this rank has a file of `step`."""
        try:
            return any(file.step == step and self._owns(file) for file in self._files())
        except OSError:  # `begin` logs the error
            return False

    def next_generation(self) -> None:
        """Begin another generation of the step, in which prompts with partial samples may get further samples."""
        self._generation += 1

    def samples(self, uids: Sequence[int]) -> list[list[Sample]] | None:
        """Return the samples of each prompt as this generation added them, or None if any prompt is missing."""
        while self._unread and not self._has_all(uids):  # after a change of the number of ranks
            self._read_next()
        return [self._known.samples[self._generation, uid] for uid in uids] if self._has_all(uids) else None

    def open_episodes(self, uids: Sequence[int]) -> None:
        """Read other ranks' files if this rank's files lack the episodes of any prompt."""
        while self._unread and set(uids) - {uid for uid, *_ in self._known.turns}:
            self._read_next()

    def turns(self, keys: Sequence[EpisodeKey]) -> list[Sample] | None:
        """Return the turns as they were added, each with its new tokens, or None if any is missing."""
        known = self._known.turns
        return [known[key] for key in keys] if all(key in known for key in keys) else None

    def calls(self, key: EpisodeKey, operation: str) -> dict[str, Any] | None:
        """Return the outcome of an episode's calls as it was added, or None."""
        return self._known.calls.get((key, operation)) or None  # `forget_calls` leaves an empty outcome

    def results(self, uids: Sequence[int]) -> list[list[RewardResult]] | None:
        """Return the rewards of the samples or episodes of each prompt, or None if any prompt has none."""
        known = [self._known.results[uid] for uid in uids if uid in self._known.results]
        return known if len(known) == len(uids) else None

    def add_samples(self, samples: Mapping[int, Sequence[Sample]]) -> None:
        """Append the samples of prompts, by uid, durably."""
        # Encode one prompt at a time: encoding the whole step would double the memory of its samples.
        if samples:
            self._append(
                records.samples_payload(self._generation, uid, of_prompt) for uid, of_prompt in samples.items()
            )
            self._known.newest |= dict.fromkeys(samples, self._generation)
            self._known.drop_results(samples)

    def add_results(self, results: Mapping[int, Sequence[RewardResult]]) -> None:
        """Append the rewards of prompts, by uid, durably.

        Call this after the samples or turns were added, in this step or an earlier one.
        """
        if results:
            newest = self._known.newest
            self._append(
                records.results_payload(newest.get(uid), uid, self._scored_by, rewards)
                for uid, rewards in results.items()
            )

    def add_turns(self, turns: Mapping[EpisodeKey, Sample]) -> None:
        """Append turns of episodes, each with its new tokens, durably."""
        self._append([records.turn_payload(key, sample) for key, sample in turns.items()])
        self._known.drop_results(uid for uid, *_ in turns)

    def add_calls(self, outcomes: Mapping[tuple[EpisodeKey, str], dict[str, Any]]) -> None:
        """Append the outcomes of episodes' calls, by turn and operation, durably."""
        self._append([records.calls_payload(key, operation, found) for (key, operation), found in outcomes.items()])
        self._known.drop_results(uid for (uid, *_), _ in outcomes)

    def forget_calls(self, calls: Iterable[tuple[EpisodeKey, str]]) -> None:
        """Forget outcomes that end the run with an error, so that the next start makes these calls again."""
        if found := {call: dict[str, Any]() for call in calls}:
            self.add_calls(found)

    def drop_published(self, up_to: int) -> None:
        """Remove the files of steps up to the newest published checkpoint or `up_to`, whichever is earlier."""
        try:
            newest = max((step_of(path) or 0 for path in scan(self._run_dir)), default=0)
            self._drop([file for file in self._files() if file.step <= min(newest, up_to)])
        except OSError as error:
            log.warning("An old file of the rollout journal can't be removed: %s", error)

    def _drop(self, files: Iterable[_File]) -> None:
        for file in filter(self._owns, files):
            remove_file(file.path, missing_ok=True)

    def _has_all(self, uids: Sequence[int]) -> bool:
        return all((self._generation, uid) in self._known.samples for uid in uids)

    def _read_next(self) -> None:
        """Read one more file of another rank. Its records do not replace records that were read before."""
        file = self._unread.pop()
        try:
            found = self._read(file)
            found.update(self._known)
            self._known = found
        except FileNotFoundError:
            pass  # the owner has just removed its file, for example after an upgrade
        except OSError as error:
            log.warning("%s can't be read, its samples are generated again: %s", file.path, error)

    def _owns(self, file: _File) -> bool:
        return file.rank % self._world_size == self._rank

    def _files(self) -> list[_File]:
        if not self._folder.is_dir():
            return []
        found = [(path, match) for path in self._folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [_File(path, int(match[1]), int(match[2])) for path, match in found]

    def _read(self, file: _File) -> _Stored:
        """Return the records in a file of this step. If the file does not fit the run, its owner drops the file."""
        content = file.path.read_bytes()
        payloads, whole = records.payloads(content)
        if None in payloads or whole < len(content):
            log.warning("%s has a damaged or torn record. The samples in it are generated again.", file.path)
        if self._owns(file) and whole < len(content):
            truncate(file.path, whole)  # remove the torn record, because records after it could not be read
        first = payloads[0] if payloads else None
        if first is None:
            self._drop([file])
            return _Stored()
        if not self._fits(records.from_payload(first)[0]):
            if self._owns(file):
                log.info(
                    "%s does not fit the run's current state. The run removes it and the files of later steps.",
                    file.path,
                )
            self._drop(other for other in self._files() if other.rank == file.rank and other.step >= file.step)
            return _Stored()
        if self._owns(file):
            # An earlier process may have been killed before it synced a record. The records read here must survive a
            # power cut.
            fsync_file(file.path)
        known = _Stored()
        for document, tail in (records.from_payload(payload) for payload in payloads[1:] if payload is not None):
            self._add_record(known, document, tail)
        return known

    def _add_record(self, known: _Stored, document: dict[str, Any], tail: bytes) -> None:
        if "turn" in document:
            uid, sample, attempt, turn, past = document["turn"]
            key = uid, sample, attempt, turn, past
            known.drop_results([uid])
            if "arrays" in document:
                (known.turns[key],) = records.samples_of(document, tail)
            else:
                known.calls[key, document["operation"]] = document["outcome"]
            return
        uid = document["uid"]
        if "arrays" in document:
            known.samples[document["call"], uid] = records.samples_of(document, tail)
            known.newest[uid] = document["call"]
            known.drop_results([uid])
        # Keep rewards only with the samples that they belong to, because the samples' record may be damaged.
        elif (known.newest.get(uid), self._scored_by) == (document["call"], document["scored_by"]):
            known.results[uid] = records.results_of(document)

    def _fits(self, header: dict[str, Any]) -> bool:
        # A process that has just resumed has no hash of the previous batch, and needs none: it loaded the weights.
        accepted = {"after": header.get("after")} if self._header["after"] is None else {}
        return header == self._header | accepted

    def _append(self, payloads: Iterable[bytes]) -> None:
        if not self._writable:
            return
        path = self._folder / f"step_{self._header['step']}.rank_{self._rank:05d}"
        try:
            if not path.exists():
                if not self._folder.is_dir():
                    make_dir_durably(self._folder)
                payloads = chain([records.to_payload(self._header)], payloads)
            announce("journal.append")
            self.written += append_durably(path, map(records.frame, payloads), event="journal.fsync")
        except OSError as error:
            self._writable = False
            log.warning("%s can't be written; after a crash its samples are generated again: %s", path, error)


def digests(groups: Iterable[Group]) -> dict[int, str]:
    """Return a hash of each group, by uid, over the exact bits of every value that an update uses."""
    found = {}
    for group in groups:
        arrays = to_arrays(group.samples)
        facts = group.prompt_ids, group.scores, group.baseline, layout_of(arrays)
        digest = xxhash.xxh3_128(repr(facts).encode())
        for content in to_bytes(arrays):
            digest.update(content)
        found[group.uid] = digest.hexdigest()
    return found


def combined(parts: Iterable[Mapping[int, str]]) -> str:
    """Return one hash of the `digests` of all ranks, independent of the placement of groups on ranks."""
    pairs = sorted((uid, digest) for part in parts for uid, digest in part.items())
    return xxhash.xxh3_128_hexdigest(repr(pairs).encode())
