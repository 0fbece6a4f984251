"""POST /v1/completions over a scripted frontend: prompts, choices, usage, logprobs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from rtp.core.commands import Chunk, Deliver, Ended
from rtp.core.hashing import block_hashes, namespace
from rtp.core.steps import TokenLogprobs
from rtp.core.types import unpack_ids
from tests.support.scripted_frontend import (
    BOS,
    VOCAB,
    a_card,
    an_api,
    says,
    scored,
)


async def test_a_whole_reply():
    async with an_api(says("hello", cached=2)) as api:
        reply = await api.complete(max_tokens=16)
    assert set(reply) == {"id", "object", "created", "model", "choices", "usage"}
    assert reply["id"].startswith("cmpl-")
    assert (reply["object"], reply["model"]) == ("text_completion", "toy")
    assert reply["choices"] == [
        {
            "index": 0,
            "text": "hello",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert reply["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_what_is_begun_carries_every_wish():
    async with an_api(says("x"), default_timeout_s=50) as api:
        await api.complete(
            prompt=list(range(20)),
            max_tokens=9,
            min_tokens=2,
            temperature=0.7,
            top_p=0.9,
            top_k=VOCAB,
            min_p=0.1,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.5,
            logit_bias={"7": -5},
            seed=42,
            stop="END",
            stop_token_ids=[3],
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            ignore_eos=True,
            priority=99,
            cache_salt="pepper",
            chat_id="c1",
            n=3,
        )
        (begin,) = api.frontend.begins
    sampling = begin.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (9, 2, 42)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 0)
    assert (sampling.min_p, sampling.presence_penalty) == (0.1, 0.5)
    assert (sampling.frequency_penalty, sampling.repetition_penalty) == (-0.5, 1.5)
    assert sampling.logit_bias == {7: -5}
    assert (sampling.logprobs, sampling.prompt_logprobs) == (None, None)
    assert (sampling.ignore_eos, sampling.stop_token_ids) == (True, (3,))
    assert (begin.stop, begin.include_stop, begin.skip_special_tokens) == (("END",), True, False)
    assert (begin.n, begin.priority, begin.chat_id, begin.timeout_s) == (3, 16, "c1", 50)
    seed = namespace(secret=b"secret", revision="r1", salt="0:pepper")
    assert begin.namespace == seed
    assert begin.hashes == block_hashes(begin.prompt, 16, seed)
    assert len(begin.hashes) == 16
    assert unpack_ids(begin.prompt) == list(range(20))


async def test_a_seed_is_drawn_for_each_prompt_when_none_is_given():
    async with an_api(says("x")) as api:
        await api.complete(prompt=["a", "a"])
        await api.complete(prompt=["a", "a"], seed=-5)
    first, second, *fixed = (begin.sampling.seed for begin in api.frontend.begins)
    assert first != second
    assert fixed[0] == fixed[1] >= 0


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[BOS, 97, 98]]),
        (["ab", "c"], [[BOS, 97, 98], [BOS, 99]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("", [[BOS]]),
        ([""], [[BOS]]),
    ],
)
async def test_v16_prompt_forms(prompt: Any, expected: list[list[int]]):
    async with an_api(says("x")) as api:
        reply = await api.complete(prompt=prompt)
        assert [unpack_ids(begin.prompt) for begin in api.frontend.begins] == expected
    assert [c["index"] for c in reply["choices"]] == list(range(len(expected)))
    assert reply["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_v16_choices_of_several_prompts_are_in_order_and_prompts_count_once():
    async with an_api(says("xy")) as api:
        reply = await api.complete(prompt=[[1, 2, 3], [4, 5]], n=2)
        ids = [begin.request_id for begin in api.frontend.begins]
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2, 3]
    assert reply["usage"]["prompt_tokens"] == 5
    assert reply["usage"]["completion_tokens"] == 8
    assert ids == [f"{reply['id']}-0", f"{reply['id']}-1"]


async def test_v15_two_greedy_choices():
    async with an_api(says("same")) as api:
        reply = await api.complete(n=2, temperature=0)
        assert api.frontend.begins[0].sampling.temperature == 0
    assert [(c["index"], c["text"]) for c in reply["choices"]] == [(0, "same"), (1, "same")]


@pytest.mark.parametrize(
    "prompt",
    [
        [999_999_999],
        [-1],
        [1.5],
        [VOCAB],
        [2**70],
        [[1], [VOCAB]],
        [1, "a"],
        ["a", 1],
        ["a", [1]],
        [[1], "a"],
        [True],
        [None],
        5,
        {"a": 1},
        [],
        [[]],
        ["a"] * 2049,
    ],
)
async def test_v03_v05_prompts_that_cannot_be_run_are_refused(prompt: Any):
    async with an_api(says("x")) as api:
        error = await api.refused(prompt=prompt)
        assert (error["type"], error["param"]) == ("invalid_request_error", "prompt")
        assert api.frontend.begins == []


@pytest.mark.parametrize("prompt", ["", [], [[]], [""]])
async def test_v05_empty_prompts_without_bos_are_refused(prompt: Any):
    async with an_api(says("x"), cards=[a_card(add_bos=False)]) as api:
        assert (await api.refused(prompt=prompt))["param"] == "prompt"
        assert api.frontend.begins == []


@pytest.mark.parametrize("bias", [{"99999999": 5}, {"abc": 5}, {"-1": 5}, {"1.0": 1}, {"²": 1}])
async def test_v04_bias_of_no_token_is_refused(bias: dict[str, float]):
    async with an_api(says("x")) as api:
        assert (await api.refused(prompt="a", logit_bias=bias))["param"] == "logit_bias"
        error = await api.refused(prompt="a", stop_token_ids=[VOCAB])
        assert error["param"] == "stop_token_ids"
        assert api.frontend.begins == []


async def test_v09_l06_what_exceeds_the_context_is_refused_with_both_numbers():
    async with an_api(says("x"), cards=[a_card(max_model_len=16)]) as api:
        long = await api.refused(prompt=[1] * 17)
        sum_is_long = await api.refused(prompt=[1] * 10, max_tokens=7, echo=True, logprobs=1)
        full = await api.refused(prompt=[1] * 16)
        untokenised = await api.refused(prompt="a" * 256 * 18)
        assert api.frontend.begins == []
        fits = await api.complete(prompt=[1] * 16, max_tokens=0)
        await api.complete(prompt=[1] * 10)
        await api.complete(prompt=[1] * 16, max_tokens=2, truncate_prompt_tokens=-1)
        await api.complete(prompt=list(range(16)), max_tokens=2, truncate_prompt_tokens=3)
        clipped, cut, last = api.frontend.begins[1:]
    for error, number in ((long, "17"), (sum_is_long, "17"), (full, "16"), (untokenised, "18")):
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert number in error["message"]
        assert "16" in error["message"]
    assert fits["usage"]["completion_tokens"] == 0
    assert clipped.sampling.max_tokens == 6
    assert len(unpack_ids(cut.prompt)) == 14
    assert unpack_ids(last.prompt) == [13, 14, 15]


async def test_v08_temperatures_that_mean_greedy():
    async with an_api(says("x")) as api:
        for wish in ({"temperature": 0}, {"temperature": 1e-9}, {"top_p": 0}):
            await api.complete(**wish)
        await api.complete(temperature=2.0)
    assert [b.sampling.temperature for b in api.frontend.begins] == [0, 0, 0, 2]
    assert api.frontend.begins[2].sampling.top_p == 1


async def test_min_tokens_above_the_output_allowed_is_refused():
    async with an_api(says("x"), cards=[a_card(max_model_len=20)]) as api:
        for wish in ({"max_tokens": 4}, {}, {"prompt": [1] * 16}):
            error = await api.refused(**{"prompt": "a", "min_tokens": 17} | wish)
            assert error["param"] == "min_tokens"
        assert api.frontend.begins == []


async def test_v01_an_absurd_n_begins_nothing():
    async with an_api(says("x")) as api:
        error = await api.refused(prompt="a", n=5_000_000, max_tokens=1)
        assert error["param"] == "n"
        assert (await api.refused(prompt=["a"] * 1000, n=128))["param"] == "prompt"
        assert api.frontend.begins == []


async def test_l01_l02_echo_scores_the_prompt():
    async with an_api(says("z")) as api:
        reply = await api.complete(
            prompt=[97, 98, 99], max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234
        )
        sampling = api.frontend.begins[0].sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (1, 1)
    choice = reply["choices"][0]
    assert choice["text"] == "abcz"
    arrays = choice["logprobs"]
    assert arrays["tokens"] == ["a", "b", "c", "z"]
    assert arrays["text_offset"] == [0, 1, 2, 3]
    assert {len(values) for values in arrays.values()} == {4}
    assert arrays["token_logprobs"][0] is arrays["top_logprobs"][0] is None
    assert arrays["token_logprobs"][2] == -0.1 - 1 / 3
    for token, value, tops in list(zip(*(arrays[k] for k in list(arrays)[:3]), strict=True))[1:]:
        assert tops[token] == value == max(tops.values())


async def test_v06_no_tokens_with_and_without_echo():
    async with an_api(says("zz")) as api:
        scored_only = await api.complete(prompt="abc", max_tokens=0, echo=True, logprobs=1)
        silent = await api.complete(prompt="abc", max_tokens=0)
    choice = scored_only["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "b", "c"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2]
    assert scored_only["usage"]["completion_tokens"] == 0
    assert (silent["choices"][0]["text"], silent["choices"][0]["finish_reason"]) == ("", "length")


async def test_l03_minus_infinity_and_equal_texts_keep_the_chosen():
    entry = TokenLogprobs(97, float("-inf"), (258, 98), (-0.5, float("-inf")))

    def script(begin):
        yield Deliver(begin.request_id, (Chunk(0, "a", (97,), (entry,), "length"),), 0, 1)
        yield Ended(begin.request_id, 3, 0, 1)

    async with an_api(script) as api:
        choice = (await api.complete(max_tokens=1, logprobs=2))["choices"][0]
        chat = (await api.chat(max_tokens=1, logprobs=True, top_logprobs=2))["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0]
    assert choice["logprobs"]["top_logprobs"] == [
        {"token_id:258": -0.5, "b": -9999.0, "a": -9999.0}
    ]
    assert chat["logprobs"]["content"][0]["logprob"] == -9999.0
    assert [t["logprob"] for t in chat["logprobs"]["content"][0]["top_logprobs"]] == [-0.5, -9999.0]


async def test_offsets_count_characters_over_split_ones():
    async with an_api() as api:
        asked = asyncio.create_task(api.complete(logprobs=0, echo=True, prompt="é!"))
        await api.frontend.begun.wait()
        handle = api.frontend.handles[0]
        tokens = list("ď?".encode())
        of_prompt = tuple(scored(t, 0) for t in "é!".encode())
        for i, (text, ids) in enumerate([("ď", tokens[:2]), ("?", tokens[2:])]):
            chunk = Chunk(0, text, tuple(ids), tuple(scored(t, 0) for t in ids), "stop" * i)
            handle.put(Deliver(handle.begin.request_id, (chunk,), 0, 3, of_prompt * (not i)))
        handle.put(Ended(handle.begin.request_id, 4, 0, 3))
        choice = (await asked)["choices"][0]
    assert choice["text"] == "é!ď?"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 2, 3, 3]


async def test_offsets_follow_the_text_over_bytes_that_are_none_and_over_held_text():
    """A lone piece of a character shows as one U+FFFD; a stop's beginning is held, its token with
    it. Streamed or whole, each token's offset is where its text begins."""
    ids = (0xF0, 0x9F, 97, 0x80, 98, 99)

    def script(begin):
        score = {token: (scored(token, 0),) for token in ids}
        parts = [("\ufffda", (0xF0, 0x9F, 97)), ("\ufffd", (0x80,)), ("b", ()), ("c", (98, 99))]
        for i, (text, some) in enumerate(parts):
            scores = tuple(entry for token in some for entry in score[token])
            chunk = Chunk(0, text, some, scores, "length" * (i == 3))
            yield Deliver(begin.request_id, (chunk,), 0, 6, (scored(97, 0),) * (not i))
        yield Ended(begin.request_id, 2, 0, 6)

    for echo, start in ((False, 0), (True, 2)):
        wish = {"prompt": [97, 97], "max_tokens": 6, "logprobs": 0, "echo": echo}
        async with an_api(script) as api:
            choice = (await api.complete(**wish))["choices"][0]
            raw = await api.raw_stream(**wish)
        whole = choice["logprobs"]["text_offset"]
        streamed: list[int] = []
        for line in raw.decode().split("\n\n")[:-2]:
            logprobs = json.loads(line.removeprefix("data: "))["choices"][0]["logprobs"]
            streamed += logprobs["text_offset"]
        assert choice["text"][start:] == "\ufffda\ufffdbc"
        assert whole == streamed
        assert whole[start:] == [start + i for i in (0, 1, 1, 2, 3, 4)]


