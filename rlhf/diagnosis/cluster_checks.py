"""Runs the doctor as one rank of torchrun or srun: the checks of each node, and the checks between nodes."""

import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rlhf.checkpoint.start.domains import find_domains
from rlhf.config import Config
from rlhf.diagnosis.check_result import CheckResult, Outcome, counted, error, ok, one_line, warning
from rlhf.diagnosis.collective_test import run_collective_test
from rlhf.diagnosis.disk_checks import SETTING, existing_folder, probe_file
from rlhf.diagnosis.node_checks import check_node
from rlhf.diagnosis.store_transport import StoreTransport, open_store
from rlhf.diagnosis.version_checks import SHOWN, installed_versions
from rlhf.errors import UserError
from rlhf.ranks.coordinator import Coordinator, PeerError
from rlhf.ranks.lock import lock_if_free
from rlhf.ranks.parent import machine
from rlhf.ranks.transport import LostPeer

DEADLINE_S = 60.0
"""Longest wait for other ranks in one call, in seconds."""
CLOCK_WARNING_S, CLOCK_ERROR_S = 2.0, 300.0
"""Clock differences in seconds. Above the first, the logs of nodes are hard to compare. The second is well below the
difference at which object stores reject requests (S3: 900)."""
LEAVE_S = 5.0
"""Longest wait of rank 0, which may serve the store, for the other ranks' last call."""
ALL_NODES = "all nodes"


