"""Writes data/greedy_references.json: what transformers in float32 continues 20 prompts with.

    python -m tests.backends.make_references

Each entry: prompt ids, 64 output ids, and at each output the gap between the best two logits, which
tells a near-tie from a fault when another implementation parts from it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from rtp.backends.weights.fetch import resolve
from rtp.backends.weights.formats import Checkpoint, open_checkpoint

DATA = Path(__file__).parent / "data" / "greedy_references.json"
MODEL = "smollm2-135m"
NUM_OUTPUTS = 64

TEXTS = (
    "The capital of France is",
    "Gravity is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of thermodynamics state that",
    "Q: What is the largest planet in the solar system?\nA:",
    "To make a cup of tea, first",
    "SELECT name, age FROM users WHERE",
    "In 1969, the first humans",
    '{"name": "Ada", "born": 1815, "occupation":',
    "La tour Eiffel est",
    "She opened the old wooden box and found",
    "The difference between a list and a tuple in Python is that a list",
    "Water boils at 100 degrees Celsius because",
    "import numpy as np\n\nx = np.linspace(0, 1, 100)\ny =",
    "Roses are red,\nviolets are blue,\n",
)
CHATS = ("Why is the sky blue?", "Write a haiku about autumn.")
LONG = "The old library stood at the end of the street, and nobody had opened its doors for years. "


def prompts(tokenizer: Tokenizer, template: str) -> list[list[int]]:
    """18 completions of 3 to 20 tokens, one of them after a long preface, and 2 chats."""
    import jinja2

    chats = [
        jinja2.Template(template).render(
            messages=[{"role": "user", "content": text}], add_generation_prompt=True
        )
        for text in CHATS
    ]
    texts = [*TEXTS[:-1], LONG * 12 + TEXTS[-1], *chats]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def transformers_model(checkpoint: Checkpoint) -> Any:  # Any: transformers has no precise types
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**checkpoint.config))
    model.load_state_dict(dict(checkpoint.tensors()), strict=False)
    model.tie_weights()
    return model.eval()


@torch.inference_mode()
def continued(model: Any, prompt: list[int]) -> dict[str, list[Any]]:
    """Greedy ids and gaps, end of text ignored; one token at a time over a cache."""
    output: list[int] = []
    gaps: list[float] = []
    ids, cache = torch.tensor([prompt]), None
    for _ in range(NUM_OUTPUTS):
        step = model(ids, past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        best = step.logits[0, -1].topk(2)
        output.append(int(best.indices[0]))
        gaps.append(round(float(best.values[0] - best.values[1]), 6))
        ids = best.indices[:1][None]
    return {"prompt": prompt, "output": output, "gaps": gaps}


def main() -> None:
    checkpoint = open_checkpoint(resolve(MODEL))
    files = checkpoint.tokenizer
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    model = transformers_model(checkpoint)
    entries = [continued(model, p) for p in prompts(tokenizer, files.chat_template or "")]
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
    DATA.write_text(f'{{"model":"{MODEL}","references":[\n{lines}\n]}}\n')
    print(f"{len(entries)} references, smallest gap {min(min(e['gaps']) for e in entries):.2g}")


if __name__ == "__main__":
    main()
