from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.config import RolloutConfig
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.transport import Transport
from rlhf.rollout.policy_files import PolicyFiles
from rlhf.rollout.vllm.colocated import VllmEngine, WeightsInFiles
from rlhf.rollout.vllm.process_state import ProcessState
from rlhf.storage.scratch import Scratch


def test_the_end_of_vllm_in_a_rank_destroys_no_process_groups(tmp_path):
    """The destruction is collective, so a rank that failed alone would wait for its peers."""
    ended: list[str] = []
    executor: Any = SimpleNamespace(
        driver_worker=SimpleNamespace(shutdown=lambda: ended.append("worker")),
        shutdown=lambda: pytest.fail("from vLLM 0.33 on, this destroys process groups"),
    )
    llm = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor))
    engine = VllmEngine(
        llm,
        ProcessState({}, compiles=True),
        Scratch(),
        RolloutConfig(),
        PolicyFiles({}, tmp_path, [1], 16),
        WeightsInFiles({}, {}),
        Coordinator(Transport()),
        range(1),
    )
    engine.close()
    engine.close()
    assert ended == ["worker"]
