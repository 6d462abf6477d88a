"""Samples tokens as a pure function of (seed, step, prompt, sample, position): noise is a hash of these coordinates.

There is no generator state, so noise does not depend on batch split, order, rank or a resume.
"""

import torch
from torch import Tensor

from rlhf.rollout.engine import SamplingParams


def _signed(value: int) -> int:
    """Return the low 64 bits as int64, the widest integer that torch computes with on every device."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
# Limits temporary memory: noise is drawn for rows in chunks of about this many (row, token) pairs.
_CHUNK_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 25}


def _xor_shift_(x: Tensor, bits: int) -> Tensor:
    """Compute x ^= x >>> bits in place. The int64 shift is arithmetic, so copies of the sign bit are masked."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def _mix_(x: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64 in place: a bijection of 64-bit words that mixes the bits.

    A flip of one input bit flips about half of the output bits.

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014), Stafford's variant 13.
    """
    _xor_shift_(x, 30).mul_(_MIX_1)
    _xor_shift_(x, 27).mul_(_MIX_2)
    return _xor_shift_(x, 31)


def fold(keys: Tensor, values: Tensor) -> Tensor:
    """Return keys that also depend on `values`. `keys` and `values` are int64 with broadcastable shapes."""
    return _mix_(keys + values * _GOLDEN)


def row_keys(seed: int, step: int, uids: Tensor, samples: Tensor) -> Tensor:
    """Return int64 keys [rows] of responses; `uids` and `samples` are [rows] int64."""
    keys = torch.full_like(uids, _GOLDEN)
    for value in (seed, step):
        keys = fold(keys, torch.full_like(uids, _signed(value)))
    return fold(fold(keys, uids), samples)


def _random_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return 53 random bits (int64) for each row key [rows] and token id [rows or 1, tokens]."""
    bits = _mix_(keys[:, None] + token_ids * _GOLDEN)
    return (bits >> 11).bitwise_and_((1 << 53) - 1)


