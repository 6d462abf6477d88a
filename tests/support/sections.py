"""Calls the checkpoint's entry points from a test's whole configuration: each gets its own sections."""

from pathlib import Path

from rlhf.checkpoint.remote import remote_start
from rlhf.checkpoint.remote.copies import RemoteCopies
from rlhf.checkpoint.remote.remote_store import RemoteStore, remote_url
from rlhf.checkpoint.remote.retries import Retries
from rlhf.checkpoint.start import preparation
from rlhf.config import Config
from rlhf.config.compare import ResolvedConfig
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.transport import Transport


def prepare(config: Config, coordinator: Coordinator | None = None) -> None:
    """Prepare the run directory; without a coordinator, in this process only."""
    single_process = Coordinator(Transport())
    preparation.prepare(
        config.run_dir, config.trainer, config.checkpoint, ResolvedConfig.of(config), coordinator or single_process
    )


def finished_step(config: Config, coordinator: Coordinator | None = None) -> int | None:
    single_process = Coordinator(Transport())
    return preparation.finished_step(
        config.run_dir, config.trainer, ResolvedConfig.of(config), coordinator or single_process
    )


def remote_copies(config: Config) -> RemoteCopies:
    return RemoteCopies(config.run_dir, config.trainer, config.checkpoint)


def remote_store(config: Config) -> RemoteStore:
    return RemoteStore(remote_url(config.trainer, config.checkpoint))


def open_remote(config: Config) -> RemoteStore | None:
    return remote_start.open_remote(config.run_dir, config.trainer, config.checkpoint)


def restore(
    store: RemoteStore | None, config: Config, source: Path | None, coordinator: Coordinator | None = None
) -> int | None:
    single_process = Coordinator(Transport())
    return remote_start.restore(store, config.run_dir, config.trainer, source, coordinator or single_process)


def claim(store: RemoteStore, config: Config, retries: Retries) -> None:
    remote_start.claim(store, config.run_dir, config.trainer, retries)
