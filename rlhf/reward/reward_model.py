"""Scores chats with a sequence classifier. Imports torch, so `rlhf.reward` does not import this module; ranks do."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from typing import Any

import jinja2
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.config import RewardModelConfig
from rlhf.data.template_date import uses_date, with_date
from rlhf.errors import UserError
from rlhf.models.packing import head_of, is_packed, lay_out
from rlhf.models.special_texts import SpecialTexts
from rlhf.ranks.collectives import all_max
from rlhf.reward.scores import RewardItem, Score, Scorer


class RewardModel(Scorer):
    """Scores chats with a classifier of one label, sharded over all ranks (`backends.fsdp2.shard`) or unsharded.

    In any batch, a chat's score equals `module(input_ids)` for the chat alone, up to rounding.

    Args:
        module: from `load_reward_model`, on `device`.
        tokenizer: the reward model's own. It renders a chat by its template. Without a template, the
            scorer joins the texts.
        config: the model reads the last `max_length` tokens of a chat, or fewer if model or tokenizer allow fewer.
        day: the day for a chat template that prints the date, so that a resume on a later day gives the same scores.
        on_device: the engine's context in which `module` can be called.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: RewardModelConfig,
        device: torch.device,
        day: date,
        on_device: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._module, self._tokenizer, self._config, self._device = module, tokenizer, config, device
        self._on_device = on_device
        self._hf_config = module.config.get_text_config()
        positions = getattr(self._hf_config, "max_position_embeddings", None) or config.max_length
        self._max_length = min(config.max_length, positions, tokenizer.model_max_length)
        pad = self._hf_config.pad_token_id
        self._pad = pad if pad is not None and 0 <= pad < self._hf_config.vocab_size else None
        tokenizer.truncation_side = "left"
        self._special_texts = SpecialTexts(tokenizer)
        self._template: str | None = None
        # With several templates, transformers chooses the default one.
        template: Any = tokenizer.chat_template
        template = template.get("default") if isinstance(template, dict) else template
        if template is not None and uses_date(template):
            self._template = with_date(template, day, {})

    @torch.no_grad()
    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        """See `Scorer`. Collective; ranks may have different numbers of items, or none."""
        sequences = self._tokenize(items)
        batches = self._micro_batches([len(ids) for ids in sequences])
        # A sharded forward pass is collective: a rank with fewer micro-batches adds passes with one token.
        most = int(all_max(torch.tensor(len(batches), device=self._device)))
        forward = self._packed if is_packed(self._module) else self._padded
        scores: dict[int, float] = {}
        with self._on_device():
            for batch in batches:
                scores.update(zip(batch, forward([sequences[i] for i in batch]), strict=True))
            for _ in range(most - len(batches)):
                forward([[0]])
        return [Score(scores[i]) for i in range(len(items))]

    def _micro_batches(self, lengths: list[int]) -> list[list[int]]:
        """Group items of similar length, to reduce padding, up to the token budget. An item over budget is alone."""
        budget, packed = self._config.forward_max_token_len_per_gpu, is_packed(self._module)
        batches: list[list[int]] = []
        room = 0
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            # Padding makes each item of a micro-batch as long as the first, which is the longest.
            size = lengths[i] if packed or not batches else lengths[batches[-1][0]]
            if size > room:
                batches.append([])
                size, room = lengths[i], budget
            batches[-1].append(i)
            room -= size
        return batches

    def _tokenize(self, items: Sequence[RewardItem]) -> list[list[int]]:
        if not items:
            return []
        templated = self._tokenizer.chat_template is not None
        chats = [self._chat(item) for item in items]
        plain = ("".join(message["content"] for message in chat) for chat in chats)
        texts = [self._render(chat) for chat in chats] if templated else list(plain)
        # A template writes its special tokens itself. Truncation by the tokenizer keeps the special tokens that the
        # tokenizer adds.
        return self._tokenizer(texts, add_special_tokens=not templated, truncation=True, max_length=self._max_length)[
            "input_ids"
        ]

    def _chat(self, item: RewardItem) -> list[dict[str, str]]:
        """Return the prompt's messages and the response, without special tokens.

        With special tokens, a response could continue the chat in another role, for example as a user who praises the
        response.
        """
        chat = [*item.messages, {"role": "assistant", "content": item.response}]
        harmless = self._special_texts.harmless
        return [{key: harmless(each) if isinstance(each, str) else each for key, each in m.items()} for m in chat]

    def _render(self, chat: list[dict[str, str]]) -> str:
        try:
            text = self._tokenizer.apply_chat_template(chat, chat_template=self._template, tokenize=False)
        except jinja2.TemplateError as error:
            roles = ", ".join(message["role"] for message in chat)
            raise UserError(
                f"reward_model.path={self._config.path}: its chat template rejects a chat (roles: {roles}): {error}. "
                "Correct the prompts, or use another reward model."
            ) from error
        assert isinstance(text, str)
        return text

    def _packed(self, sequences: list[list[int]]) -> list[float]:
        rows = lay_out(self._module, self._tensor(sequences, 0), [len(s) for s in sequences])
        # The model returns one score per row. Its head returns one score per token, which a hook records.
        head = head_of(self._module)
        assert head is not None
        of_tokens: list[torch.Tensor] = []
        hook = head.register_forward_hook(lambda _, given, scores: of_tokens.append(scores))
        try:
            self._module(**rows.inputs)
        finally:
            hook.remove()
        last = torch.tensor([self._scored(s) for s in sequences], device=self._device)
        return of_tokens[0].flatten()[rows.starts + last].float().tolist()

    def _scored(self, sequence: list[int]) -> int:
        """Return the index of the token whose score the model class uses: the last non-padding token, else 0."""
        return next((i for i in reversed(range(len(sequence))) if sequence[i] != self._pad), 0)

    def _padded(self, sequences: list[list[int]]) -> list[float]:
        pad = self._pad
        if pad is None:
            # The model class scores at the last token that is not padding. So the padding id may be any id that no
            # sequence ends with.
            ends = {ids[-1] for ids in sequences}
            pad = next(i for i in itertools.count() if i not in ends)
            self._hf_config.pad_token_id = pad
        ids = self._tensor(sequences, pad)
        lengths = torch.tensor([len(s) for s in sequences], device=self._device)
        mask = torch.arange(ids.shape[1], device=self._device) < lengths[:, None]
        logits: torch.Tensor = self._module(input_ids=ids, attention_mask=mask.long()).logits
        return logits[:, 0].float().tolist()

    def _tensor(self, sequences: list[list[int]], pad: int) -> torch.Tensor:
        width = max(map(len, sequences))
        return torch.tensor([s + [pad] * (width - len(s)) for s in sequences], device=self._device)
