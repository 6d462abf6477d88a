"""Samples with vLLM in the ranks' own processes, on their training devices."""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from rlhf.config import RolloutConfig
from rlhf.errors import UserError
from rlhf.events import GENERATING, report
from rlhf.ranks.coordinator import Coordinator
from rlhf.rollout.engine import Request, RolloutEngine, Weights, indices_by_params, siblings
from rlhf.rollout.exchange import gather_requests
from rlhf.rollout.policy_files import PolicyFiles
from rlhf.rollout.sample import Sample
from rlhf.rollout.stop_strings import cut_at_seam
from rlhf.rollout.vllm.hidden_tensors import HiddenTensors
from rlhf.rollout.vllm.model_digests import (
    check_unsent,
    model_digests,
    plain_name,
    record_packing,
    unsent_digests,
    weight_check,
)
from rlhf.rollout.vllm.process_state import ProcessState
from rlhf.rollout.vllm.repacking import repack
from rlhf.rollout.vllm.requests import copies_of, request_seed, sampling_kwargs
from rlhf.rollout.weight_digest import WeightCheck, digest, read_digests
from rlhf.storage.file_parts import FileParts, whole_in_files
from rlhf.storage.scratch import Scratch

PARTS = ("weights", "kv_cache")  # vLLM's names of the memory that its sleep releases


@dataclass(frozen=True)
class WeightsInFiles:
    """Names and shapes of the weights that an update must send, as in the model's files."""

    shapes: Mapping[tuple[str, ...], Sequence[int]]
    """Shapes by names in files; all names of a tied weight form one key."""
    parts: FileParts  # the Hugging Face tensors in each weight that the trainer and vLLM store fused


