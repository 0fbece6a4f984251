"""What a frontend must know of a model to speak for it; served by its workers, so that frontends
and the Master never open model files."""

from __future__ import annotations

import hashlib

import msgspec


class ModelCard(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Tokenizer, template and limits of one model. Equal cards have equal digests."""

    model: str
    """The name clients ask for."""
    revision: str
    """Names the weights; part of the block hash seed."""
    tokenizer_json: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    """Whether a completion prompt given as text starts with BOS."""
    vocab_size: int
    """Ids 0 .. vocab_size-1 may be sent."""
    max_model_len: int
    block_size: int
    created: int
    """Seconds since 1970, of the weights file; 0: it has none."""

    def digest(self) -> str:
        """32 hex digits; the workers' registration carries it."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).hexdigest()
