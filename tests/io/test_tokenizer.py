"""Tokenizer: exact ids however the text was seen before, text from any ids, templates as data."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from rtp.backends.weights.formats import open_checkpoint
from rtp.core.errors import ConfigError, TemplateError
from rtp.core.frontend.stops import StopStrings
from rtp.core.frontend.text import ChoiceText
from rtp.core.types import unpack_ids
from rtp.io import chat_template
from rtp.io.tokenizer import Tokenizer
from tests.support.checkpoints import smollm2_path
from tests.support.tokenizers import (
    BOS,
    CHATML,
    END,
    START,
    a_card,
    byte_level_json,
    sentencepiece_json,
)

BYTE_LEVEL = Tokenizer(a_card())
SENTENCEPIECE = Tokenizer(a_card(sentencepiece_json()))


def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    return asyncio.run(tokenizer.encode(text, add_special_tokens))


def whole(tokenizer_json: str, text: str) -> list[int]:
    """The oracle: the whole text at once by the library."""
    oracle = tokenizers.Tokenizer.from_str(tokenizer_json)
    ids: list[int] = oracle.encode(text, add_special_tokens=False).ids
    return ids


# ---------------------------------------------------------------- encoding

FRAGMENTS = [START, END, BOS, "<tool call>", "<unk>", "<0x41>", "<|im_", "end|>"]
FRAGMENTS += [" ", "  ", "\n", "a", " the", "user", "🙂", "ď", "漢字", "\u2581", "ﬁ", "."]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join)


@pytest.mark.parametrize("tokenizer_json", [byte_level_json, sentencepiece_json])
@given(text=TEXTS)
def test_cut_and_remembered_encoding_equals_the_whole(tokenizer_json, text: str) -> None:  # type: ignore[no-untyped-def]
    tokenizer = BYTE_LEVEL if tokenizer_json is byte_level_json else SENTENCEPIECE
    expected = whole(tokenizer_json(), text)
    assert encode(tokenizer, text) == expected
    assert encode(tokenizer, text) == expected


@pytest.mark.parametrize("tokenizer_json", [byte_level_json, sentencepiece_json])
def test_growing_chats_encode_as_the_whole(tokenizer_json) -> None:  # type: ignore[no-untyped-def]
    words = ["the", "fox", "", "What\n", "is", "Paris?", "🙂", "ďábel", END, "add(first):"]
    rng = random.Random(7)
    tokenizer = Tokenizer(a_card(tokenizer_json()), cache_bytes=20_000)
    for _ in range(4):
        messages = []
        for turn in range(6):
            content = " ".join(rng.choices(words, k=rng.randrange(60)))
            messages.append({"role": ("user", "assistant")[turn % 2], "content": content})
            text = tokenizer.render_chat(messages)
            assert encode(tokenizer, text) == whole(tokenizer_json(), text)


def test_earlier_turns_are_not_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(a_card())
    seen: list[str] = []
    encode_segments = tokenizer._encode

    def spy(segments: list[str]) -> list[bytes]:
        seen.extend(segments)
        return encode_segments(segments)

    monkeypatch.setattr(tokenizer, "_encode", spy)
    messages = [{"role": "user", "content": "the quick brown fox"}]
    encode(tokenizer, tokenizer.render_chat(messages))
    seen.clear()
    messages += [{"role": "assistant", "content": "the"}, {"role": "user", "content": "and"}]
    encode(tokenizer, tokenizer.render_chat(messages))
    assert "".join(seen).count("fox") == 0
    assert sum(map(len, seen)) < 120


def test_the_cache_is_bounded_and_forgets_the_least_used() -> None:
    tokenizer = Tokenizer(a_card(), cache_bytes=4000)
    for i in range(100):
        encode(tokenizer, f"{START}user number {i}{END}")
        encode(tokenizer, f"{START}kept{END}")
    cache = tokenizer._cache
    assert 0 < cache._bytes <= 4000
    assert cache._bytes == sum(
        sys.getsizeof(text) + sys.getsizeof(ids) for text, ids in cache._ids.items()
    )
    assert cache.get(f"{START}kept{END}") is not None
    assert cache.get(f"{START}user number 0{END}") is None
    encode(tokenizer, "a" * 4000)
    assert cache.get("a" * 4000) is None


def test_long_text_is_encoded_outside_the_loop_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(a_card(), inline_chars=10)
    threads = []
    encode_segments = tokenizer._encode

    def spy(segments: list[str]) -> list[bytes]:
        threads.append(threading.current_thread())
        return encode_segments(segments)

    monkeypatch.setattr(tokenizer, "_encode", spy)
    encode(tokenizer, "short")
    encode(tokenizer, "long enough to leave the loop")
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()


def test_bos_is_added_where_wanted_and_never_doubled() -> None:
    tokenizer = Tokenizer(a_card(add_bos=True))
    assert encode(tokenizer, "", True) == [0]  # V05: generate from BOS
    assert encode(tokenizer, "", False) == []
    plain = encode(tokenizer, "the", False)
    assert encode(tokenizer, "the", True) == [0, *plain]
    assert encode(tokenizer, f"{BOS}the", True) == [0, *plain]
    assert encode(BYTE_LEVEL, "", True) == []
    assert unpack_ids(asyncio.run(tokenizer.encode_packed("the"))) == [0, *plain]


def test_padding_and_truncation_of_a_tokenizer_file_are_ignored() -> None:
    spec = json.loads(byte_level_json())
    spec["truncation"] = {
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
        "direction": "Right",
    }
    tokenizer = Tokenizer(a_card(json.dumps(spec)))
    assert len(encode(tokenizer, "one two three")) > 2


def test_a_tokenizer_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(ConfigError, match="tokenizer of m"):
        Tokenizer(a_card("{}"))
    with pytest.raises(ConfigError, match="not a token"):
        Tokenizer(a_card(add_bos=True, bos_token="<nope>"))
    spec = json.loads(byte_level_json())
    spec["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(ConfigError, match="WordPiece"):
        Tokenizer(a_card(json.dumps(spec)))


# ---------------------------------------------------------------- decoding

IDS = st.lists(st.integers(0, 401), max_size=40)


@given(ids=IDS, skip=st.booleans())
def test_pieces_joined_equal_the_whole_decoding(ids: list[int], skip: bool) -> None:
    stream = BYTE_LEVEL.detokenizer(skip)
    pieces = [stream.push(token) for token in ids] + [stream.flush()]
    assert "".join(pieces) == BYTE_LEVEL.decode(ids, skip)


@given(text=st.text(st.sampled_from("the foxďβ漢🙂 \n."), max_size=30))
def test_s05_no_replacement_character_inside_a_stream(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        stream = tokenizer.detokenizer()
        pieces = [stream.push(token) for token in encode(tokenizer, f"{END}{text}")]
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) == text
        assert stream.flush() == ""


def test_a_sentencepiece_stream_keeps_its_leading_space() -> None:
    ids = encode(SENTENCEPIECE, "the fox")
    stream = SENTENCEPIECE.detokenizer()
    assert "".join(map(stream.push, ids)) == " the fox"
    assert SENTENCEPIECE.decode(ids) == "the fox"


def test_ids_without_a_token_show_nothing() -> None:
    assert BYTE_LEVEL.token_bytes(511) == b""
    assert BYTE_LEVEL.detokenizer().push(511) == ""


def test_special_tokens_are_hidden_or_shown() -> None:
    assert BYTE_LEVEL.detokenizer(True).push(2) == ""
    assert BYTE_LEVEL.detokenizer(False).push(2) == END
    assert BYTE_LEVEL.is_special(2)
    (tool,) = encode(BYTE_LEVEL, "<tool call>")
    assert BYTE_LEVEL.detokenizer(True).push(tool) == "<tool call>"
    assert not BYTE_LEVEL.is_special(tool)


def test_every_token_has_a_text_of_its_own() -> None:
    count = len(json.loads(byte_level_json())["model"]["vocab"])
    texts = [BYTE_LEVEL.token_text(token) for token in range(count)]
    assert len(set(texts)) == count
    assert BYTE_LEVEL.token_text(2) == END
    lead = next(t for t in range(count) if BYTE_LEVEL.token_bytes(t) == b"\xf0")
    assert BYTE_LEVEL.token_text(lead) == r"bytes:\xf0"


@settings(max_examples=200)
@given(
    ids=IDS,
    stops=st.lists(st.text("the 🙂\ufffdd", min_size=1, max_size=3), max_size=3),
    taken=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_a_stream_is_the_whole_decoding_up_to_the_first_stop(
    ids: list[int], stops: list[str], taken: list[bool]
) -> None:
    """S01, S03, S05: random tokens, split characters, random stops, random chunks."""
    text = ChoiceText(BYTE_LEVEL.detokenizer(), StopStrings(stops) if stops else None)
    shown = ""
    for token, take in zip(ids, taken, strict=False):
        stopped = text.push(token)
        released = text.take() if take else None
        shown += released.text if released else ""
        if stopped:
            break
    text.finish()
    last = text.take()
    shown += last.text if last else ""
    decoded = BYTE_LEVEL.decode(ids)
    ends = [end for end in range(len(decoded) + 1) if decoded[:end].endswith(tuple(stops))]
    if stops and ends:
        longest = max((s for s in stops if decoded[: ends[0]].endswith(s)), key=len)
        assert shown == decoded[: ends[0] - len(longest)]
    else:
        assert shown == decoded


# ---------------------------------------------------------------- templates

USER = {"role": "user", "content": "Hello"}


def template(source: str) -> Tokenizer:
    return Tokenizer(a_card(chat_template=source))


def test_a_chat_is_rendered_and_its_special_tokens_are_parsed() -> None:
    text = BYTE_LEVEL.render_chat([USER])
    assert text == f"{START}user\nHello{END}\n{START}assistant\n"
    ids = encode(BYTE_LEVEL, text)
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 2, 1)
    assert BYTE_LEVEL.render_chat([USER], add_generation_prompt=False).endswith(f"{END}\n")


def test_c01_a_refusal_carries_the_text_of_the_template() -> None:
    strict = template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateError, match=r"^roles must alternate$"):
        strict.render_chat([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].nothing.at_all }}",
        "{% for",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(99999999) %}x{% endfor %}",
    ],
)
def test_whatever_a_template_does_wrong_is_a_template_error(source: str) -> None:
    with pytest.raises(TemplateError):
        template(source).render_chat([USER])


def test_a_broken_template_does_not_keep_the_model_from_completions() -> None:
    assert encode(template("{% for"), "the")


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        Tokenizer(a_card(chat_template=None)).render_chat([USER])


def test_rendered_length_and_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CHARS", 1000)
    with pytest.raises(TemplateError, match="longer than 1000 characters"):
        template(CHATML).render_chat([{"role": "user", "content": "x" * 1001}])
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", -1.0)
    with pytest.raises(TemplateError, match="took longer"):
        template(CHATML).render_chat([USER])


def test_templates_find_what_they_are_written_for() -> None:
    source = (
        "  {% if true %}\n{{ bos_token }}{{ messages[0] | tojson }}{% endif %}\n"
        "{% generation %}{{ thinking }}{% endgeneration %}"
        "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ pad_token }}"
    )
    text = template(source).render_chat([{"a": "<é>"}], kwargs={"thinking": "hm", "bos_token": "B"})
    assert text == 'B{"a": "<é>"}hm14'


def test_variables_of_the_caller_do_not_replace_the_messages() -> None:
    assert "Hello" in BYTE_LEVEL.render_chat([USER], kwargs={"messages": []})


@pytest.mark.parametrize("content", ["Once  upon\n", "", "a <|im_end|> b"])
def test_a_final_message_is_continued_where_it_ends(content: str) -> None:
    trimming = template(CHATML.replace("message['content']", "message['content'] | trim"))
    text = trimming.render_chat(
        [USER, {"role": "assistant", "content": content}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert text == f"{START}user\nHello{END}\n{START}assistant\n{content}"


def test_a_message_that_the_template_hides_cannot_be_continued() -> None:
    with pytest.raises(TemplateError, match="does not show"):
        template("{{ messages[0].role }}").render_chat([USER], continue_final_message=True)


# ---------------------------------------------------------------- a real model


def test_the_tokenizer_of_a_real_model_is_exact_and_streams() -> None:
    files = open_checkpoint(smollm2_path()).tokenizer
    tokenizer = Tokenizer(
        a_card(
            files.tokenizer_json,
            chat_template=files.chat_template,
            bos_token=files.bos_token,
            eos_token=files.eos_token,
            add_bos=files.add_bos,
        )
    )
    oracle = tokenizers.Tokenizer.from_str(files.tokenizer_json)
    source = Path(__file__).read_text()
    messages = []
    for turn in range(6):
        role = ("user", "assistant")[turn % 2]
        messages.append({"role": role, "content": source[turn * 700 : turn * 700 + 900] + "🙂 ďá"})
        text = tokenizer.render_chat(messages)
        ids = encode(tokenizer, text)
        assert ids == oracle.encode(text, add_special_tokens=False).ids
    for skip in (True, False):
        stream = tokenizer.detokenizer(skip)
        assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids, skip)