def check_cluster(config: Config, node_deadline_s: float) -> tuple[list[CheckResult], bool]:
    """Run all checks as one rank. Return the results that this rank has, and whether this rank prints them.

    Rank 0 receives all results. For a rank that never connects or stops answering, an error names the rank. If ranks
    are missing from the start, each node checks itself and prints its own results.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    results, nodes = list[CheckResult](), list[str]()
    try:
        transport = StoreTransport(open_store(DEADLINE_S), rank, world_size, DEADLINE_S)
        coordinator = Coordinator(transport)
        try:
            nodes += node_names(coordinator.all_gather((machine(), socket.gethostname())))
            _check(config, coordinator, nodes, results, node_deadline_s)
        finally:
            transport.leave(LEAVE_S)
    except LostPeer as problem:
        text = f"{problem}. Start the command on every node, and look at the output of the missing ranks."
        results.append(CheckResult("error", "nodes", text, ALL_NODES))
    except UserError as problem:
        results.append(CheckResult("error", "nodes", one_line(problem), ALL_NODES))
    except (OSError, PeerError) as problem:
        folder = f"{SETTING}={config.trainer.default_local_dir}"
        text = f"{folder}: {one_line(problem)}. Set it to a folder that all ranks can write."
        results.append(CheckResult("error", "disk", text, ALL_NODES))
    if nodes:
        return results, rank == 0
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    own = check_node(config, socket.gethostname(), node_deadline_s) if is_first else []
    return [*own, *results], is_first


def _check(
    config: Config, coordinator: Coordinator, nodes: Sequence[str], results: list[CheckResult], node_deadline_s: float
) -> None:
    """On rank 0, append the results of all checks; if a rank stops answering, only of the earlier checks. Collective.

    Args:
        nodes: the name of each rank's node.
    """
    first = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
    leaders, rank = sorted(first.values()), coordinator.rank
    coordinator.domains = find_domains(existing_folder(config.run_dir), coordinator)
    share = coordinator.domains.count(coordinator.domain) / coordinator.world_size
    own = check_node(config, nodes[rank], node_deadline_s, share=share) if rank in leaders else []
    for found in coordinator.collect(lambda: own) or []:
        results += found

    def add(check: str, outcomes: Iterable[Outcome]) -> None:
        if coordinator.is_leader:
            results.extend(CheckResult(each.level, check, each.text, ALL_NODES) for each in outcomes)

    add("nodes", [ok(f"{counted(coordinator.world_size, 'rank')} on {counted(len(leaders), 'node')}")])
    if len(leaders) > 1:
        versions = coordinator.collect(lambda: installed_versions(SHOWN)) or []
        add("equal versions", version_differences({nodes[at]: versions[at] for at in leaders if versions}))
        offsets, uncertain_s = clock_offsets(coordinator)
        add("clocks", clock_outcomes({nodes[at]: offsets[at] for at in leaders}, uncertain_s))
        add("shared disk", _shared_disk(config.run_dir, coordinator, nodes))
    members = leaders if len(leaders) > 1 else range(len(nodes))
    add("collectives", run_collective_test(config.trainer, coordinator, members))


def node_names(machines: Sequence[tuple[str, str]]) -> list[str]:
    """Return the name of each rank's node. Machines that share a host name also get their first rank's number."""
    first = {identity: rank for rank, (identity, _) in reversed(list(enumerate(machines)))}
    hosts = [machines[rank][1] for rank in first.values()]
    return [host if hosts.count(host) == 1 else f"{host} (rank {first[identity]})" for identity, host in machines]


def version_differences(versions: Mapping[str, Mapping[str, str]]) -> Iterator[Outcome]:
    """Yield an error for each package whose version differs between nodes.

    Args:
        versions: node -> package -> version.
    """
    found = False
    for package in SHOWN:
        by_version: dict[str, list[str]] = {}
        for node, installed in versions.items():
            by_version.setdefault(installed.get(package, "not installed"), []).append(node)
        if len(by_version) > 1:
            found = True
            shown = "; ".join(f"{number} on {', '.join(names[:3])}" for number, names in by_version.items())
            yield error(f"{package} differs between nodes: {shown}. Install the same version on every node.")
    if not found:
        yield ok("torch and the other packages are equal on all nodes")


def clock_offsets(coordinator: Coordinator) -> tuple[list[float], float]:
    """Return by how many seconds each rank's clock is ahead of rank 0's, and the uncertainty. Collective."""
    coordinator.all_gather(None)  # all ranks return from this call at nearly the same time
    begin = time.monotonic()
    clocks = coordinator.all_gather(time.time())
    took = max(coordinator.all_gather(time.monotonic() - begin))
    return [clock - clocks[0] for clock in clocks], took


def clock_outcomes(offsets: Mapping[str, float], uncertain_s: float) -> Iterator[Outcome]:
    """Yield a finding for each node whose clock differs from the first node's by more than CLOCK_WARNING_S.

    Args:
        offsets: node -> seconds ahead of the first node.
        uncertain_s: error of each offset.
    """
    found = False
    for node, offset in offsets.items():
        beyond = abs(offset) - uncertain_s
        if beyond > CLOCK_WARNING_S:
            found = True
            level = error if beyond > CLOCK_ERROR_S else warning
            yield level(
                f"the clock of {node} differs from the first node's by {offset:+.1f} s. Synchronise it: chronyc "
                "makestep, or ntpd."
            )
    if not found:
        yield ok(f"within {max(map(abs, offsets.values())) + uncertain_s:.1f} s of each other")


def _shared_disk(run_dir: Path, coordinator: Coordinator, nodes: Sequence[str]) -> list[Outcome]:
    """Report which nodes share the run directory, and whether they see each other's file locks. Collective."""
    by_domain: dict[int, list[str]] = {}
    for rank, domain in enumerate(coordinator.domains):
        if nodes[rank] not in by_domain.setdefault(domain, []):
            by_domain[domain].append(nodes[rank])
    unseen = _lock_ignored_by(run_dir, coordinator, nodes)
    if unseen:
        return [
            error(
                f"{', '.join(unseen)} can lock a file that another node has locked, so two runs could write into one "
                f"directory. Mount the file system without local_lock and nolock, or set another {SETTING}."
            )
        ]
    if len(by_domain) == 1:
        return [ok(f"all nodes share {run_dir}, with locks")]
    groups = "; ".join(", ".join(names) for names in by_domain.values())
    return [ok(f"{len(by_domain)} separate disks ({groups}): each stores the files of its own ranks")]


def _lock_ignored_by(run_dir: Path, coordinator: Coordinator, nodes: Sequence[str]) -> list[str]:
    """Return the nodes that can lock a file that the first node on the same disk has locked. Collective."""
    folder = existing_folder(run_dir)
    with probe_file(folder) as own:
        name = coordinator.all_gather(own.name)[coordinator.domain]
        path, ignored = folder / name, False
        if coordinator.leads_domain:
            with lock_if_free(path, SETTING):
                coordinator.all_gather(None)  # locked
                coordinator.all_gather(None)  # all others have tried
        else:
            coordinator.all_gather(None)
            if nodes[coordinator.rank] != nodes[coordinator.domain]:
                with lock_if_free(path, SETTING) as free:
                    ignored = free
            coordinator.all_gather(None)
        return sorted({nodes[rank] for rank, each in enumerate(coordinator.all_gather(ignored)) if each})
