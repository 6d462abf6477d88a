"""Digests of weights: equal for all splits of the same elements, and used to check the weights of an engine."""

import pytest
import torch
from torch import Tensor

from rlhf.rollout.weight_digest import _BASE as BASE
from rlhf.rollout.weight_digest import (
    Digests,
    WeightCheck,
    WeightsMismatch,
    digest,
    in_any_order,
    joined,
    read_digests,
)

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
def test_the_digest_has_sums_of_words_of_their_squares_and_by_their_places(dtype: torch.dtype):
    weight = random(400, 400).to(dtype)  # more than one chunk
    words = [int(word) for word in weight.view({4: torch.int32, 2: torch.int16}[dtype.itemsize]).reshape(-1)]
    places = sum(word * pow(BASE, i + 1, 2**64) for i, word in enumerate(words)) % 2**64
    expected = sum(words) % 2**64, sum(word * word for word in words) % 2**64, places, len(words)
    assert read_digests({"weight": digest(weight, dtype)}) == {"weight": expected}
    assert torch.equal(digest(random(400, 400), dtype), digest(weight, dtype))


def test_any_flipped_bit_changes_it():
    weight = random(4, 8)
    assert len({of(weight=flipped(weight, bit))["weight"] for bit in range(32)} | {of(weight=weight)["weight"]}) == 33
    signs = torch.zeros(3)
    assert of(zero=signs) == {"zero": (0, 0, 0, 3)} != of(zero=-signs)


def swapped(weight: Tensor, a: int = 0, b: int = 16) -> Tensor:
    flat = weight.clone().view(-1)
    flat[[a, b]] = flat[[b, a]]
    return flat.view(weight.shape)


def test_swapped_elements_rows_and_parts_change_it():
    weight = random(400, 400)
    others = [swapped(weight, 0, 1), swapped(weight, 5, 131077), weight.flip(0), weight.T.contiguous(), weight.roll(1)]
    digests = [of(weight=other)["weight"] for other in [weight, *others]]
    assert len(set(digests)) == 6
    assert len(set(map(in_any_order, digests))) == 1
    k, v = random(4, 6), random(4, 6, seed=1)
    assert joined(of(k=k, v=v).values()) == of(kv=torch.cat([k, v]))["kv"] != joined(of(v=v, k=k).values())


def test_a_swap_of_words_with_many_zero_bits_far_apart_is_found():
    weight = torch.zeros(1 << 20, dtype=torch.int32)
    weight[0] = -(1 << 31)
    assert of(weight=weight) != of(weight=swapped(weight, 0, 1 << 19))


def test_padding_and_slices_do_not_change_the_sums_without_places():
    q, k, row = random(8, 6), random(4, 6, seed=1), torch.zeros(3, 6)
    check = WeightCheck({"qkv": ["q", "k"]})
    for _ in range(2):  # sent in any order
        check.check(of(k=k, q=q), [of(qkv=torch.cat([q, k, row]))], "step 1")
    # Neither the ranks' order nor the dimension of the cut matters.
    halves = [of(o=half) for half in reversed(q.chunk(2, dim=1))]
    WeightCheck().check(of(o=q), halves, "step 1")
    WeightCheck().check(of(o=q), [of(o=q), of(o=q)], "step 1")
    with pytest.raises(WeightsMismatch, match=r"\(o\)"):
        WeightCheck().check(of(o=q), halves[:1], "step 1")


@pytest.mark.parametrize(
    "held",
    [
        {"o": swapped(random(8, 6)), "qkv": torch.cat([random(4, 6, seed=1), random(4, 6, seed=2)])},
        {"o": random(8, 6), "qkv": torch.cat([random(4, 6, seed=2), random(4, 6, seed=1)])},
        {"o": random(8, 6), "qkv": torch.cat([random(4, 6, seed=1), swapped(random(4, 6, seed=2))])},
    ],
    ids=["elements", "equal shapes", "elements of a part"],
)
def test_what_changed_places_is_found(held: dict[str, Tensor]):
    check = WeightCheck({"qkv": ["q", "k"]})
    sent = of(o=random(8, 6), q=random(4, 6, seed=1), k=random(4, 6, seed=2))
    check.check(sent, [of(o=random(8, 6), qkv=torch.cat([random(4, 6, seed=1), random(4, 6, seed=2)]))], "step 0")
    with pytest.raises(WeightsMismatch, match="nor the values sent: 1 "):
        check.check(sent, [of(**held)], "step 1")


def test_weights_that_an_engine_stores_in_other_places_are_checked_without_places(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    check = WeightCheck()
    check.check(of(o=random(8, 6), p=random(3)), [of(o=random(8, 6).T.contiguous(), p=random(3))], "step 0")
    assert "order is not checked: 1 (o)" in caplog.text
    check.check(of(o=random(8, 6, seed=1), p=random(3)), [of(o=random(8, 6, seed=1).T, p=random(3))], "step 1")
    with pytest.raises(WeightsMismatch, match=r"\(o\)"):
        check.check(of(o=random(8, 6), p=random(3)), [of(o=flipped(random(8, 6), 3), p=random(3))], "step 2")
    with pytest.raises(WeightsMismatch, match=r"\(p\)"):
        check.check(of(o=random(8, 6), p=random(3)), [of(o=random(8, 6), p=random(3).flip(0))], "step 2")


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
