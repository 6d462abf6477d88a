"""Groups of ranks, one for each purpose. No module outside `rlhf.ranks` asks torch.distributed for a group."""

import ast
from pathlib import Path
from typing import Any

import torch

import rlhf
from rlhf.ranks import dims
from rlhf.ranks.collectives import gather_from
from tests.support.checkpoints import run_ranks

PACKAGE = Path(rlhf.__file__).parent
GLUE = {
    "diagnosis/collective_test.py": "tests collectives between ranks that train nothing",
    "diagnosis/store_transport.py": "a store, because the checks test the groups",
    "launch/node_watchdog.py": "a store between processes that are not ranks, and in no group",
}
"""Modules outside of `rlhf.ranks` that call torch.distributed, and why."""
ABOUT_TENSORS = {"fsdp", "tensor", "checkpoint", "DistError"}
"""Parts of torch.distributed that any module may use: engines, sharded tensors and files, not ranks of the run."""


def seen(rank: int) -> dict[str, Any]:
    device = torch.device("cpu")
    groups = {"everyone": dims.everyone(), "data": dims.data(), "one copy": dims.model(device)}
    groups["replica"] = dims.model(device, 2)
    return {
        name: (group.rank, list(group.members), gather_from(group, torch.tensor([rank])).flatten().tolist())
        for name, group in groups.items()
    }


def test_each_purpose_has_its_group(tmp_path):
    for rank, found in enumerate(run_ranks(4, seen, deadline_s=60, join=tmp_path)):
        every = [0, 1, 2, 3]
        assert found["everyone"] == found["data"] == found["one copy"] == (rank, every, every)
        mine = every[rank // 2 * 2 :][:2]
        assert found["replica"] == (rank % 2, mine, mine)


def test_a_single_process_is_its_own_group():
    single = dims.data()
    assert (single.rank, single.size, single.of(["its own"])) == (0, 1, ["its own"])


def used_of_torch_distributed(code: str) -> set[str]:
    """Return the names of torch.distributed that a module uses, for every form of import."""
    tree, aliases, used = ast.parse(code), {"torch.distributed"}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname for alias in node.names if alias.name == "torch.distributed" and alias.asname}
            used |= {a.name.split(".")[2] for a in node.names if a.name.startswith("torch.distributed.")}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            aliases |= {alias.asname or alias.name for alias in node.names if alias.name == "distributed"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            inside = (node.module or "").split(".")[2:]
            used |= {inside[0]} if inside else {alias.name for alias in node.names}
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return used | {node.attr for node in attributes if ast.unparse(node.value) in aliases}


def test_how_torch_distributed_may_be_imported():
    for code in (
        "import torch.distributed as dist\ndist.get_rank()",
        "import torch\ntorch.distributed.get_rank()",
        "from torch import distributed\ndistributed.get_rank()",
        "from torch.distributed import get_rank",
    ):
        assert used_of_torch_distributed(code) == {"get_rank"}


def test_only_rlhf_ranks_uses_groups_of_torch_distributed():
    users = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith("ranks/") and (used := used_of_torch_distributed(path.read_text()) - ABOUT_TENSORS):
            users[name] = used
    assert users.keys() == GLUE.keys(), users
