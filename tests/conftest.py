"""Fixtures of all tests, and the order in which files start."""

import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlhf.ranks.stop import STOP_SIGNALS
from tests.support.launching import write_sums
from tests.support.peers import PEERS_PYTHON
from tests.support.undisturbed import Undisturbed, session_folder

# Set before torch is imported, for this process and for all processes that tests start. Tests start many small
# processes at once, which are very slow if their threads compete for cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Under nohup or in the background, pytest ignores these signals, and child processes would inherit this. But tests stop
# child processes with these signals.
for number in STOP_SIGNALS:
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
# Under xdist a free worker takes the next file. The longest files start first, so that no worker runs one alone at the
# end.
LONGEST_FIRST = (
    "test_vllm_servers",
    "test_vllm_runs",
    "test_vllm_run",
    "test_deepspeed",
    "test_lora",
    "test_run_dir_races",
    "test_deepspeed_run",
    "test_hung_rank",
    "test_interop_deepspeed",
    "test_interop_fsdp",
    "test_kubernetes_pods",
    "test_wandb",
    "test_mlflow",
    "test_alert_runs",
    "test_settings_act",
    "test_evaluate",
    "test_allowed_changes",
    "test_model_files",
    "test_launcher",
    "test_last_save",
    "test_algorithm_entries",
    "test_domain_faults",
    "test_preemption",
    "test_portability",
    "test_server_rollouts",
    "test_server_rollout_kills",
    "test_living_servers",
    "test_damage_while_loading",
    "test_training",
    "test_docs_metrics",
    "test_supervisor",
    "test_doctor",
    "test_update_invariance",
    "test_domains",
    "test_journal_kills",
    "test_odd_ranks",
    "test_hsdp",
    "test_offload",
    "test_embedded_engine",
    "test_dynamic_sampling",
    "test_compositions",
    "test_guards_act",
    "test_reshard",
    "test_resume_rules",
    "test_tensorboard",
    "test_docs_rewards",
    "test_two_nodes",
    "test_remote",
    "test_remote_start",
    "test_torchrun",
    "test_ranks_network",
    "test_import_run",
    "test_import_of_peers",
    "test_verb_kills",
    "test_reward_verifiers",
    "test_own_data_runs",
    "test_attention_choice",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full-product", action="store_true", help="run all combinations, not a covering set")


class FailuresAtOnce:
    """Prints each failure when it happens, because pytest prints none if it is killed before its end."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.ensure_newline()
            self._terminal.write_line(f"{report.nodeid} failed in its {report.when}:", red=True)
            self._terminal.write_line(report.longreprtext)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and os.environ.get("CI"):
        config.pluginmanager.register(FailuresAtOnce(terminal))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the longest files first. Skip tests that need vLLM or other trainers if these are not installed."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    if find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip("needs vLLM, which has an environment of its own (.ci/run)"))
    if PEERS_PYTHON not in os.environ:
        for item in items:
            if item.get_closest_marker("peers"):
                item.add_marker(pytest.mark.skip(f"needs other trainers' environment in ${PEERS_PYTHON} (.ci/run)"))


def pytest_collection_finish() -> None:
    """Exclude imported modules and collected tests, which live to the end, from later garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Restore the logging set-up after each test, because a start of training changes it."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture(scope="session")
def launches() -> Iterator[ThreadPoolExecutor]:
    """A pool for launches that may run in parallel: two at a time, for two cores, in the order of submission."""
    with ThreadPoolExecutor(2) as pool:
        yield pool
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = session_folder(tmp_path_factory) / "sums.jsonl"
    # Another process of the session may write the same file at this time, so rename it into place.
    return path if path.exists() else write_sums(tmp_path_factory.mktemp("data") / "sums.jsonl").replace(path)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, sums: Path) -> Undisturbed:
    return Undisturbed(session_folder(tmp_path_factory), sums)


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits between retries of a remote, and remove all injected failures (`FAULTS`)."""
    # Imported here because both import torch, and OMP_NUM_THREADS must be set before.
    from rlhf.checkpoint.remote import retries
    from tests.support.remotes import FAULTS

    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(retries, "LONGEST_WAIT_S", 0.05)
    monkeypatch.setattr(retries, "POLL_S", 0.02)
    FAULTS.__init__()  # type: ignore[misc]


@pytest.fixture
def folder_url(tmp_path: Path) -> str:
    """The URL of a folder that is used as `checkpoint.remote`."""
    return f"file://{tmp_path}/remote"


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a verb of `python -m rlhf.checkpoint` in this process, and return exit code, stdout and stderr."""
    from rlhf.checkpoint.__main__ import main

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run