class VllmEngine(RolloutEngine):
    """Samples with vLLM in this process, alone or with the other ranks of a tensor-parallel group.

    A sample depends only on the weights, `seed`, `step` and its request, except that other requests in the same call
    may change the rounding. The same call gives the same bits, whatever was generated before.

    Args:
        llm: `vllm.LLM`, created in `process_state`. The first update loads its weights.
        scratch: folder of vLLM's sockets; closed with the engine.
        config: `sleep_level` is 0 if vLLM cannot sleep.
        group: ranks of this engine's tensor-parallel group.
    """

    def __init__(
        self,
        llm: Any,
        process_state: ProcessState,
        scratch: Scratch,
        config: RolloutConfig,
        policy: PolicyFiles,
        weights: WeightsInFiles,
        coordinator: Coordinator,
        group: range,
    ) -> None:
        self.version = 0
        self._llm = llm
        self._process_state = process_state
        self._config, self._policy = config, policy
        self._shapes, self._parts = weights.shapes, weights.parts
        self._coordinator = coordinator
        self._group = group
        self._scratch = scratch
        self._asleep: set[str] = set()
        self._hidden: HiddenTensors | None = None
        self._unsent: dict[str, Tensor] = {}
        self._check_weights: WeightCheck | None = None
        self._sent: dict[str, Tensor] = {}

    @property
    def dtype(self) -> torch.dtype:
        return self._llm.model_config.dtype

    def update_weights(self, weights: Weights, version: int) -> None:
        """Load all weights in place, one by one, with the names and shapes of the Hugging Face model.

        Raises:
            ValueError: unknown or missing names, or another shape. The engine is unusable afterwards.
            WeightsMismatch: vLLM's weights differ afterwards.
        """
        with self._process_state.entered(), torch.no_grad():
            self._wake("weights")
            self._load_all(weights)
            self._verify(version)
            self._llm.reset_prefix_cache()
        self.version = version

    def generate(self, requests: Sequence[Request], *, seed: int, step: int) -> list[Sample]:
        """Return the sample of each request, in order.

        Raises:
            ValueError: an empty prompt.
            UserError: prompt and response exceed `max_model_len`.
            WeightsMismatch: the weights changed during a sleep.
        """
        of_ranks = gather_requests(requests, self._group, self._group, self._coordinator)
        all_requests = list(chain.from_iterable(of_ranks))
        self._check(all_requests)
        samples: dict[int, Sample] = {}
        with self._process_state.entered():
            restored = "weights" in self._asleep
            self._wake(*PARTS)
            if restored:
                self._verify(self.version)
            for indices in indices_by_params(all_requests).values():
                samples |= zip(indices, self._samples([all_requests[i] for i in indices], seed, step), strict=True)
        first = sum(map(len, of_ranks[: self._group.index(self._coordinator.rank)]))
        return [samples[i] for i in range(first, first + len(requests))]

    def sleep(self) -> bool:
        """Release GPU memory as in `rollout.sleep_level`; do nothing on a CPU."""
        if self._config.sleep_level and self._asleep != set(PARTS):
            with self._process_state.entered():
                self._wake(*PARTS)
                model = self._model()
                self._unsent = unsent_digests(model)
                if self._config.sleep_level == 2:
                    self._hidden = HiddenTensors(model)
                self._llm.sleep(level=self._config.sleep_level)
            self._asleep = set(PARTS)
        return self._config.sleep_level == 2

    def close(self) -> None:
        """Free vLLM's memory. The process group belongs to the rank and stays."""
        if self._llm is not None:
            with self._process_state.entered():
                # From vLLM 0.33 on, the executor's shutdown destroys process groups, where a failed rank may hang.
                self._llm.llm_engine.model_executor.driver_worker.shutdown()
            self._llm = None
        self._scratch.close()

    def _wake(self, *parts: str) -> None:
        if parts := tuple(part for part in parts if part in self._asleep):
            self._llm.wake_up(tags=list(parts))
            self._asleep -= set(parts)
            if "weights" in parts and self._hidden is not None:
                self._hidden.restore()
                self._hidden = None
            if "weights" in parts:
                check_unsent(self._unsent, unsent_digests(self._model()), f"step {self.version}")

    def _model(self) -> Any:
        (model,) = self._llm.apply_model(lambda model: model)
        return model

    def _verify(self, version: int) -> None:
        model = self._model()
        if self._check_weights is None:
            self._check_weights = weight_check(model, exact=self._llm.model_config.quantization is None)
        received = [model_digests(model, self.dtype, self._check_weights.names(self._sent))]
        if len(self._group) > 1:
            ranks = self._coordinator.all_gather(received[0])
            received = [ranks[rank] for rank in self._group]
        self._check_weights.check(read_digests(self._sent), received, f"step {version}")

    def _load_all(self, weights: Weights) -> None:
        stream = iter(weights())
        try:
            self._load(stream)
        finally:
            # Iterate to the end, because the other ranks still gather the weights.
            for _ in stream:
                pass

    def _load(self, stream: Iterator[tuple[str, Tensor]]) -> None:
        model = self._model()
        record_packing(model, self.dtype)
        expected = {plain_name(name) for name, _ in model.named_parameters()}
        load = model.load_weights
        loaded: set[str] = set()

        def load_and_report(weights: Iterable[tuple[str, Tensor]]) -> Any:
            names = load(weights)
            loaded.update(expected if names is None else map(plain_name, names))
            return names

        # vLLM only logs missing weights.
        model.load_weights = load_and_report
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
            if prompt + response > self._policy.max_model_len:
                raise UserError(
                    f"A prompt of {prompt} tokens and a response of {response} are longer than the limit of vLLM, "
                    f"{self._policy.max_model_len} tokens. Raise data.max_prompt_length or data.max_response_length."
                )

    def _samples(self, requests: Sequence[Request], seed: int, step: int) -> list[Sample]:
        """Sample for requests with equal parameters; siblings form one vLLM request."""
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        def params_of(group: Sequence[Request]) -> Any:
            first, eos, structure = group[0], self._policy.eos, self._config.structured_outputs
            kwargs = sampling_kwargs(first, copies_of(group), request_seed(seed, step, first), eos, structure)
            if structure := kwargs.pop("structured_outputs", None):
                kwargs["structured_outputs"] = StructuredOutputsParams(**structure)
            return VllmSamplingParams(**kwargs, flat_logprobs=True)

        groups = [[requests[i] for i in indices] for indices in siblings(requests)]
        # Cached prefixes change rounding, so clear the prefixes of earlier calls.
        self._llm.reset_prefix_cache()
        # All ranks of a group have the same samples, so only one rank reports progress.
        reports = self._coordinator.rank == self._group[0]
        outputs = self._llm.generate(
            [{"prompt_token_ids": group[0].context} for group in groups],
            [params_of(group) for group in groups],
            use_tqdm=_Reporting if reports else False,
            lora_request=self._lora_request(),
        )
        return [
            self._sample(request, output.outputs[i % len(output.outputs)])
            for group, output in zip(groups, outputs, strict=True)
            for i, request in enumerate(group)
        ]

    def _lora_request(self) -> Any:
        return None

    def _sample(self, request: Request, completion: Any) -> Sample:
        reason, flat = completion.finish_reason, completion.logprobs
        if reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a sample of request {request.uid} with {reason!r}")
        # The flat log-probs must have one entry per position, for the sampled token.
        if flat.token_ids != list(completion.token_ids):
            raise RuntimeError(f"vLLM has no log-prob for each token of a sample of request {request.uid}")
        sample = request.answered(flat.token_ids, flat.logprobs, reason, self.version)
        return cut_at_seam(sample, request, self._policy.tokenizer)


class _Reporting(tqdm):
    """An invisible progress bar for vLLM that reports progress events."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"file": io.StringIO()})

    def update(self, n: float | None = 1) -> bool | None:
        shown = super().update(n)
        if self.iterable is None:  # otherwise vLLM iterates over the prompts
            report(GENERATING, int(self.n), int(self.total or 0))
        return shown
