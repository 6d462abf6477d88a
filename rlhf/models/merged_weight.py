"""Weight of a layer with a LoRA adapter, made out of place of the base's and the factors."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Factors:
    """Adapter of one weight W [out, in]: A [r, in], B [out, r], and of DoRA the magnitude of each output [out].

    `transposed`: W is [in, out], as embeddings' and those of GPT-2's layers are.
    """

    a: Tensor
    b: Tensor
    scaling: float
    magnitude: Tensor | None = None
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight that it is for."""
        shape = self.b.shape[0], self.a.shape[1]
        return shape[::-1] if self.transposed else shape

    def merged(self, weight: Tensor) -> Tensor:
        """W + scaling * B A in float32, a tensor of its own; with a magnitude m of DoRA (arXiv 2402.09353, equation 5)
        m (W + scaling * B A) / ||W + scaling * B A||, the norm of each output's weights.

        As peft's `merge_and_unload` in float32, to the bit.
        """
        product = (self.b.float() @ self.a.float()).mul_(self.scaling)
        whole = torch.add(weight.float(), product.T if self.transposed else product)
        if self.magnitude is None:
            return whole
        scale = self.magnitude.float().flatten() / output_norms(whole, transposed=self.transposed)
        return whole.mul_(scale.unsqueeze(0 if self.transposed else 1))


def output_norms(weight: Tensor, *, transposed: bool) -> Tensor:
    """The norm of the weights of each output, [out], of [out, in], or of [in, out] where `transposed`."""
    return torch.linalg.norm(weight, dim=0 if transposed else 1)


KINDS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
"""Names of an adapter's tensors in peft, after that of the layer."""


def factors_of(found: Mapping[str, Tensor], scaling: float, *, transposed: bool) -> Factors:
    """Factors by their names, those of `KINDS`."""
    embedding = "lora_embedding_A" in found
    kind = "lora_embedding_" if embedding else "lora_"
    magnitude = found.get("lora_magnitude_vector")
    return Factors(found[f"{kind}A"], found[f"{kind}B"], scaling, magnitude, transposed or embedding)
