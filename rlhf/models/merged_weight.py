"""Merges a LoRA adapter into a copy of a layer's weight."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Factors:
    """Adapter of one weight W [out, in]: A [r, in], B [out, r], and with DoRA the magnitude of each output [out].

    With `transposed`, W is [in, out], as in embeddings and GPT-2's layers.
    """

    a: Tensor
    b: Tensor
    scaling: float
    magnitude: Tensor | None = None
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        shape = self.b.shape[0], self.a.shape[1]
        return shape[::-1] if self.transposed else shape

    def merged(self, weight: Tensor) -> Tensor:
        """Return W + scaling * B A as a new float32 tensor, bit for bit as peft's `merge_and_unload` in float32.

        With a DoRA magnitude m (arXiv 2402.09353, equation 5), return m (W + scaling * B A) / ||W + scaling * B A||,
        with the norm over each output's weights.
        """
        product = (self.b.float() @ self.a.float()).mul_(self.scaling)
        whole = torch.add(weight.float(), product.T if self.transposed else product)
        if self.magnitude is None:
            return whole
        scale = self.magnitude.float().flatten() / output_norms(whole, transposed=self.transposed)
        return whole.mul_(scale.unsqueeze(0 if self.transposed else 1))


def output_norms(weight: Tensor, *, transposed: bool) -> Tensor:
    """Return the norm of each output's weights, [out], of a weight [out, in], or [in, out] if `transposed`."""
    return torch.linalg.norm(weight, dim=0 if transposed else 1)


KINDS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
"""Suffixes of an adapter's tensor names in peft, after the layer's name."""


def factors_of(found: Mapping[str, Tensor], scaling: float, *, transposed: bool) -> Factors:
    """Return the factors of the tensors in `found`, keyed by `KINDS`."""
    embedding = "lora_embedding_A" in found
    kind = "lora_embedding_" if embedding else "lora_"
    magnitude = found.get("lora_magnitude_vector")
    return Factors(found[f"{kind}A"], found[f"{kind}B"], scaling, magnitude, transposed or embedding)
