"""Writes the model card of a checkpoint: base model, data, recipe, progress and the command."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml

from rlhf.checkpoint.commit.manifest import Manifest
from rlhf.checkpoint.export import layout_native
from rlhf.checkpoint.state.driver_state import parse_driver_state
from rlhf.config.overrides import as_shell, command_of, publishable, stored_settings
from rlhf.convert.huggingface.hub import look_up_model
from rlhf.models.hf.source import Origin
from rlhf.printable import printable, printable_lines
from rlhf.storage.layout import CONFIG, DRIVER_STATE
from rlhf.storage.reading import CheckedFiles

LARGEST_CONFIG = 1 << 20
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_DATA_FILE = re.compile(r".*\.(jsonl?|parquet|csv|arrow)|.*[*?\[].*")
RECIPE = (
    "algorithm.adv_estimator",
    "actor.policy_loss.loss_mode",
    "actor.loss_agg_mode",
    "actor.clip_ratio_low",
    "actor.clip_ratio_high",
    "actor.use_kl_loss",
    "algorithm.use_kl_in_reward",
    "algorithm.filter_groups.enable",
    "data.train_batch_size",
    "rollout.n",
    "rollout.temperature",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor.ppo_mini_batch_size",
    "actor.ppo_epochs",
    "actor.optim.lr",
    "actor.optim.lr_scheduler_type",
    "reward.functions",
    "trainer.seed",
)
"""Settings in the card's table `Recipe`."""


