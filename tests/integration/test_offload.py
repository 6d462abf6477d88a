"""Weights and moments that leave the device between phases: the same bits in every engine, through saves and a
rollback, and nothing is left behind."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.backends.base import TrainingBackend
from rlhf.backends.fsdp2 import Fsdp2Backend, Fsdp2Model
from rlhf.backends.offload import Offload
from rlhf.config import Config, RefConfig, TrainedFsdpConfig
from rlhf.errors import UserError
from rlhf.learning.reference import Reference
from tests.support.checkpoints import equal_bits, make_checkpointer, make_config, resume, run_ranks
from tests.support.engines import CPU, ENGINES, NEEDS_DEEPSPEED, make_engine, state_of, tokens, train
from tests.support.page_locks import stand_in
from tests.support.refusals import says, user_error
from tests.support.tiny_updates import tiny_qwen2

KINDS = ("fsdp2", "zero2", "zero3")
MORE_KINDS = ("fsdp2-bfloat16", "zero0-bfloat16", "zero1-bfloat16", "zero3-bfloat16")
DEADLINE_S = 300


def test_a_storage_shared_by_views_is_offloaded_once():
    flat = torch.arange(24.0)
    tied, rows, other = torch.nn.Parameter(flat[3:9]), flat.view(4, 6)[:, 1:3], torch.ones(3, dtype=torch.bfloat16)
    before = [tensor.clone() for tensor in (tied, rows, other)]
    offload = Offload(lambda: [tied, rows, other, flat[:0]], "param_offload")
    offload.move_to_host()
    assert [flat.untyped_storage().nbytes(), other.untyped_storage().nbytes()] == [0, 0]
    held = [offload.current(tensor) for tensor in (tied, rows, other)]
    assert all(torch.equal(*pair) for pair in zip(held, before, strict=True))
    offload.current(flat)[4] = 40.0
    with offload.on_device():
        with offload.on_device():
            assert tied.tolist() == [3, 40, 5, 6, 7, 8]
        assert rows.tolist() == [[1, 2], [7, 8], [13, 14], [19, 20]]
        assert offload.current(rows) is rows
    assert flat.untyped_storage().nbytes() == 0


def test_frozen_tensors_are_copied_to_the_host_once():
    frozen, trained = torch.arange(4.0), torch.ones(2)
    offload = Offload(lambda: [frozen, trained], "param_offload", lambda: [frozen])
    offload.move_to_host()
    offload.current(frozen)[1] = 7.0  # as a load does
    for step in range(3):
        with offload.on_device():
            assert frozen.tolist() == [0, 7, 2, 3]
            assert trained.tolist() == [1 + step] * 2
            trained += 1
            frozen.fill_(-1)  # no code does this: the value shows that nothing is copied back
        assert [frozen.untyped_storage().nbytes(), trained.untyped_storage().nbytes()] == [0, 0]
        assert offload.current(frozen).tolist() == [0, 7, 2, 3]


def test_an_error_leaves_nothing_half_moved():
    weight, error = torch.ones(8), RuntimeError("out of memory")
    offload = Offload(lambda: [weight], "param_offload")
    offload.move_to_host()
    with pytest.raises(RuntimeError) as raised, offload.on_device():
        raise error
    assert raised.value is error
    assert weight.tolist() == [1] * 8
    with offload.on_device():
        weight += 1
    assert offload.current(weight).tolist() == [2] * 8


def test_too_little_host_memory_is_a_user_error(monkeypatch):
    weight = torch.ones(8)

    def full(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117]")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(UserError, match=r"optimizer_offload=true: the host has too little memory .*Set it to false"):
        Offload(lambda: [weight], "optimizer_offload").move_to_host()
    assert weight.tolist() == [1] * 8


def test_page_locked_copies_share_blocks_that_end_with_the_offload(monkeypatch):
    locks, offload = stand_in(monkeypatch), Offload(None, "param_offload")
    offload._pin({})
    offload._pin({1: 100, 2: 5000, 3: 1})
    offload._pin({4: 64})
    assert {key: copy.nbytes for key, copy in offload._pinned.items()} == {1: 100, 2: 5000, 3: 1, 4: 64}
    assert len(locks.spans) == 2
    for key, copy in offload._pinned.items():
        copy.fill_(key)
    assert all(set(copy.tolist()) == {key} for key, copy in offload._pinned.items())
    del offload, copy
    assert not locks.spans
    locks.failure = 2
    message = user_error(Offload(None, "param_offload")._pin, {1: 9})
    says(message, "param_offload=true", "cudaHostRegister: error 2", "Set it to false")
    assert locks.last_error == 0


def on_device(backend: TrainingBackend) -> dict[str, int]:
    """Return the bytes of this rank's weights and moments on the device."""
    if isinstance(backend, Fsdp2Backend):
        weights = [*backend._local_weights()]
        moments = [*backend._local_moments()]
    else:
        state: Any = backend._state  # type: ignore[attr-defined]
        weights = [*state._pass_tensors()]
        moments = [*state._moment_tensors(), *state._master_tensors()]
    storages = {"weights": weights, "optimizer": moments}
    return {
        name: sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())
        for name, tensors in storages.items()
    }