def uniform(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return float64 in (0, 1) for each row key [rows] and token id [rows or 1, tokens], in steps of 2^-53."""
    return _random_bits(keys, token_ids).double().add_(0.5).mul_(2.0**-53).clamp_(max=1 - 2.0**-53)


def _race(log_probs: Tensor, keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return the winners [rows] of an exponential race: argmax of log p - log E with E = -log(1 - v), v uniform.

    This is Gumbel-max: -log E is a standard Gumbel variable. v has full relative precision near 0, where winners are.
    float32 would round v above 1 - 2^-24 to 1, so v is clamped there to keep E finite.
    """
    v = _random_bits(keys, token_ids).float().add_(0.5).mul_(2.0**-53).clamp_(max=1 - 2.0**-24)
    noise = v.neg_().log1p_().neg_().log_()
    return torch.sub(log_probs, noise, out=noise).argmax(dim=-1)


def _likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the `k` highest `logits` [rows, vocab] and their token ids, [rows, k]. Equal logits rank by token id."""
    width = 2 * k + 64
    if width < logits.shape[-1]:
        highest, candidates = logits.topk(width, dim=-1)
        # `topk` does not order equal logits. If the last candidate is less than the k-th, all logits equal to the k-th
        # are among the candidates. With NaN the comparison is false.
        if (highest[:, k - 1] > highest[:, -1]).all():
            candidates = candidates.sort(dim=-1).values
            logits, order = logits.gather(1, candidates).sort(dim=-1, descending=True, stable=True)
            return logits[:, :k], candidates.gather(1, order[:, :k])
    logits, candidates = logits.sort(dim=-1, descending=True, stable=True)
    return logits[:, :k], candidates[:, :k]


def penalized(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Penalize `logits` [rows, vocab] of tokens in `seen` [rows, vocab] bool: divide positive ones, multiply the rest.

    Source: Keskar et al., "CTRL" (arXiv 1909.05858), section 4.1; negative logits as in transformers and vLLM.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def _unlikely(logits: Tensor, min_p: float) -> Tensor:
    """Return bool [rows, vocab]: tokens with less than `min_p` times the probability of the likeliest token.

    Source: Nguyen et al., "Turning Up the Heat: Min-p Sampling" (arXiv 2407.01082).
    """
    probs = logits.softmax(dim=-1)
    return probs < probs.amax(dim=-1, keepdim=True) * min_p


def sample(logits: Tensor, keys: Tensor, params: SamplingParams, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Draw one token for each row.

    Args:
        logits: [rows, vocab], any float type.
        keys: [rows] int64, the row keys folded with the position in the response.
        params: temperature 0 selects the likeliest token (first of equals). The order is vLLM's: repetition penalty,
            temperature, `min_p`, `top_k`, then `top_p`: the smallest set of the remaining tokens with a probability of
            at least `top_p`. Equal logits rank by token id.
        seen: [rows, vocab] bool, tokens of the prompt and response so far; only with a repetition penalty.

    Returns:
        tokens [rows] int64, and their log-probs [rows] float32 under the renormalized distribution that was sampled.
        Greedy tokens have the log-prob of the plain softmax at temperature 1 (after the penalty).
    """
    logits = logits.float()
    if seen is not None:
        logits = penalized(logits, seen, params.repetition_penalty)
    if params.temperature == 0:
        tokens = logits.argmax(dim=-1, keepdim=True)
        return tokens[:, 0], (logits.gather(1, tokens)[:, 0] - logits.logsumexp(dim=-1))
    return _draw(*_truncated(logits, params), keys)


def sample_with_mask(logits: Tensor, keys: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token for each row at a temperature above 0, and return the tokens among which it was drawn.

    Returns:
        tokens and log-probs as `sample`, and the ids of the tokens that `min_p`, `top_k` and `top_p` kept, [rows, K]
        int32 with K = min(top_k, vocab), padded with -1.
    """
    logits, candidates = _truncated(logits.float(), params)
    kept = torch.where(logits.isneginf(), -1, candidates).int()
    return *_draw(logits, candidates, keys), kept


def _truncated(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return logits [rows, K] divided by the temperature, -inf for excluded tokens, and token ids [rows or 1, K]."""
    vocab = logits.shape[-1]
    if params.temperature != 1:
        logits = logits / params.temperature
    unlikely = _unlikely(logits, params.min_p) if params.min_p > 0 else None
    top_k = params.top_k if 0 < params.top_k < vocab else vocab
    if top_k == vocab and params.top_p >= 1:
        candidates = torch.arange(vocab, device=logits.device)[None]
        if unlikely is not None:
            logits = logits.masked_fill(unlikely, -torch.inf)
    else:
        logits, candidates = _likeliest(logits, top_k)
        if unlikely is not None:
            logits = logits.masked_fill(unlikely.gather(1, candidates), -torch.inf)
        if params.top_p < 1:
            # Use integers: their sum is exact in any order, and CUDA has no deterministic cumsum of floats.
            probs = (logits.double().softmax(dim=-1) * 2.0**52).long()
            logits = logits.masked_fill(probs.cumsum(dim=-1) - probs >= params.top_p * 2.0**52, -torch.inf)
    return logits, candidates


def _draw(logits: Tensor, candidates: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one of the `candidates` [rows or 1, K] for each row, and return its id and log-prob, [rows] each."""
    log_probs = logits.log_softmax(dim=-1)
    rows = max(1, _CHUNK_ELEMENTS.get(logits.device.type, 1 << 20) // log_probs.shape[-1])
    chosen = torch.cat(
        [
            _race(
                log_probs[i : i + rows],
                keys[i : i + rows],
                candidates[i : i + rows] if len(candidates) > 1 else candidates,
            )
            for i in range(0, len(keys), rows)
        ]
    )[:, None]
    return candidates.expand(len(keys), -1).gather(1, chosen)[:, 0], log_probs.gather(1, chosen)[:, 0]
