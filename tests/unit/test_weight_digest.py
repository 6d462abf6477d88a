"""Digests of weights: equal for all arrangements of the same elements, and the check of what an engine holds."""

import pytest
import torch
from torch import Tensor

from rlhf.rollout.weight_digest import Digests, WeightCheck, WeightsMismatch, digest, read_digests

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def of(**weights: Tensor) -> Digests:
    return read_digests({name.replace("__", "."): digest(weight, torch.float32) for name, weight in weights.items()})


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def flipped(weight: Tensor, bit: int, place: int = 5) -> Tensor:
    words = weight.clone().view(torch.int32)
    words.view(-1)[place] ^= 1 << bit if bit < 31 else -(1 << 31)
    return words.view(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_digest_is_the_sum_of_words_and_of_their_squares(dtype: torch.dtype):
    weight = random(400, 400).to(dtype)  # more than one chunk
    words = [int(word) for word in weight.view({4: torch.int32, 2: torch.int16}[dtype.itemsize]).reshape(-1)]
    expected = sum(words) % 2**64, sum(word * word for word in words) % 2**64
    assert read_digests({"weight": digest(weight, dtype)}) == {"weight": expected}
    assert torch.equal(digest(random(400, 400), dtype), digest(weight, dtype))


def test_any_flipped_bit_changes_it():
    weight = random(4, 8)
    assert len({of(weight=flipped(weight, bit))["weight"] for bit in range(32)} | {of(weight=weight)["weight"]}) == 33
    signs = torch.zeros(3)
    assert of(zero=signs) == {"zero": (0, 0)} != of(zero=-signs)


def test_arrangement_and_padding_do_not_change_it_and_parts_add_up():
    q, k, row = random(8, 6), random(4, 6, seed=1), torch.zeros(3, 6)
    whole = of(qkv=torch.cat([q, k, row]).T.contiguous())
    WeightCheck({"qkv": ["q", "k"]}).check(of(q=q, k=k), [whole], "step 1")
    # The order that parts have by rank does not matter, nor by which dimension they are cut.
    halves = [of(o=half) for half in reversed(q.chunk(2, dim=1))]
    WeightCheck().check(of(o=q), halves, "step 1")
    WeightCheck().check(of(o=q), [of(o=q), of(o=q)], "step 1")
    with pytest.raises(WeightsMismatch, match=r"\(o\)"):
        WeightCheck().check(of(o=q), halves[:1], "step 1")


SENT = [{f"layers__{i}__q": random(5, 5, seed=9 * i + step) for i in range(3)} for step in range(3)]


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (SENT[0], r"the engine still has the old values: 3 \(layers\.0\.q, layers\.1\.q, layers\.2\.q\)\.$"),
        (
            SENT[1] | {"layers__1__q": SENT[0]["layers__1__q"]},
            r"the engine still has the old values: 1 \(layers\.1\.q\)\.$",
        ),
        (
            SENT[1] | {"layers__2__q": flipped(SENT[1]["layers__2__q"], 0)},
            r"nor the values sent: 1 \(layers\.2\.q\)",
        ),
        (SENT[2], r"nor the values sent: 3 "),
    ],
    ids=["all kept", "one kept", "a bit", "others"],
)
def test_other_weights_than_those_sent_are_named(held: dict[str, Tensor], message: str):
    check = WeightCheck()
    check.check(of(**SENT[0]), [of(**SENT[0])], "step 0")
    with pytest.raises(WeightsMismatch, match=r"\(step 1\)\. .*" + message):
        check.check(of(**SENT[1]), [of(**held)], "step 1")
    check.check(of(**SENT[1]), [of(**SENT[1])], "step 1")
    check.check(of(**SENT[1]), [of(**SENT[1])], "step 1 again")


def test_an_engine_that_reports_nothing_or_less_than_before_does_not_pass():
    with pytest.raises(WeightsMismatch, match=r"reports none of the weights that the trainer sent \(step 0\)"):
        WeightCheck().check(of(**SENT[0]), [{}, {}], "step 0")
    for exact in (True, False):
        check = WeightCheck(exact=exact)
        check.check(of(**SENT[0]), [of(**SENT[0])], "step 0")
        with pytest.raises(WeightsMismatch):
            check.check(of(**SENT[1]), [{}], "step 1")
    check = WeightCheck()
    check.check(of(**SENT[0]), [of(**SENT[0])], "step 0")
    less = of(**{name: weight for name, weight in SENT[1].items() if name != "layers__1__q"})
    with pytest.raises(WeightsMismatch, match=r"no longer reports some weights \(step 1\): 1 \(layers\.1\.q\)\.$"):
        check.check(of(**SENT[1]), [less], "step 1")


def test_weights_under_other_names_are_compared_by_layer():
    sent = of(layers__0__experts__0=random(3, 4), layers__0__experts__1=random(3, 4, seed=1), head=random(2, 2))
    held = of(layers__0__w13=torch.stack([random(3, 4), random(3, 4, seed=1)]), head=random(2, 2))
    later = of(layers__0__experts__0=random(3, 4), layers__0__experts__1=random(3, 4, seed=2), head=random(2, 2))
    check = WeightCheck()
    check.check(sent, [held], "step 0")
    with pytest.raises(WeightsMismatch, match=r"the engine still has the old values: 1 \(other weights of layer 0\)"):
        check.check(later, [held], "step 1")
    renamed = WeightCheck(renamed={"head": "lm_head"}.get)
    with pytest.raises(WeightsMismatch, match=r"\(lm_head\)"):
        renamed.check(of(head=random(2, 2)), [of(lm_head=random(2, 2, seed=1))], "step 0")


@pytest.mark.parametrize("exact", [True, False], ids=["computed", "quantized"])
def test_what_the_engine_computes_from_weights_must_change_with_them(exact: bool, caplog: pytest.LogCaptureFixture):
    name = "layers__0__A" if exact else "layers__0__A_log"
    check = WeightCheck(exact=exact)

    def sync(sent: int, held: int) -> None:
        check.check(of(layers__0__A_log=random(4, seed=sent)), [of(**{name: random(4, seed=held).exp()})], "step 1")

    sync(1, 1)
    assert "only changes are checked: 1 (" in caplog.text
    sync(2, 2)
    sync(2, 2)
    with pytest.raises(WeightsMismatch, match="still has the old values"):
        sync(3, 2)
    with pytest.raises(WeightsMismatch, match="nor the values sent"):
        sync(2, 4)
