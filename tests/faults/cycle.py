"""Short kill campaigns of every profile in turn, at named events and at random instants, for a given time.

The command is `python -m tests.faults.campaign --hours H`, which explains it.
"""

import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

Campaign = Callable[[Path, int], list[str]]
"""Runs a short campaign in a new folder with a seed, and returns the problems, one per line."""


class Cycle:
    """Runs each kind of campaign for each profile, then repeats all of them with the next seed.

    Args:
        packages: the packages that each profile needs. A profile with a missing package is skipped.
    """

    def __init__(
        self,
        campaigns: Mapping[str, Mapping[str, Campaign]],
        packages: Mapping[str, Collection[str]],
        report: Callable[[str], None],
    ) -> None:
        self._report = report
        self._missing = {name: [each for each in of if find_spec(each) is None] for name, of in packages.items()}
        self._campaigns = {name: of for name, of in campaigns.items() if not self._missing.get(name)}
        self._done: dict[tuple[str, str], list[int]] = defaultdict(list)

    def run(self, folder: Path, hours: float, seed: int) -> list[str]:
        """Start campaigns until `hours` are over or one fails. Return the problems of the failed campaign."""
        for name, missing in self._missing.items():
            if missing:
                self._report(f"{name}: skipped, because {' and '.join(missing)} cannot be imported")
        end = time.monotonic() + 3600 * hours
        for name, kind, number in self._jobs(seed):
            if time.monotonic() > end:
                return []
            self._report(f"{name}, {kind}, seed {number}")
            own = folder / f"{name}-{kind.replace(' ', '_')}-{number}"
            own.mkdir()
            if problems := self._campaigns[name][kind](own, number):
                return [f"{name}, {kind}, seed {number}, in {own}: {problem}" for problem in problems]
            self._done[name, kind].append(number)
            shutil.rmtree(own)
        return []

    def _jobs(self, seed: int) -> Iterator[tuple[str, str, int]]:
        """Yield profile, kind and seed: all pairs with the first seed, then all pairs with the next seed."""
        kinds = list(dict.fromkeys(kind for of in self._campaigns.values() for kind in of))
        while self._campaigns:
            yield from ((name, kind, seed) for kind in kinds for name in self._campaigns)
            seed += 1

    def covered(self, name: str, kind: str) -> list[int]:
        """Return the seeds of a profile's finished campaigns of one kind."""
        return self._done[name, kind]