class ModelCard:
    """Writes the model card of one native checkpoint from its verified documents. Raises DamagedCheckpoint for a
    damaged document. The card omits settings named like a secret, and the folders of local paths (see
    `rlhf.config.overrides`)."""

    def __init__(self, manifest: Manifest, files: CheckedFiles) -> None:
        self._manifest = manifest
        self._driver = parse_driver_state(files.content(DRIVER_STATE), DRIVER_STATE, manifest.step)
        self._settings: dict[str, Any] = {}
        # An imported checkpoint has no configuration.
        if CONFIG in manifest.files and files.size(CONFIG) <= LARGEST_CONFIG:
            try:
                self._settings = stored_settings(files.content(CONFIG), manifest.release)
            except ValueError:  # verified, but from an unknown version: the card then has fewer facts
                self._settings = {}

    @property
    def base_model(self) -> str | None:
        """The model that training began with, if its name may be on the Hub; None for a folder."""
        return self._on_hub(self._settings.get("model.path"))

    def text(self, title: str, *, base_model: str | None = None, license: str | None = None) -> str:
        """Return the text of README.md. `base_model` and `license` go into its metadata; None leaves them out."""
        parts = [_metadata(self._metadata(base_model, license)), f"# {_inline(title)}\n", self._summary()]
        parts += [_table("Training", self._training()), _table("Recipe", self._recipe()), self._metrics()]
        return "\n".join([*parts, self._command()])

    def _metadata(self, base: str | None, license: str | None) -> dict[str, Any]:
        estimator = self._settings.get("algorithm.adv_estimator")
        facts = {
            "base_model": base,
            "base_model_relation": base and "finetune",
            "datasets": self._datasets(),
            "library_name": "transformers",
            "license": license if _is_word(license) else None,
            "pipeline_tag": "text-generation",
            "tags": ["rlhf", "reinforcement-learning", *([estimator] if _is_word(estimator) else [])],
        }
        return {name: value for name, value in facts.items() if value}

    def _datasets(self) -> list[str]:
        given = self._settings.get("data.train_files")
        names = [
            str(name).partition("@")[0].partition(":")[0] for name in (given if isinstance(given, list) else [given])
        ]
        return sorted({name for name in names if self._on_hub(name) and not _DATA_FILE.fullmatch(name)})

    def _on_hub(self, name: object) -> str | None:
        if not isinstance(name, str) or not _HUB_NAME.fullmatch(name) or ".." in name or Path(name).exists():
            return None
        return name

    def _summary(self) -> str:
        base = publishable(self._settings.get("model.path"))
        began = f" from {_inline(base)}" if isinstance(base, str) else ""
        if layout := self._manifest.imported.get("layout"):
            return f"Weights of a checkpoint of another tool ({_inline(layout)}), not trained further.\n"
        version = _inline(self._manifest.versions.get("rlhf", "?"))
        return f"A language model trained with reinforcement learning{began}, by rlhf {version}.\n"

    def _training(self) -> Iterator[tuple[str, Any]]:
        driver, settings = self._driver, self._settings
        yield "step", f"{self._manifest.step} of {driver['total_steps']}"
        yield "passes over the prompts", f"{driver['epochs']:.2f}"
        yield "samples", driver["samples"]
        yield "tokens", driver["tokens"]
        files = settings.get("data.train_files")
        gym = f"reasoning-gym: {settings.get('data.reasoning_gym.task')}"
        if settings:
            yield "data", publishable(files) or gym
        if settings.get("trainer.resume_mode") == "resume_path":
            yield "began at the checkpoint", publishable(settings.get("trainer.resume_from_path"))
        yield "ranks", f"{self._manifest.world_size}, {self._manifest.backend}"
        yield "saved (UTC)", self._manifest.created
        yield "versions", ", ".join(f"{name} {version}" for name, version in sorted(self._manifest.versions.items()))

    def _recipe(self) -> Iterator[tuple[str, Any]]:
        for key in RECIPE:
            if key in self._settings:
                yield key, publishable(self._settings[key])

    def _metrics(self) -> str:
        figures = {name: value for name, value in self._manifest.metrics.items() if math.isfinite(value)}
        rows: list[tuple[str, Any]] = [(name, f"{value:.6g}") for name, value in sorted(figures.items())]
        if (best := self._driver["best_accuracy"]) is not None and math.isfinite(best):
            rows.append(("best val/accuracy so far", f"{best:.6g}, at step {self._driver['best_step']}"))
        return _table(f"Metrics at step {self._manifest.step}", rows)

    def _command(self) -> str:
        if not self._settings:
            return ""
        shell = printable_lines(as_shell(command_of(self._settings))).replace("```", "'''")
        return (
            f"## The command\n\n```\n{shell}\n```\n\nFolders of local paths are omitted. With the same number of "
            "ranks, versions and kind of machine, this command repeats the run bit for bit. This checkpoint is "
            f"step {self._manifest.step} of the run.\n"
        )


def card_of(origin: Origin, layout: str, repo_id: str) -> str:
    """Return the card of a checkpoint that becomes `repo_id`; only a native checkpoint records its training."""
    if layout != layout_native.NAME:
        return bare_card(repo_id)
    with closing(layout_native.open_source(origin)) as checkpoint:
        card = ModelCard(checkpoint.manifest, checkpoint.files)
    base, license = look_up_model(card.base_model) if card.base_model else (None, None)
    return card.text(repo_id, base_model=base, license=license)


def bare_card(title: str) -> str:
    """Return README.md of a folder without a record of its training."""
    metadata = {"library_name": "transformers", "tags": ["rlhf"]}
    return f"{_metadata(metadata)}\n# {_inline(title)}\n\nA Hugging Face folder, written by rlhf.\n"


def _metadata(facts: Mapping[str, Any]) -> str:
    return f"---\n{yaml.safe_dump(dict(facts), sort_keys=True)}---\n"


def _table(title: str, rows: Iterable[tuple[str, Any]]) -> str:
    lines = [f"| {_inline(name)} | {_inline(value)} |" for name, value in rows]
    return "\n".join([f"## {title}\n", "| | |", "|---|---|", *lines, ""]) if lines else ""


def _inline(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", printable(text)[:500])


def _is_word(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w.-]{1,60}", value) is not None
