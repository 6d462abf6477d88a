"""Fixtures of all tests, and the order in which files start."""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.launching import write_sums
from tests.support.undisturbed import Undisturbed, session_folder

# For this process, before it imports torch, and for all that tests start: they are many small processes, and threads that wait for
# a core make all of them crawl.
os.environ.setdefault("OMP_NUM_THREADS", "1")


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
    path = session_folder(tmp_path_factory) / "sums.jsonl"
    # Another process of the session may be doing the same.
    return path if path.exists() else write_sums(tmp_path_factory.mktemp("data") / "sums.jsonl").replace(path)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, sums: Path) -> Undisturbed:
    return Undisturbed(session_folder(tmp_path_factory), sums)
