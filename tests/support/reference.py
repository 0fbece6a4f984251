"""transformers on the same weights, fp32: what the product's answers are compared with."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from rtp.backends.weights.fetch import resolve
from rtp.backends.weights.formats import open_checkpoint


class Reference:
    """One model in transformers. Built from a name or directory as the product would load it."""

    def __init__(self, model: str) -> None:
        checkpoint = open_checkpoint(resolve(model))
        config = AutoConfig.for_model(**checkpoint.config)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        missing, unexpected = self.model.load_state_dict(
            {name: tensor.float() for name, tensor in checkpoint.tensors()}, strict=False
        )
        self.model.tie_weights()
        assert not unexpected, unexpected
        assert all("lm_head" in name for name in missing), missing
        self.model.eval()
        self.tokenizer = Tokenizer.from_str(checkpoint.tokenizer.tokenizer_json)
        self.eos_ids = set(checkpoint.tokenizer.eos_ids)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids)
        return text

    @torch.inference_mode()
    def score(self, ids: list[int], start: int) -> tuple[float, bool]:
        """Log-probability of ids[start:] given what is before, and whether each is the argmax."""
        logits = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        rows = logits[start - 1 : len(ids) - 1]
        chosen = torch.tensor(ids[start:])
        total = rows.gather(1, chosen[:, None]).sum().item()
        return total, bool((rows.argmax(-1) == chosen).all())

    @torch.inference_mode()
    def greedy(self, ids: list[int], max_tokens: int) -> list[int]:
        """Greedy continuation, cut before EOS."""
        out: list[int] = []
        cache = None
        step = torch.tensor([ids])
        for _ in range(max_tokens):
            reply = self.model(step, cache=cache, use_cache=True)
            cache = reply.cache
            token = int(reply.logits[0, -1].argmax())
            if token in self.eos_ids:
                break
            out.append(token)
            step = torch.tensor([[token]])
        return out