def config_of(folder: Path, kind: str) -> Config:
    config = make_config(folder)
    config.backend = ENGINES[kind]
    config.checkpoint.contents = ["model", "optimizer", "extra", "hf_model"]
    config.checkpoint.async_save = True
    return config


def one_life(kind: str, offload: TrainedFsdpConfig, folder: Path) -> dict[str, Any]:
    """Train two steps, save during a third step, roll back to the save, and train two more steps. Return all values,
    which must not depend on `offload`, and the bytes left on the device."""
    backend, other = make_engine(kind, seed=1, offload=offload), make_engine(kind, seed=2, offload=offload)
    config, seen, left = config_of(folder, kind), [], [on_device(backend)]

    def phase(*steps: int) -> None:
        with backend.on_device():
            before = on_device(backend)
            seen.append(train(backend, *steps))
            left.append(before | {"optimizer": on_device(backend)["optimizer"]})
        left.append(on_device(backend))
        seen.append({name: tensor.clone() for name, tensor in backend.full_tensors()})

    phase(0, 1)
    saver = make_checkpointer(config, backend, 2)
    saver.save(2)
    seen.append(state_of(backend))
    phase(2)
    saver.finish()
    assert saver.resume()
    seen.append(state_of(backend))
    assert resume(config, other) == 2
    seen.append(state_of(other))
    phase(2, 3)
    seen.append({name: tensor.clone() for name, tensor in backend.full_tensors(torch.bfloat16)})
    kept = {"param_offload": offload.param_offload, "moves": True}
    frozen = Fsdp2Model(tiny_qwen2(3).requires_grad_(False), ENGINES[kind], CPU, **kept)
    average = Reference(frozen, 1.0, 64, RefConfig(update_freq=1, alpha=0.3))
    average.maybe_update(backend, 1)
    left.append({"reference": sum(t.untyped_storage().nbytes() for t in frozen._local_weights())})
    seen.append({name: tensor.clone() for name, tensor in frozen.full_tensors()})
    still = Fsdp2Model(tiny_qwen2(4).requires_grad_(False), ENGINES[kind], CPU, param_offload=offload.param_offload)
    for _ in range(2):
        with still.on_device(), torch.no_grad():
            seen.append(still.module(input_ids=tokens(0), use_cache=False).logits)
        seen.append({name: tensor.clone() for name, tensor in still.full_tensors()})
    message = ""
    try:
        backend.module(input_ids=tokens(0), use_cache=False)
    except RuntimeError as error:
        message = str(error)
    return {"seen": seen, "left": left, "message": message}


def lives(rank: int, kinds: tuple[str, ...], settings: list[TrainedFsdpConfig], folder: str) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)  # it also fills fresh memory with NaN
    return {
        kind: [one_life(kind, offload, Path(folder, kind, str(i))) for i, offload in enumerate(settings)]
        for kind in kinds
    }


@NEEDS_DEEPSPEED
@pytest.mark.parametrize(
    ("ranks", "kinds"), [(2, KINDS), pytest.param(1, MORE_KINDS, marks=pytest.mark.slow)], ids=["2", "1"]
)
def test_offload_keeps_the_bits_and_empties_the_device(ranks, kinds, tmp_path):
    settings = [TrainedFsdpConfig(), TrainedFsdpConfig(param_offload=True, optimizer_offload=True)]
    for found in run_ranks(ranks, lives, kinds, settings, str(tmp_path), deadline_s=DEADLINE_S, join=tmp_path / "join"):
        for plain, both in found.values():
            assert equal_bits(both["seen"], plain["seen"])
            assert plain["message"] == ""
            assert (
                both["message"]
                == "fsdp_config.param_offload=true: the model was called while its weights are on the host."
            )
            whole = plain["left"][0]
            assert all(size > 0 for size in whole.values())
            idle, working = {"weights": 0, "optimizer": 0}, whole | {"optimizer": 0}
            assert both["left"] == [idle, *[working, idle] * 3, {"reference": 0}]


def test_each_offload_setting_moves_only_its_tensors(tmp_path):
    settings = [TrainedFsdpConfig(), TrainedFsdpConfig(param_offload=True), TrainedFsdpConfig(optimizer_offload=True)]
    (found,) = run_ranks(1, lives, ("fsdp2",), settings, str(tmp_path), deadline_s=DEADLINE_S, join=tmp_path / "join")
    plain, weights, optimizer = found["fsdp2"]
    assert equal_bits(weights["seen"], plain["seen"])
    assert equal_bits(optimizer["seen"], plain["seen"])
    whole = plain["left"][0]
    assert weights["left"][0] == whole | {"weights": 0}
    assert optimizer["left"][0] == whole | {"optimizer": 0}
