"""Rollout engine over vLLM in the ranks' own processes, on the devices that they train on."""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from rlhf.errors import UserError
from rlhf.events import GENERATING, report
from rlhf.ranks.coordinator import Coordinator
from rlhf.rollout.engine import Request, Sample, Weights, places_by_params
from rlhf.rollout.exchange import gather_requests
from rlhf.rollout.vllm.held_weights import held_digests, plain_name, record_packing, weight_check
from rlhf.rollout.vllm.process_state import ProcessState
from rlhf.rollout.vllm.repacking import repack
from rlhf.rollout.vllm.requests import request_seed, sampling_kwargs
from rlhf.rollout.weight_digest import WeightCheck, digest, read_digests
from rlhf.storage.file_parts import FileParts, whole_in_files
from rlhf.storage.scratch import Scratch

PARTS = ("weights", "kv_cache")
"""vLLM's names for what it gives back in its sleep."""


class VllmEngine:
    """A `RolloutEngine` over vLLM in this process, alone or with the other ranks of its tensor-parallel group.

    Sample s of a request depends on the weights, its `params`, `seed`, `step`, its uid and s only, up to the rounding
    that comes with another batch. With the same requests it is the same to the bit, whatever was generated before.

    Args:
        llm: `vllm.LLM`, made in `process_state`. Its weights come with the first update.
        structured_outputs: `rollout.structured_outputs`.
        max_model_len: tokens of the longest prompt with its response.
        shapes: of the weights that an update must bring, by their names in files; for those that are tied, each of
            their names in one tuple.
        parts: what the files have of the weights that the trainer has otherwise, and vLLM with them.
        eos: the tokens that end a response.
        group: the ranks that this engine is spread over.
        scratch: where vLLM has its sockets; closed with the engine.
    """

    def __init__(
        self,
        llm: Any,
        process_state: ProcessState,
        structured_outputs: Mapping[str, Any],
        max_model_len: int,
        shapes: Mapping[tuple[str, ...], Sequence[int]],
        parts: FileParts,
        eos: Sequence[int],
        coordinator: Coordinator,
        group: range,
        sleep_level: int,
        scratch: Scratch,
    ) -> None:
        self.version = 0
        self._llm = llm
        self._process_state = process_state
        self._structured_outputs = structured_outputs
        self._max_model_len = max_model_len
        self._shapes, self._parts = shapes, parts
        self._eos = eos
        self._coordinator = coordinator
        self._group = group
        self._sleep_level = sleep_level
        self._scratch = scratch
        self._asleep: set[str] = set()
        self._check_weights: WeightCheck | None = None
        self._sent: dict[str, Tensor] = {}

    @property
    def dtype(self) -> torch.dtype:
        """See `RolloutEngine.dtype`."""
        return self._llm.model_config.dtype

    def update_weights(self, weights: Weights, version: int) -> None:
        """Load every weight in place, one after the other; names and shapes are those of the Hugging Face model.

        Raises:
            ValueError: a name or a shape that the model does not have, or names that did not come. The engine is of no
            use then.
            WeightsNotHeld: vLLM does not have the weights afterwards.
        """
        with self._process_state.entered(), torch.no_grad():
            self._wake("weights")
            self._load_all(weights)
            self._verify(version)
            self._llm.reset_prefix_cache()
        self.version = version

    def generate(self, requests: Sequence[Request], *, seed: int, step: int) -> list[list[Sample]]:
        """For each request, in their order, its `params.n` samples.

        Raises:
            ValueError: an empty prompt.
            UserError: prompt and response are longer than the engine was started for.
            WeightsNotHeld: the weights are not those of the last update any more after a sleep.
        """
        ranks = gather_requests(requests, self._group, self._group, self._coordinator)
        together = [request for rank in ranks for request in rank]
        self._check(together)
        outputs: dict[int, Any] = {}
        with self._process_state.entered():
            restored = "weights" in self._asleep
            self._wake(*PARTS)
            if restored:
                self._verify(self.version)
            for places in places_by_params(together).values():
                outputs |= zip(places, self._outputs([together[i] for i in places], seed, step), strict=True)
        first = sum(len(rank) for rank in ranks[: self._group.index(self._coordinator.rank)])
        return [self._samples(request, outputs[place].outputs) for place, request in enumerate(requests, start=first)]

    def sleep(self) -> bool:
        """Give memory of the GPU back as `rollout.sleep_level` says; on a CPU nothing."""
        if self._sleep_level and self._asleep != set(PARTS):
            with self._process_state.entered():
                self._wake(*PARTS)
                self._llm.sleep(level=self._sleep_level)
            self._asleep = set(PARTS)
        return self._sleep_level == 2

    def metrics(self) -> dict[str, float]:
        """See `RolloutEngine.metrics`."""
        return {}

    def close(self) -> None:
        """Free what vLLM holds. The process group, which it shares with the rank, stays."""
        if self._llm is not None:
            with self._process_state.entered():
                self._llm.llm_engine.model_executor.shutdown()
            self._llm = None
        self._scratch.close()

    def _wake(self, *parts: str) -> None:
        if parts := tuple(part for part in parts if part in self._asleep):
            self._llm.wake_up(tags=list(parts))
            self._asleep -= set(parts)

    def _model(self) -> Any:
        (model,) = self._llm.apply_model(lambda model: model)
        return model

    def _verify(self, version: int) -> None:
        model = self._model()
        if self._check_weights is None:
            self._check_weights = weight_check(model, exact=self._llm.model_config.quantization is None)
        held = [held_digests(model, self.dtype)]
        if len(self._group) > 1:
            ranks = self._coordinator.gather(held[0])
            held = [ranks[rank] for rank in self._group]
        self._check_weights.check(read_digests(self._sent), held, f"step {version}")

    def _load_all(self, weights: Weights) -> None:
        stream = iter(weights())
        try:
            self._load(stream)
        finally:
            # The other ranks are still gathering them.
            for _ in stream:
                pass

    def _load(self, stream: Iterator[tuple[str, Tensor]]) -> None:
        model = self._model()
        record_packing(model, self.dtype)
        expected = {plain_name(name) for name, _ in model.named_parameters()}
        load = model.load_weights
        loaded: set[str] = set()

        def load_and_tell(weights: Iterable[tuple[str, Tensor]]) -> Any:
            names = load(weights)
            loaded.update(expected if names is None else map(plain_name, names))
            return names

        # vLLM only logs what did not come.
        model.load_weights = load_and_tell
        try:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._checked(stream)})
        finally:
            del model.load_weights
        if self._llm.model_config.quantization is None and (missing := sorted(expected - loaded)):
            raise ValueError(f"{len(missing)} weights of the model in vLLM were not updated: {', '.join(missing[:5])}")
        repack(model)

    def _checked(self, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        names = {name: tied for tied in self._shapes for name in tied}
        missing = set(self._shapes)
        self._sent = {}
        for name, tensor in whole_in_files(stream, self._parts):
            if name not in names:
                raise ValueError(f"the model in vLLM has no weight named {name!r}")
            shape = self._shapes[names[name]]
            if tuple(tensor.shape) != tuple(shape):
                raise ValueError(f"{name} has shape {list(tensor.shape)}, the model in vLLM {list(shape)}")
            missing.discard(names[name])
            self._sent[name] = digest(tensor, self.dtype)
            yield name, tensor
        if missing:
            shown = ", ".join(sorted(tied[0] for tied in missing)[:5])
            raise ValueError(f"{len(missing)} weights of the model in vLLM were not updated: {shown}")

    def _check(self, requests: Sequence[Request]) -> None:
        for request in requests:
            prompt, response = len(request.token_ids), request.params.max_tokens
            if not prompt:
                raise ValueError("a prompt has no tokens")
            if prompt + response > self._max_model_len:
                raise UserError(
                    f"A prompt of {prompt} tokens and a response of {response} do not fit vLLM, which was started for "
                    f"{self._max_model_len} (data.max_prompt_length and data.max_response_length). Raise one of these."
                )

    def _outputs(self, requests: Sequence[Request], seed: int, step: int) -> list[Any]:
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        def sampling(request: Request) -> Any:
            params, own = request.params, request_seed(seed, step, request.uid)
            # Equal samples are asked for once, and vLLM wants it so.
            asked = replace(params, n=1) if params.temperature == 0 else params
            kwargs = sampling_kwargs(asked, own, self._eos, self._structured_outputs)
            if structure := kwargs.pop("structured_outputs", None):
                kwargs["structured_outputs"] = StructuredOutputsParams(**structure)
            return VllmSamplingParams(**kwargs)

        # A prompt whose beginning is in the cache is computed otherwise, so none of an earlier call may be.
        self._llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": request.token_ids} for request in requests]
        # The ranks of a group all see the same samples.
        counts = self._coordinator.rank == self._group[0]
        return self._llm.generate(
            prompts,
            [sampling(request) for request in requests],
            use_tqdm=_Reporting if counts else False,
            lora_request=self._lora_request(),
        )

    def _lora_request(self) -> Any:
        """The adapters that vLLM is to apply; None for none."""
        return None

    def _samples(self, request: Request, completions: Sequence[Any]) -> list[Sample]:
        return [self._sample(request, i, completions[i % len(completions)]) for i in range(request.params.n)]

    def _sample(self, request: Request, number: int, completion: Any) -> Sample:
        if completion.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a sample of request {request.uid} with {completion.finish_reason!r}")
        ids = list(completion.token_ids)
        log_probs = [position[token].logprob for token, position in zip(ids, completion.logprobs, strict=True)]
        return Sample(request.uid, number, ids, log_probs, completion.finish_reason, self.version)


class _Reporting(tqdm):
    """A progress bar of vLLM's that is shown to nobody, and reports instead."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"file": io.StringIO()})

    def update(self, n: float | None = 1) -> bool | None:
        shown = super().update(n)
        if self.iterable is None:  # else it is vLLM's walk over the prompts
            report(GENERATING, int(self.n), int(self.total or 0))
        return shown
