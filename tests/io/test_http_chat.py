"""POST /v1/chat/completions and the token routes over a scripted frontend."""

from __future__ import annotations

import pytest

from rtp.core.types import unpack_ids
from tests.support.scripted_frontend import BOS, ByteCodec, a_card, an_api, says

USER = {"role": "user", "content": "ab"}


async def test_a_whole_reply():
    async with an_api(says("hello")) as api:
        reply = await api.chat(max_tokens=2)
    assert reply["id"].startswith("chatcmpl-")
    assert reply["object"] == "chat.completion"
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "he", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]


async def test_an_answer_without_text_is_an_empty_string():
    async with an_api(says("")) as api:
        reply = await api.chat()
    assert reply["choices"][0]["message"]["content"] == ""


async def test_logprobs_carry_bytes_and_alternatives():
    async with an_api(says("hé")) as api:
        reply = await api.chat(logprobs=True, top_logprobs=2)
        plain = await api.chat(logprobs=True)
    content = reply["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[104], [0xC3], [0xA9]]
    assert content[0]["top_logprobs"][0] == {"token": "h", "logprob": -0.25, "bytes": [104]}
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_v11_chat_runs_to_the_context_limit():
    async with an_api(says("x"), cards=[a_card(max_model_len=20)]) as api:
        await api.chat()
        await api.chat(max_completion_tokens=3, max_tokens=9)
        error = await api.refused(
            "/v1/chat/completions", messages=[{"role": "user", "content": "x" * 30}]
        )
        assert [b.sampling.max_tokens for b in api.frontend.begins] == [13, 3]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_the_template_gets_its_switches():
    answer = {"role": "assistant", "content": "ye"}
    async with an_api(says("s")) as api:
        await api.chat(USER)
        await api.chat(USER, add_generation_prompt=False)
        await api.chat(USER, answer, continue_final_message=True)
        prompts = [bytes(unpack_ids(b.prompt)).decode() for b in api.frontend.begins]
        error = await api.refused(
            "/v1/chat/completions", messages=[USER], continue_final_message=True
        )
    assert prompts == ["u:ab\na:", "u:ab\n", "u:ab\na:ye"]
    assert error["param"] == "continue_final_message"


async def test_c01_a_template_refusal_is_the_callers():
    async with an_api(says("x")) as api:
        error = await api.refused(
            "/v1/chat/completions",
            messages=[{"role": "system", "content": "s"}, USER],
            chat_template_kwargs={"strict": True},
        )
        assert api.frontend.begins == []
    assert error["param"] == "messages"
    assert "System role not supported" in error["message"]
    assert "Traceback" not in error["message"]


async def test_a_model_without_template_says_so():
    async with an_api(says("x"), cards=[a_card(chat_template=None)]) as api:
        error = await api.refused("/v1/chat/completions", messages=[USER])
    assert "no chat template" in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_more_messages_than_the_context_has_tokens_are_refused_unread(
    path: str, monkeypatch: pytest.MonkeyPatch
):
    """A million of them would hold everyone up while the template runs."""
    rendered: list[object] = []
    monkeypatch.setattr(ByteCodec, "render_chat", lambda *a, **k: rendered.append(a))
    async with an_api(says("x"), cards=[a_card(max_model_len=128)]) as api:
        error = await api.refused(path, messages=[{"role": "user", "content": ""}] * 129)
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert rendered == []


async def test_c09_parts_and_string_have_equal_ids_and_hashes():
    parts = {"role": "user", "content": [{"type": "text", "text": "a long enough text " * 3}]}
    plain = {"role": "user", "content": "a long enough text " * 3}
    async with an_api(says("x")) as api:
        await api.chat(parts)
        await api.chat(plain)
        one, other = api.frontend.begins
    assert (one.prompt, one.hashes) == (other.prompt, other.hashes)
    assert len(one.hashes) > 0


@pytest.mark.parametrize("base", ["", "/v1"])
async def test_token_routes_need_no_model(base: str):
    async with an_api() as api:
        plain = await api.post(f"{base}/tokenize", {"prompt": "ab", "add_special_tokens": False})
        with_bos = await api.post(f"{base}/tokenize", {"prompt": "ab"})
        of_chat = await api.post(f"{base}/tokenize", {"messages": [USER]})
        back = await api.post(f"{base}/detokenize", {"tokens": [97, 98, BOS]})
        info = await api.get(f"{base}/tokenizer_info")
        for body in ({}, {"prompt": "a", "messages": [USER]}, {"prompt": 5}):
            assert (await api.post(f"{base}/tokenize", body))[0] == 400
        assert (await api.post(f"{base}/detokenize", {"tokens": [300]}))[0] == 400
        assert (await api.post(f"{base}/detokenize", {"tokens": "x"}))[0] == 400
    assert plain == (200, {"tokens": [97, 98], "count": 2, "max_model_len": 128})
    assert with_bos[1]["tokens"] == [BOS, 97, 98]
    assert bytes(of_chat[1]["tokens"]).decode() == "u:ab\na:"
    assert back == (200, {"prompt": "ab<s>"})
    assert info[0] == 200
    assert {"eos_token", "bos_token", "pad_token", "chat_template"} <= set(info[1])


async def test_a_model_without_a_file_was_created_when_the_server_started():
    async with an_api(cards=[a_card(created=5), a_card("org/sim", created=0)]) as api:
        _, listed = await api.get("/v1/models")
    dates = {model["id"]: model["created"] for model in listed["data"]}
    assert dates["toy"] == 5
    assert dates["org/sim"] > 1_700_000_000, "in our days, not in 1970"


async def test_models_are_listed_and_found():
    async with an_api(cards=[a_card(), a_card("org/other")]) as api:
        status, listed = await api.get("/v1/models")
        one = await api.get("/v1/models/org/other")
        none = await api.get("/v1/models/nope")
        unnamed = await api.refused(prompt="a")
        unknown = await api.refused(status=404, prompt="a", model="nope")
    assert (status, listed["object"]) == (200, "list")
    assert [m["id"] for m in listed["data"]] == ["org/other", "toy"]
    assert one == (200, listed["data"][0])
    assert one[1]["object"] == "model"
    assert (none[0], none[1]["error"]["code"]) == (404, "model_not_found")
    assert unnamed["param"] == "model"
    assert (unknown["code"], unknown["param"]) == ("model_not_found", "model")