async def test_streamed_arrays_join_to_the_whole_ones():
    wish = {"max_tokens": 4, "logprobs": 2, "echo": True, "n": 2, "prompt": "ab"}
    async with an_api(says("hello")) as api:
        whole = await api.complete(**wish)
        raw = await api.raw_stream(**wish)
    joined: list[dict[str, list[Any]]] = [{}, {}]
    for line in raw.decode().split("\n\n")[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            for name, values in choice["logprobs"].items():
                joined[choice["index"]].setdefault(name, []).extend(values)
    assert joined == [choice["logprobs"] for choice in whole["choices"]]


async def test_a_choice_that_overtakes_the_prompts_scores_waits_for_them():
    """Choice 1 may find the prompt cached while choice 0 computes it again to score it."""
    wish = {"prompt": "ab", "max_tokens": 2, "logprobs": 1, "echo": True, "n": 2}

    def script(begin):
        of_prompt = tuple(scored(t, 1) for t in b"ab")
        said = [("x", ""), ("y", "stop")]
        one = [Chunk(1, c, (ord(c),), (scored(ord(c), 1),), end) for c, end in said]
        zero = Chunk(0, "z", (122,), (scored(122, 1),), "stop")
        yield Deliver(begin.request_id, (one[0],), 0, 1)
        yield Deliver(begin.request_id, (zero, one[1]), 0, 3, of_prompt)
        yield Ended(begin.request_id, 3, 0, 3)

    async with an_api(script) as api:
        raw = await api.raw_stream(**wish)
        whole = await api.complete(**wish)
    first = [json.loads(p[6:])["choices"][0] for p in raw.decode().split("\n\n")[:-2]]
    assert [c["text"] for c in first] == ["abx", "abz", "y"]
    assert [len(c["logprobs"]["tokens"]) for c in first] == [4, 4, 1]
    assert [c["text"] for c in whole["choices"]] == ["abz", "abxy"]


async def test_best_of_returns_the_likeliest():
    def script(begin):
        chunks = tuple(
            Chunk(i, "abc"[i], (97 + i,), (scored(97 + i, 0, value),), "stop")
            for i, value in enumerate((-3.0, -1.0, -2.0))
        )
        yield Deliver(begin.request_id, chunks, 0, 3)
        yield Ended(begin.request_id, 3, 0, 3)

    async with an_api(script) as api:
        reply = await api.complete(best_of=3, n=2)
        (begin,) = api.frontend.begins
    assert (begin.n, begin.sampling.logprobs) == (3, 0)
    assert [(c["index"], c["text"], c["logprobs"]) for c in reply["choices"]] == [
        (0, "b", None),
        (1, "c", None),
    ]
    assert reply["usage"]["completion_tokens"] == 3


async def test_prompt_logprobs_by_id():
    async with an_api(says("z")) as api:
        choice = (await api.complete(prompt=[97, 98], max_tokens=1, prompt_logprobs=2))["choices"][
            0
        ]
        chat = (await api.chat(max_tokens=1, prompt_logprobs=0))["choices"][0]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second == {
        "98": {"logprob": -0.1, "rank": 1, "decoded_token": "b"},
        "99": {"logprob": -1.2000000000000002, "rank": 2, "decoded_token": "c"},
    }
    assert choice["logprobs"] is None
    assert len(chat["prompt_logprobs"]) == 7
    assert chat["prompt_logprobs"][1]["58"]["rank"] is None


async def test_v20_fifty_requests_have_fifty_ids():
    async with an_api(says("x")) as api:
        replies = await asyncio.gather(*(api.complete() for _ in range(50)))
    assert len({reply["id"] for reply in replies}) == 50


async def test_x_session_id_and_its_aliases_name_the_chat():
    async with an_api(says("x")) as api:
        for headers, fields in (
            ({"X-Session-Id": "h"}, {"chat_id": "b"}),
            ({}, {"chat_id": "b", "prompt_cache_key": "k"}),
            ({}, {"prompt_cache_key": "k"}),
            ({}, {}),
            ({}, {"chat_id": "x" * 5000}),
        ):
            await api.post("/v1/completions", {"prompt": "a"} | fields, **headers)
        names = [begin.chat_id for begin in api.frontend.begins]
    assert names[:4] == ["h", "b", "k", ""]
    assert len(names[4]) == 64
