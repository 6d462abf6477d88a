"""Decodes one call of the embedded engine: prefills rows, decodes them token by token, and refills finished rows."""

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf.config.buffer_sizes import PREFILL_TOKENS, grown_cache
from rlhf.events import GENERATING, report
from rlhf.models.packing import cache_argument
from rlhf.rollout.engine import Completion, Listener, Request, siblings
from rlhf.rollout.kv_cache import RowCache
from rlhf.rollout.sample import FinishReason, Sample
from rlhf.rollout.sampling import fold, row_keys, sample, sample_with_mask
from rlhf.rollout.sampling_mask import SamplingMask
from rlhf.rollout.stop_strings import StopStrings

# Admit waiting samples when 1 in REFILL_SHARE rows is free. Admitting samples one by one would cost more passes.
REFILL_SHARE = 16

# State of each row: index of its request, first column of its prompt in the cache, time of its response's first token
# (negative if the response began before this call), key of its noise, newest token.
SAMPLE, START, BIRTH, KEY, TOKEN = range(5)


class Decoding:
    """State of one `generate` call over requests with equal `params`. Siblings share the prefill of their prompt.

    The host keeps a copy of the state that its decisions need, and reads each row's newest token. So host and device
    synchronize once per token, once more with top-k, and once more with sampling masks.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        eos: Tensor,
        requests: Sequence[Request],
        max_rows: int,
        completion: Completion,
        listener: Listener | None = None,
    ) -> None:
        self.model, self.requests = model, requests
        self.eos = eos.cpu().numpy()
        self.params = params = requests[0].params
        self.total = len(requests)
        self.max_rows = min(max_rows, self.total)
        groups = siblings(requests)
        self.prompts = [requests[group[0]].context for group in groups]
        """For each group, the tokens to prefill: the prompt and the response so far."""
        self.lengths = np.array([len(token_ids) for token_ids in self.prompts])
        self.ends = np.array([group.stop for group in groups])
        """For each prompt, the index after its last request."""
        self.prompt_of = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        self.device = model.device
        self.accepts = inspect.signature(model.forward).parameters
        self.cache_argument = cache_argument(model.forward)
        self.cache = RowCache(model.config)
        self.cache.span.start = self.cache.span.end = int(self.lengths.max())
        self.columns = 0
        # A model without sliding windows that accepts a prepared mask gets a slice of `self.mask`. Other models build
        # their own mask.
        self.prepared_mask = (
            model._supports_attention_backend
            and model.config._attn_implementation in ("sdpa", "eager")
            and not any(layer.is_sliding for layer in self.cache.attention)
        )
        self.mask: Tensor | None = None
        self.time = 0
        self.state = torch.zeros(5, self.max_rows, dtype=torch.int64, device=self.device)
        self.host = np.zeros((3, self.max_rows), dtype=np.int64)
        self.admitted = self.prefilled = self.prefilled_from = 0
        self.tokens_left = max(request.tokens_left for request in requests)
        self.starts = np.array([request.start for request in requests])
        self.tokens = np.zeros((self.total, params.max_tokens), dtype=np.int32)
        self.log_probs = torch.zeros(self.total, params.max_tokens, dtype=torch.float32, device=self.device)
        # For each request, the ids among which each new token was sampled, int32; empty without sampling masks.
        self.kept: list[list[np.ndarray]] = [[] for _ in requests]
        # [rows, vocab] bool: tokens in each row's prompt and response so far. None without a repetition penalty.
        self.seen: Tensor | None = None
        self.counts = self.starts.copy()
        self.reasons: list[FinishReason] = ["partial"] * self.total
        for row, request in enumerate(requests):
            if request.response is not None:
                self.tokens[row, : request.start] = request.response.token_ids
        self.stop_strings = StopStrings(tokenizer, params.stop)
        self.completion, self.listener = completion, listener
        self.version = 0

    def run(self, seed: int, step: int, version: int) -> list[Sample]:
        """Return the sample of each request. `version`, the version of the weights, is recorded in the samples."""
        uids, numbers = torch.tensor([(r.uid, r.sample) for r in self.requests], device=self.device).T
        self.keys, self.version = row_keys(seed, step, uids, numbers), version
        while (self.cache.span.rows or self.admitted < self.total) and not self.completion.reached:
            free = self.max_rows - self.cache.span.rows
            if self.admitted < self.total and free * REFILL_SHARE >= self.max_rows:
                self._emit(self.cache.span.rows, self._admit(free))
            else:
                self._emit(0, self._decode())
        samples, _, birth = self.host[:, : self.cache.span.rows]  # the rows that are not finished
        self.counts[samples] = self.time - birth + 1
        longest = int(self.counts.max())
        log_probs = self.log_probs[:, :longest].cpu().numpy()

        # `answered` copies the tokens: a view would keep the padding of all rows in memory.
        new = [slice(start, end) for start, end in zip(self.starts.tolist(), self.counts.tolist(), strict=True)]
        return [
            request.answered(
                self.tokens[row, new[row]],
                log_probs[row, new[row]],
                self.reasons[row],
                version,
                SamplingMask.of_tokens(self.kept[row]),
            )
            for row, request in enumerate(self.requests)
        ]

    def _forward(self, cache: RowCache, ids: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
        """Return the logits, [rows, vocab], after the last token of `ids`, [rows, length]."""
        optional = {"position_ids": positions, "logits_to_keep": 1}
        kwargs: dict[str, Any] = {name: value for name, value in optional.items() if name in self.accepts}
        kwargs[self.cache_argument] = cache
        output = self.model(input_ids=ids, attention_mask=mask, use_cache=True, **kwargs)
        return output.logits[:, -1]

    def _prefill(self) -> None:
        """Prefill the next prompts, left-padded. Keep keys, values and logits until all their samples have rows."""
        first = self.prefilled
        last, before = first + 1, self.ends[first - 1] if first else 0
        longest = self.lengths[first]
        while last < len(self.prompts) and self.ends[last - 1] - before < self.max_rows:
            longest = max(longest, self.lengths[last])
            if longest * (last + 1 - first) > PREFILL_TOKENS:
                break
            last += 1
        width = int(self.lengths[first:last].max())
        ids = np.zeros((last - first, width), dtype=np.int64)
        for row, token_ids in enumerate(self.prompts[first:last]):
            ids[row, width - len(token_ids) :] = token_ids
        padding = torch.as_tensor(width - self.lengths[first:last], device=self.device)[:, None]
        positions = torch.arange(width, device=self.device)[None] - padding
        mask = (positions >= 0).long() if (self.lengths[first:last] < width).any() else None
        self.ready = RowCache(self.model.config)
        self.ready_logits = self._forward(
            self.ready, torch.as_tensor(ids, device=self.device), mask, positions.clamp(min=0)
        )
        self.prefilled_from, self.prefilled = first, last

    def _admit(self, free: int) -> Tensor:
        """Fill free rows with samples of prefilled prompts. Return the logits, [rows, vocab], of their first token."""
        if not self.prefilled or self.admitted == self.ends[self.prefilled - 1]:
            self._prefill()
        if not self.columns:
            self._reserve(self.ready)
        span, last = self.cache.span, min(self.admitted + free, int(self.ends[self.prefilled - 1]))
        samples = np.arange(self.admitted, last)
        prompts = self.prompt_of[samples]
        lengths = self.lengths[prompts]
        rows = slice(span.rows, span.rows + len(samples))
        self.host[:, rows] = samples, span.end - lengths, self.time - self.starts[samples]
        self.state[:3, rows] = torch.as_tensor(self.host[:, rows], device=self.device)
        self.state[KEY, rows] = self.keys[self.admitted : last]
        source = torch.as_tensor(prompts - self.prefilled_from, device=self.device)
        logits = self.ready_logits[source]
        self.cache.append(self.ready, source, int(lengths.max()))
        self.admitted = last
        if last == self.total:
            del self.ready, self.ready_logits
        self._rows_changed()
        if self.params.repetition_penalty != 1:
            self._see_prompts(rows, prompts, logits.shape[-1])
        return logits

    def _see_prompts(self, rows: slice, prompts: np.ndarray, vocab: int) -> None:
        """Mark the tokens of each row's prompt as seen. `prompts` are the indices of the rows' prompts."""
        if self.seen is None:
            self.seen = torch.zeros(self.max_rows, vocab, dtype=torch.bool, device=self.device)
        self.seen[rows] = False
        ids = [self.prompts[prompt] for prompt in prompts]
        owners = np.repeat(np.arange(rows.start, rows.stop), self.lengths[prompts])
        pairs = np.stack([owners, np.concatenate(ids)])
        self.seen[tuple(torch.as_tensor(pairs, device=self.device))] = True

    def _decode(self) -> Tensor:
        """Pass each row's last token through the model. Return the logits, [rows, vocab], of the next token."""
        span = self.cache.span
        if span.end == self.columns:
            self._reserve(self.cache)
        self.time += 1
        state = self.state[:, : span.rows]
        mask = None if self.mask is None else self.mask[..., span.start : span.end + 1]
        logits = self._forward(self.cache, state[TOKEN, :, None], mask, (span.end - state[START])[:, None])
        span.end += 1
        return logits

    def _emit(self, first: int, logits: Tensor) -> None:
        """Draw and record the next token of the rows from `first` on, and remove finished rows."""
        state = self.state[:, first : self.cache.span.rows]
        position = self.time - state[BIRTH]
        seen = None if self.seen is None else self.seen[first : self.cache.span.rows]
        kept, keys = None, fold(state[KEY], position)
        if self.params.sampling_mask:
            tokens, log_probs, kept = sample_with_mask(logits, keys, self.params)
        else:
            tokens, log_probs = sample(logits, keys, self.params, seen)
        if seen is not None:
            seen[torch.arange(len(tokens), device=self.device), tokens] = True
        state[TOKEN] = tokens
        self.log_probs[state[SAMPLE], position] = log_probs
        samples, _, birth = self.host[:, first : self.cache.span.rows]
        counts, newest = self.time - birth + 1, tokens.cpu().numpy()
        self.tokens[samples, counts - 1] = newest
        if kept is not None:
            # Without padding: top_p and min_p often keep few of top_k tokens.
            for sample_index, ids in zip(samples, kept.cpu().numpy(), strict=True):
                self.kept[sample_index].append(ids[ids >= 0])
        stopped = (newest[:, None] == self.eos).any(axis=1)
        if self.params.stop:
            stopped |= [self._stops(sample, count) for sample, count in zip(samples, counts, strict=True)]
        finished = np.flatnonzero(stopped | (counts == self.params.max_tokens))
        if len(finished):
            self.counts[samples[finished]] = counts[finished]
            for row in finished:
                self.reasons[samples[row]] = "stop" if stopped[row] else "length"
                self.completion.answered(self.requests[samples[row]])
            if self.listener is not None:
                self.listener([self._complete(sample) for sample in samples[finished]])
            self._remove(first + finished)
            report(GENERATING, self.admitted - self.cache.span.rows, self.total)

    def _complete(self, sample: int) -> Sample:
        """Return a complete sample before the others are complete."""
        new = slice(self.starts[sample], self.counts[sample])
        log_probs = self.log_probs[sample, new].cpu().numpy()
        return self.requests[sample].answered(
            self.tokens[sample, new],
            log_probs,
            self.reasons[sample],
            self.version,
            SamplingMask.of_tokens(self.kept[sample]),
        )

    def _stops(self, sample: int, count: int) -> bool:
        """Return whether a stop string ends a response of `count` tokens."""
        return self.stop_strings.end_in(self.tokens[sample, self.requests[sample].turn_start : count])

    def _remove(self, finished: np.ndarray) -> None:
        """Remove finished rows by moving the last rows over them."""
        rows = self.cache.span.rows
        keep = rows - len(finished)
        target = finished[finished < keep]
        source = np.setdiff1d(np.arange(keep, rows), finished)
        self.host[:, target] = self.host[:, source]
        sources, targets = torch.as_tensor(np.stack([source, target]), device=self.device)
        self.state[:, targets] = self.state[:, sources]
        if self.seen is not None:
            self.seen[targets] = self.seen[sources]
        self.cache.move(sources, targets, keep)
        self._rows_changed()

    def _reserve(self, like: RowCache) -> None:
        """Make room for more columns in the cache.

        Drop empty columns on the left, and rows that no waiting sample will fill.
        """
        span = self.cache.span
        end = max(int(self.lengths.max()), span.end - span.start)
        shift = end - span.end
        self.columns = grown_cache(end, self.tokens_left)
        rows = self.max_rows if self.admitted < self.total else span.rows
        self.cache.reserve(like, rows, self.columns, end)
        self.host[START] += shift
        self.state[START] += shift
        self._rows_changed()

    def _rows_changed(self) -> None:
        """Narrow the columns to the longest row, and mask the columns before shorter rows, if lengths differ."""
        span = self.cache.span
        if not span.rows:
            span.start, self.mask = span.end, None
            return
        starts = self.host[START, : span.rows]
        span.start = int(starts.min())
        if (starts == span.start).all():
            self.mask = None
            return
        valid = torch.arange(self.columns, device=self.device) >= self.state[START, : span.rows, None]
        if self.prepared_mask:
            hidden = torch.finfo(self.model.dtype).min
            self.mask = torch.zeros_like(valid, dtype=self.model.dtype).masked_fill_(~valid, hidden)[:, None, None]
        else:
            self.mask = valid
