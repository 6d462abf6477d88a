"""Launches that several test files share: two runs that nothing disturbs, made side by side."""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.launching import Ended, small, train, write_sums

# For this process, before it imports torch, and for all that tests start: they are many small processes, and threads that wait for
# a core make all of them crawl.
os.environ.setdefault("OMP_NUM_THREADS", "1")
EXPORT = "checkpoint.contents=[model,optimizer,extra,hf_model]"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs vLLM is skipped where it is not."""
    if find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip("needs vLLM, which has an environment of its own (.ci/run)"))


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """A test that sets up logging, as a start of training does, leaves it as it was."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture(scope="session")
def launches() -> Iterator[ThreadPoolExecutor]:
    """Where tests put launches that may run side by side; two, for two cores. What was put first starts first."""
    with ThreadPoolExecutor(2) as pool:
        yield pool
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sums(tmp_path_factory.mktemp("data") / "sums.jsonl")


@dataclass(frozen=True)
class Undisturbed:
    """Runs that nothing interrupts, by their number of ranks, with an exported model in each checkpoint."""

    folder: Path
    ends: dict[int, Future[Ended]]

    def run_dir(self, nproc: int) -> Path:
        """The directory of the finished run on `nproc` ranks."""
        end = self.ends[nproc].result()
        assert end.code == 0, end.output
        return self.folder / "rlhf" / f"undisturbed_{nproc}"


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, launches: ThreadPoolExecutor, sums: Path) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")

    def start(nproc: int) -> Future[Ended]:
        name, ranks = f"undisturbed_{nproc}", f"trainer.nproc={nproc}"
        return launches.submit(train, [*small(folder, name, sums), ranks, EXPORT])

    return Undisturbed(folder, {nproc: start(nproc) for nproc in (1, 2)})
