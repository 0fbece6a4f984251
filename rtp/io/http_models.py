"""Routes about models and tokens: list, tokenise, detokenise, what evaluation clients probe for."""

from __future__ import annotations

import time

import msgspec
from aiohttp import web

from rtp.core.card import ModelCard
from rtp.core.types import unpack_ids
from rtp.io.errors_http import model_not_found
from rtp.io.http_body import Served, read_json
from rtp.io.openai_prompts import chat_prompt, pack_checked
from rtp.io.openai_schema import DetokenizeBody, TokenizeBody, parse


class Models:
    """GET /v1/models, /v1/models/{id}, /tokenizer_info; POST /tokenize, /detokenize."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._started = int(time.time())

    async def listed(self, request: web.Request) -> web.Response:
        return _json(
            {"object": "list", "data": [self._entry(card) for card in self._served.cards()]}
        )

    async def one(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        for card in self._served.cards():
            if card.model == name:
                return _json(self._entry(card))
        raise model_not_found(name)

    def _entry(self, card: ModelCard) -> dict[str, object]:
        return {
            "id": card.model,
            "object": "model",
            "created": card.created or self._started,
            "owned_by": "rtp",
            "max_model_len": card.max_model_len,
        }

    async def tokenize(self, request: web.Request) -> web.Response:
        body = parse(await read_json(request), TokenizeBody)
        card, codec = self._served.find(body.model)
        if body.prompt is None:
            ids = unpack_ids((await chat_prompt(body, card, codec)).ids)
        else:
            wish = body.add_special_tokens is not False
            ids = unpack_ids(await codec.encode_packed(body.prompt, wish))
        return _json({"tokens": ids, "count": len(ids), "max_model_len": card.max_model_len})

    async def detokenize(self, request: web.Request) -> web.Response:
        body = parse(await read_json(request), DetokenizeBody)
        card, codec = self._served.find(body.model)
        ids = unpack_ids(pack_checked(body.tokens, card.vocab_size, "tokens"))
        return _json({"prompt": codec.decode(ids, False)})

    async def tokenizer_info(self, request: web.Request) -> web.Response:
        card, _ = self._served.find(request.query.get("model"))
        return _json(
            {
                "model": card.model,
                "bos_token": card.bos_token,
                "eos_token": card.eos_token,
                "pad_token": card.pad_token,
                "chat_template": card.chat_template,
                "add_bos_token": card.add_bos,
                "vocab_size": card.vocab_size,
                "model_max_length": card.max_model_len,
            }
        )


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
