"""Sampling from a Hugging Face model as it stands: for evaluating models that were not trained
here.

Weights are read from safetensors only, and no code of a model's author is run. Nothing is learned
through this engine: its log-probs are the model's own, for the record.

Shapes: B sequences, T tokens of a padded prompt, V vocabulary.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_binac.rollout.sampling import pick
from megatron_binac.seeds import uniforms
from megatron_binac.types import Completion, Sampling

PRECISIONS = {"auto": "auto", "fp32": torch.float32, "bf16": torch.bfloat16}


def is_hugging_face(model: str) -> bool:
    """Whether this is a folder of a Hugging Face model, or no folder at all (a name on the hub)."""
    folder = Path(model)
    if not folder.exists():
        return True
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and bool({"model_type", "architectures"} & set(config))


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            f"a Hugging Face model needs the package transformers ({error}); "
            "pip install 'megatron_binac[hf]'"
        ) from error


def _loaded(load: Any, model: str, what: str, **options: Any) -> Any:
    try:
        return load(model, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"the {what} of {model} cannot be loaded: {reason[:300]}; give a run folder, a folder "
            "with config.json, tokenizer.json and .safetensors files, or a name on the hub"
        ) from error


class TransformersTokenizer:
    """A model's own tokenizer, with its chat template.

    Example: ``TransformersTokenizer("Qwen2.5-0.5B-Instruct").encode("7 + 5")``
    """

    def __init__(self, model: str) -> None:
        """Load it; ValueError where there is none or it has no token that ends a text."""
        self._backend = _loaded(_transformers().AutoTokenizer.from_pretrained, model, "tokenizer")
        if self._backend.eos_token_id is None:
            raise ValueError(f"the tokenizer of {model} has no token that ends a text (eos_token)")
        self.vocab_size: int = len(self._backend)
        self.end_id: int = self._backend.eos_token_id
        self.pad_id: int = self._backend.pad_token_id or self.end_id

    @property
    def has_chat_template(self) -> bool:
        return bool(self._backend.chat_template)

    def encode(self, text: str) -> list[int]:
        """Ids of a text; what spells a special token is text."""
        return self._backend.encode(text, add_special_tokens=False, split_special_tokens=True)

    def encode_markup(self, text: str) -> list[int]:
        """Ids of a piece of the chat template; what spells a special token is that token."""
        return self._backend.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(
            [int(i) for i in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def token_id(self, piece: str) -> int:
        found: Any = self._backend.convert_tokens_to_ids(piece)
        if found is None or found == self._backend.unk_token_id:
            raise ValueError(f"the vocabulary has no token {piece!r}")
        return int(found)

    def offsets(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        ends = [len(self.decode(ids[: i + 1])) for i in range(len(ids))]
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A conversation in the model's chat template, up to where its answer begins."""
        return self._backend.apply_chat_template(
            [dict(m) for m in messages], tokenize=False, add_generation_prompt=True
        )


class HuggingFaceEngine:
    """Samples from a causal language model of the library; see `Engine`.

    Ranks share the prompts out, each with the whole model on its own device.
    """

    def __init__(
        self, model: str, tokenizer: TransformersTokenizer, *, precision: str = "auto"
    ) -> None:
        """Load the weights; ValueError where they are not there or not as safetensors."""
        library = _transformers()
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        self.model: Any = _loaded(
            library.AutoModelForCausalLM.from_pretrained,
            model,
            "weights",
            dtype=PRECISIONS[precision],
            use_safetensors=True,
        )
        self.model.to(self.device).eval()
        self.version = 0
        self.pad_id = tokenizer.pad_id
        stops: Any = getattr(self.model.generation_config, "eos_token_id", None)
        listed = stops if isinstance(stops, list) else [] if stops is None else [stops]
        self.end_ids = frozenset([tokenizer.end_id, *map(int, listed)])
        """Ids that end an answer: some models have several."""

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def max_tokens(self) -> int | None:
        """Longest context that the model was made for, where it says so."""
        return getattr(self.model.config, "max_position_embeddings", None)

    def publish(self, version: int) -> None:
        self.version = version

    def close(self) -> None:
        """Nothing is held between calls."""

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        """See `Engine.generate`; prompts of like length are sampled together."""
        if len(prompts) != len(seeds):
            raise ValueError(
                f"got {len(seeds)} seeds for {len(prompts)} prompts, expected one each"
            )
        rank, world = 0, 1
        if dist.is_initialized():
            rank, world = dist.get_rank(), dist.get_world_size()
        mine = list(range(len(prompts)))[rank::world]
        answers = self._sample(prompts, seeds, mine, sampling)
        parts = [answers]
        if world > 1:
            parts = [[] for _ in range(world)]
            dist.all_gather_object(parts, answers)
        return [parts[i % world][i // world] for i in range(len(prompts))]

    def _sample(
        self,
        prompts: Sequence[np.ndarray],
        seeds: Sequence[int],
        rows: Sequence[int],
        sampling: Sampling,
    ) -> list[Completion]:
        if not rows:
            return []
        ends = np.asarray(sorted(self.end_ids | {sampling.stop_id}))
        longest = max(len(prompts[i]) for i in rows)
        ids_BT = np.full((len(rows), longest), self.pad_id, np.int64)
        mask_BT = np.zeros((len(rows), longest), np.int64)
        for row, i in enumerate(rows):
            # Padding on the left, so that every row's newest token is the last one.
            ids_BT[row, longest - len(prompts[i]) :] = prompts[i]
            mask_BT[row, longest - len(prompts[i]) :] = 1
        seeds_B = np.asarray([seeds[i] for i in rows], np.uint64)
        said: list[list[int]] = [[] for _ in rows]
        scores: list[list[float]] = [[] for _ in rows]
        live = np.arange(len(rows))
        mask = self._tensor(mask_BT)
        tokens = self._tensor(ids_BT)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache: Any = None
        for step in range(sampling.max_tokens):
            out = self.model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = out.past_key_values
            logits_BV = out.logits[:, -1].float()
            token_B, logprob_B = pick(logits_BV, uniforms(seeds_B[live], step), sampling)
            token_B, logprob_B = token_B.cpu().numpy(), logprob_B.cpu().numpy()
            for row, token, logprob in zip(live, token_B, logprob_B, strict=True):
                said[row].append(int(token))
                scores[row].append(float(logprob))
            going = np.flatnonzero(~np.isin(token_B, ends))
            if not len(going):
                break
            positions = positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            if len(going) < len(live):
                keep = self._tensor(going)
                cache.batch_select_indices(keep)
                live, token_B = live[going], token_B[going]
                mask, positions = mask[keep], positions[keep]
            tokens = self._tensor(token_B.astype(np.int64))[:, None]
        return [
            Completion(
                ids=np.asarray(ids, np.int32),
                logprobs=np.asarray(logprobs, np.float32),
                finish="stop" if ids[-1] in ends else "length",
                version=self.version,
            )
            for ids, logprobs in zip(said, scores, strict=True)
        ]

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(values, device=self.device)
