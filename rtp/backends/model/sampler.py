"""Logits -> tokens: penalties, bias, temperature, truncation, and one counter-based draw per row.

Order of processing: penalties on the model's logits; logit bias; ids that must not end the output
yet; temperature; top-k; top-p over what top-k left; min-p. Truncation keeps every token that is
as likely as the last one kept, so equal logits are never parted by their order in a sort, and the
draw inverts the cumulative distribution over ids in order. A row's token is a function of its
logits and its counter alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rtp.backends.model.draws import uniforms
from rtp.backends.model.sequences import Sequence

_COLDEST = 1e-6
"""Temperatures below it, other than 0, are raised to it: the draw is greedy but for exact ties."""


def sample(logits: Tensor, sequences: list[Sequence], indices: list[int]) -> npt.NDArray[np.int64]:
    """Tokens [S] for float32 logits [S, vocab], which are left as they are.

    indices: output index of each row. Rows of temperature 0 take the likeliest token, the lowest id
    among equals. Cost: a pass per greedy row; about ten for a row with every option on.
    """
    rows = list(zip(sequences, indices, strict=True))
    plain = [_is_plain(sequence, index) for sequence, index in rows]
    if all(plain):
        tokens: npt.NDArray[np.int64] = logits.argmax(-1).numpy()
        return tokens
    tokens = np.empty(len(rows), dtype=np.int64)
    easy = np.flatnonzero(plain)
    if len(easy):
        tokens[easy] = logits[torch.from_numpy(easy)].argmax(-1).numpy()
    hard = np.flatnonzero(~np.array(plain))
    tokens[hard] = _sample_processed(logits[torch.from_numpy(hard)], [rows[i] for i in hard])
    return tokens


def _is_plain(sequence: Sequence, index: int) -> bool:
    """Greedy over the model's own logits."""
    return (
        sequence.sampling.temperature == 0
        and sequence.tokens is None
        and not len(sequence.bias_ids)
        and not (index < sequence.sampling.min_tokens and len(sequence.stop_ids))
    )


def _sample_processed(logits: Tensor, rows: list[tuple[Sequence, int]]) -> npt.NDArray[np.int64]:
    """Tokens for logits that may be overwritten."""
    adjust(logits, rows)
    tokens = np.empty(len(rows), dtype=np.int64)
    warm = np.array([sequence.sampling.temperature > 0 for sequence, _ in rows])
    if not warm.all():
        cold = np.flatnonzero(~warm)
        tokens[cold] = logits[torch.from_numpy(cold)].argmax(-1).numpy()
        logits = logits[torch.from_numpy(np.flatnonzero(warm))]
        rows = [row for row, is_warm in zip(rows, warm, strict=True) if is_warm]
    if rows:
        weights = truncated(logits, [sequence for sequence, _ in rows])
        tokens[warm] = _draw(weights, rows)
    return tokens


def adjust(logits: Tensor, rows: list[tuple[Sequence, int]]) -> None:
    """Applies penalties, bias and minimum length in place.

    Repetition, over prompt and output: a positive logit is divided, a negative one multiplied, as
    in CTRL (Keskar et al. 2019). Presence and frequency, over the output: as OpenAI documents them.
    Only the ids concerned are touched: O(distinct tokens seen).
    """
    table = logits.numpy()
    for row, (sequence, index) in enumerate(rows):
        sampling, line = sequence.sampling, table[row]
        if sequence.tokens is not None:
            ids, counts = sequence.tokens.ids, sequence.tokens.counts
            values = line[ids]
            factor = np.float32(sampling.repetition_penalty)
            values = np.where(values > 0, values / factor, values * factor)
            values -= np.float32(sampling.presence_penalty) * (counts > 0)
            values -= np.float32(sampling.frequency_penalty) * counts
            line[ids] = values
        if len(sequence.bias_ids):
            line[sequence.bias_ids] += sequence.bias_values
        if index < sampling.min_tokens:
            line[sequence.stop_ids] = -np.inf


def truncated(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Probabilities [S, vocab] after temperature, with 0 for every token that truncation excludes.

    The remaining ones are not scaled up to 1. Overwrites logits.
    """
    params = [sequence.sampling for sequence in sequences]
    temperatures = torch.tensor([max(p.temperature, _COLDEST) for p in params])
    logits -= logits.amax(-1, keepdim=True)
    logits /= temperatures[:, None]
    vocab = logits.shape[1]
    _keep_top_k(logits, np.array([p.top_k if 0 < p.top_k < vocab else vocab for p in params]))
    probs = torch.softmax(logits, -1)
    least = np.array([p.min_p for p in params], dtype=np.float32) * probs.amax(-1).numpy()
    for row in np.flatnonzero([p.top_p < 1 for p in params]):
        least[row] = max(least[row], _nucleus_edge(probs[row].numpy(), params[row].top_p))
    if least.any():
        probs.masked_fill_(probs < torch.from_numpy(least)[:, None], 0)
    return probs


def _keep_top_k(logits: Tensor, top_k: npt.NDArray[np.int64]) -> None:
    """Sets logits below each row's k-th largest to -inf."""
    rows = np.flatnonzero(top_k < logits.shape[1])
    if len(rows):
        chosen = logits[torch.from_numpy(rows)]
        values = chosen.topk(int(top_k[rows].max())).values
        edge = values.gather(1, torch.from_numpy(top_k[rows] - 1)[:, None])
        logits[torch.from_numpy(rows)] = chosen.masked_fill_(chosen < edge, -torch.inf)


def _nucleus_edge(probs: npt.NDArray[np.float32], top_p: float) -> np.float32:
    """The least probability in the smallest set of likeliest tokens that holds top_p.

    Tokens under (1 - top_p) / vocab hold less than 1 - top_p together, so the edge lies above them,
    and only the others are sorted.
    """
    candidates = probs[probs >= (1 - top_p) / len(probs)]
    ordered = np.sort(candidates)[::-1]
    held = np.cumsum(ordered, dtype=np.float64)
    edge: np.float32 = ordered[min(int(np.searchsorted(held, top_p)), len(ordered) - 1)]
    return edge


def _draw(weights: Tensor, rows: list[tuple[Sequence, int]]) -> npt.NDArray[np.int64]:
    """The first id whose cumulative weight passes the row's draw."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    draws = uniforms(
        [sequence.sampling.seed for sequence, _ in rows],
        [sequence.choice for sequence, _ in rows],
        [index for _, index in rows],
    )
    total = cumulative[:, -1].numpy()
    target = np.minimum(draws * total, np.nextafter(total, 0))
    found = torch.searchsorted(cumulative, torch.from_numpy(target)[:, None], right=True)
    tokens: npt.NDArray[np.int64] = found[:, 0].numpy()
    return tokens
