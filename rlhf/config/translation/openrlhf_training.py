"""Converts OpenRLHF's arguments of optimizers, adapters and importance weights (0.11.2, and flat names)."""

from rlhf.config.translation.recipe import Recipe, Theirs

OF_BOTH_OPTIMIZERS = {
    "adam_betas": "adam.betas",
    "l2": "adam.weight_decay",
    "lr_scheduler": "lr_scheduler",
    "lr_warmup_ratio": "lr_warmup_ratio",
    "max_norm": "max_norm",
}
"""Maps flat names that set both optimizers to the end of the dotted names: `actor.END` and `critic.END`."""


def share_between_optimizers(theirs: Theirs) -> None:
    """Copy the flat names that set both optimizers to the dotted names that the file does not have."""
    for flat, end in OF_BOTH_OPTIMIZERS.items():
        value = theirs.take(flat)
        for name in (f"actor.{end}", f"critic.{end}"):
            if value is not None and name not in theirs.given:
                theirs.left[name] = value


def correction(theirs: Theirs, recipe: Recipe) -> None:
    """Set the importance weights between engine and trainer: OpenRLHF's `tis` clips them, `icepop` masks them."""
    ours, name = "algorithm.rollout_correction.", "algo.advantage.is_correction_"
    enabled = theirs.take("vllm_enable_is_correction", "enable_vllm_is_correction", f"{name}enable")
    level = theirs.text(f"{name}level")
    if not enabled and level in (None, "off"):
        recipe.needless += theirs.take_section("vllm_is_") + theirs.take_section(name)
        return
    kind = theirs.text("vllm_is_correction_type", f"{name}type") or "tis"
    mode, gating = theirs.text(f"{name}mode"), theirs.text(f"{name}gating")
    bounds = theirs.take("vllm_is_truncated_threshold", f"{name}threshold") or [0.5, 5.0]
    low, high = bounds if isinstance(bounds, list) and len(bounds) == 2 else (None, bounds)
    if isinstance(high, list):
        high = high[0] if len(high) == 1 else None
    masks = kind != "tis" if level is None else mode != "clip"
    recipe.set(f"{ours}rollout_is", "token", f"{name}level")
    recipe.set(f"{ours}rollout_is_threshold", high, f"{name}threshold")
    if masks and low is not None:
        recipe.set(f"{ours}rollout_is_threshold_lower", low, f"{name}threshold")
    elif low is not None:
        recipe.lose(f"{name}threshold", bounds, "here, weights are clipped from above only.")
    if level == "seq" or kind == "seq-mask-tis":
        recipe.lose(f"{name}level", level or kind, "here, each token's own weight decides whether the token counts.")
    if gating not in (None, "ratio"):
        recipe.lose(f"{name}gating", gating, "here, the ratio of probabilities decides; choose new thresholds.")


def adapters(theirs: Theirs, recipe: Recipe) -> None:
    """Set the adapters. OpenRLHF's defaults apply only with a rank above 0."""
    leaves = {"alpha": 16, "target_modules": "all-linear", "dropout": 0}
    flat = {"alpha": "lora_alpha", "target_modules": "target_modules", "dropout": "lora_dropout"}
    rank = theirs.number("lora_rank", "ds.lora.rank")
    if not rank:
        recipe.needless += theirs.take_section("ds.lora.") + theirs.drop(*flat.values())
        return
    recipe.set("model.lora.enabled", True, "ds.lora.rank")
    recipe.set("model.lora.rank", rank, "ds.lora.rank")
    for leaf, default in leaves.items():
        value = theirs.take(flat[leaf], f"ds.lora.{leaf}")
        if leaf == "target_modules" and isinstance(value, str) and value != default:
            value = [value]
        recipe.set(f"model.lora.{leaf}", default if value is None else value, f"ds.lora.{leaf}")


def optimizer(role: str, theirs: Theirs, recipe: Recipe) -> None:
    """Set the optimizer of `role`, actor or critic, and its schedule."""
    ours = f"{role}.optim."
    rate = theirs.take(f"{role}_learning_rate", f"{role}.learning_rate", f"{role}.adam.lr")
    recipe.set(f"{ours}lr", rate, f"{role}.adam.lr")
    for leaf in ("betas", "eps", "weight_decay"):
        recipe.set(f"{ours}{leaf}", theirs.take(f"{role}.adam.{leaf}"), f"{role}.adam.{leaf}")
    recipe.set(f"{role}.grad_clip", theirs.take(f"{role}.max_norm"), f"{role}.max_norm")
    if theirs.left.get(f"{role}.optim") == "adam":
        recipe.needless += theirs.drop(f"{role}.optim")
    scheduler = theirs.text(f"{role}.lr_scheduler")
    floor, share = f"{role}.min_lr_ratio", theirs.number(f"{role}.lr_warmup_ratio")
    if scheduler in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        recipe.set(f"{ours}lr_scheduler_type", "cosine", f"{role}.lr_scheduler")
        recipe.set(f"{ours}min_lr_ratio", theirs.take(floor), floor)
    else:
        recipe.set(f"{ours}lr_scheduler_type", scheduler, f"{role}.lr_scheduler")
        recipe.needless += theirs.drop(floor)
    if share:
        why = f"set {ours}lr_warmup_steps to this share of the run's optimizer steps."
        recipe.lose(f"{role}.lr_warmup_ratio", share, why)
