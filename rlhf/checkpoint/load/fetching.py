"""Copies blocks of a checkpoint between nodes' disks, from leader to leader, when a node's disk lacks them."""

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from rlhf.checkpoint.load.block_messages import BlockMessage
from rlhf.checkpoint.load.locations import FileLocations
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.files import remove, write_range
from rlhf.storage.hashing import BLOCK
from rlhf.storage.layout import TEMPORARY, fresh_name
from rlhf.storage.reading import CheckedFiles

log = logging.getLogger(__name__)


class Fetched:
    """Fetches blocks of files that a storage domain lacks from the domains that have them, for one load.

    Stores the blocks in sparse files in a temporary directory, and never writes into the checkpoint. Leaders send one
    block of 4 MiB at a time, so memory does not grow with the files.
    """

    def __init__(self, located: FileLocations, coordinator: Coordinator) -> None:
        self._located, self._coordinator = located, coordinator
        self._own = located.by_domain.get(coordinator.domain, frozenset())
        self._root: Path | None = None
        self._got: dict[int, set[tuple[str, int]]] = {domain: set() for domain in coordinator.domain_leaders}
        self.bytes = 0
        """Bytes that this rank received as a leader."""

    def get(self, files: CheckedFiles, wanted: Mapping[str, Iterable[int]]) -> None:
        """Fetch the blocks in `wanted` (file -> block numbers) that this domain lacks, and make `files` read them from
        the temporary directory. Collective. Raises DamagedCheckpoint on every rank if a block differs from its hash,
        and OSError if a disk fails."""
        if len(self._got) == 1:
            return
        lacking = {name: sorted(blocks) for name, blocks in wanted.items() if name not in self._own}
        receivers: dict[tuple[str, int], set[int]] = {}
        for domain, requests in zip(self._coordinator.domains, self._coordinator.all_gather(lacking), strict=True):
            for block in ((name, number) for name, numbers in requests.items() for number in numbers):
                if block not in self._got[domain]:
                    self._got[domain].add(block)
                    receivers.setdefault(block, set()).add(domain)
        if receivers:
            if self._root is None:
                name = fresh_name(TEMPORARY, f"fetched-{self._located.path.name}")
                self._root = self._located.path.parent / self._coordinator.broadcast(name)
            self._coordinator.everywhere(partial(self._exchange, receivers))
        if self._root is not None:
            files.find_below(self._root, lacking)

    def _exchange(self, receivers: dict[tuple[str, int], set[int]]) -> None:
        """Send and receive this rank's blocks. All leaders process the blocks in the same order, and continue after an
        error, so that no leader waits forever."""
        if not self._coordinator.leads_domain:
            return
        me, own = self._coordinator.rank, CheckedFiles(self._located.path, self._located.manifest.files)
        message = BlockMessage()
        problem: Exception | None = None
        for (name, number), domains in sorted(receivers.items()):
            source = self._located.source_domain(name)
            if me == source:
                problem = message.load(own, name, number) or problem
                for domain in sorted(domains):
                    self._coordinator.send(message.tensor, domain)
            elif me in domains:
                self._coordinator.receive(message.resize(own, name, number), source)
                if message.has_block and problem is None:
                    try:
                        self._store(name, number, message.content)
                    except OSError as error:
                        problem = error
        if problem is not None:
            raise problem

    def _store(self, name: str, number: int, content: memoryview) -> None:
        assert self._root is not None
        write_range(self._root / name, self._located.manifest.files[name]["size"], number * BLOCK, content)
        self.bytes += len(content)

    def remove(self) -> None:
        """Remove the temporary directory. No rank of the domain may read from it any more."""
        if self._coordinator.leads_domain and self._root is not None and self._root.exists():
            try:
                remove(self._root)
            except OSError as error:
                log.warning("%s could not be removed (%s); the next start removes it.", self._root, error)
