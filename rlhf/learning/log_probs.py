"""Log-probs of response tokens from a causal LM, in bounded memory."""

from torch import Tensor, nn

from rlhf.batch import Batch
from rlhf.learning.predicted_tokens import PredictedTokens
from rlhf.models.log_prob_head import Targets


def response_log_probs(
    model: nn.Module, batch: Batch, temperature: float, *, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the response tokens under `model`, and the entropies they were drawn at, [N, R] float32; zero on
    padding.

    Args:
        model: as `with_log_probs` leaves it, or an engine around it.
    """
    tokens = PredictedTokens.of(model, batch)
    targets = Targets(tokens.positions, tokens.labels, temperature, with_entropy)
    log_probs, entropy = model(**tokens.inputs, targets=targets)
    return tokens.in_rows(log_probs), None if entropy is None else tokens.in_rows(entropy)
