"""Copies of nodes' files in other nodes' memory: on which nodes, and which rank sends which block to which rank."""

import random
from collections import Counter

import pytest

from rlhf.checkpoint.commit.manifest import DOMAINS
from rlhf.checkpoint.save.node_copies import copied_to, route, with_copies
from rlhf.config.rules.validate import validate
from rlhf.errors import UserError
from rlhf.planning.check import check_snapshots, plan_of
from rlhf.ranks.memory_folder import SNAPSHOTS
from rlhf.storage.hashing import BLOCK, HASH_DIGITS
from tests.support.checkpoints import make_config
from tests.support.small_disks import small_disk


def entry(blocks: int, *nodes: int) -> dict:
    size = blocks * BLOCK - 5
    return {"size": size, "xxh3_128": "0" * HASH_DIGITS * blocks} | ({DOMAINS: list(nodes)} if nodes else {})


def test_copies_are_on_the_next_nodes_of_the_ring():
    files = {"a": entry(1, 0), "b": entry(1, 4), "c": entry(1, 6), "everywhere": entry(1)}
    nodes = [0, 4, 6]
    one, two = with_copies(files, nodes, 1), with_copies(files, nodes, 2)
    assert {name: each.get(DOMAINS) for name, each in one.items()} == {
        "a": [0, 4],
        "b": [4, 6],
        "c": [0, 6],
        "everywhere": None,
    }
    assert all(DOMAINS not in each for each in two.values()), "a file that is on all nodes names none"
    assert with_copies(one, nodes, 1) == one, "a linked file has its copies already"
    assert files["a"][DOMAINS] == [0]
    assert copied_to(6, nodes, 2) == [0, 4]


@pytest.mark.parametrize("seed", range(40))
def test_each_missing_block_is_sent_once_to_one_rank_at_a_time(seed):
    chance = random.Random(seed)
    counts = [chance.randint(1, 4) for _ in range(chance.randint(2, 6))]
    domains = [sum(counts[:node]) for node, count in enumerate(counts) for _ in range(count)]
    nodes = sorted(set(domains))
    copies = chance.randint(1, len(nodes) - 1)
    files = {f"{node}/{n}": entry(chance.randint(1, 5), node) for node in nodes for n in range(3)} | {"x": entry(2)}
    arrived: Counter[tuple[int, str, int]] = Counter()
    for sender in nodes:
        for receiver in copied_to(sender, nodes, copies):
            peers = []
            for rank, domain in enumerate(domains):
                part = route(files, copies, sender, receiver, domains, rank)
                if domain == sender and part.blocks:
                    assert route(files, copies, sender, receiver, domains, part.peer).blocks == part.blocks
                    assert domains[part.peer] == receiver
                    peers.append(part.peer)
                    arrived.update((receiver, *block) for block in part.blocks)
            assert len(set(peers)) == len(peers)
    after = with_copies(files, nodes, copies)
    expected = {
        (node, name, number)
        for name in files
        for node in after[name].get(DOMAINS, nodes)
        if node not in files[name].get(DOMAINS, nodes)
        for number in range(-(-files[name]["size"] // BLOCK))
    }
    assert arrived == Counter(expected)
    assert len(expected) > 0


@pytest.mark.parametrize(
    ("replicas", "nnodes", "environ", "remedy"),
    [
        (1, 1, {}, r"replicas=1.* one node\. Set checkpoint\.memory\.replicas=0, or trainer\.nnodes"),
        (2, 2, {}, r"replicas=2: the run has 2 nodes.* at most 1"),
        (2, 1, {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, r"the run has 2 nodes"),
        (1, 2, {}, None),
        (1, 1, {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, None),
    ],
)
def test_more_copies_than_other_nodes_are_refused(replicas, nnodes, environ, remedy, tmp_path):
    config = make_config(tmp_path)
    config.trainer.nnodes = nnodes
    config.checkpoint.memory.freq, config.checkpoint.memory.replicas = 1, replicas
    if remedy is None:
        validate(config, environ)
    else:
        with pytest.raises(UserError, match=remedy):
            validate(config, environ)


def test_copies_have_no_effect_without_snapshots(tmp_path):
    config = make_config(tmp_path)
    config.checkpoint.memory.replicas = 1
    with pytest.raises(UserError, match=r"replicas=1.*checkpoint\.memory\.freq=1"):
        validate(config)


def test_the_plan_counts_copies_and_refuses_before_a_start(tmp_path):
    config = make_config(tmp_path)
    config.checkpoint.memory.freq = 1
    without = plan_of(config)[1]
    config.checkpoint.memory.replicas = 2
    plan = plan_of(config)[1]
    part = plan.checkpoint.snapshot
    assert part == without.checkpoint.snapshot > 0
    more = plan.peak.items["snapshots in memory"] - without.peak.items["snapshots in memory"]
    assert more == 2 * (SNAPSHOTS + 1) * part
    with small_disk(tmp_path / "memory", 2 + without.checkpoint.published // 2**20) as small:
        config.checkpoint.memory.dir = str(small)
        with pytest.raises(UserError, match=r"2 other nodes.*checkpoint\.memory\.replicas=0 or"):
            check_snapshots(config, plan)
        check_snapshots(config, without)
