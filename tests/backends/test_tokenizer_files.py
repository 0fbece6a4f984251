"""What a checkpoint says about its text, from a folder and from a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rtp.backends.weights.formats import open_checkpoint
from rtp.backends.weights.gguf_tokenizer import rebuild_tokenizer
from rtp.backends.weights.tokenizer_files import TokenizerFiles, read_tokenizer
from rtp.core.errors import WeightsError
from tests.backends.make_tokenizer_ids import DATA, NUM_TEXTS, texts
from tests.support.checkpoints import BOS, CHAT_TEMPLATE, EOS, PAD, smollm2_path, write_tokenizer


@pytest.fixture(scope="module")
def smollm2() -> TokenizerFiles:
    return open_checkpoint(smollm2_path()).tokenizer


def test_ids_are_those_of_llama_cpp_and_decode_back_exactly(smollm2: TokenizerFiles):
    """200 strings in many scripts with the ids that llama.cpp gives for the same file."""
    rows = json.loads(DATA.read_text())
    assert [row["text"] for row in rows] == texts()
    assert len(rows) == NUM_TEXTS
    tokenizer = Tokenizer.from_str(smollm2.tokenizer_json)
    assert tokenizer.get_vocab_size() == 49152
    for row in rows:
        assert tokenizer.encode(row["text"], add_special_tokens=False).ids == row["ids"]
        assert tokenizer.decode(row["ids"], skip_special_tokens=False) == row["text"]


def test_a_gguf_says_its_special_tokens_and_template(smollm2: TokenizerFiles):
    tokenizer = Tokenizer.from_str(smollm2.tokenizer_json)
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm2.eos_ids == (tokenizer.token_to_id("<|im_end|>"),)
    assert not smollm2.add_bos
    assert smollm2.chat_template is not None
    assert "<|im_start|>" in smollm2.chat_template
    special = [token for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    assert len(special) == 17
    assert tokenizer.decode([1, 19556, 2]) == "Hello"


GGML: dict[str, Any] = {
    "model": "gpt2",
    "pre": "smollm",
    "tokens": ["<s>", "</s>", "<tool>", "a", "b", "ab"],
    "token_type": [3, 3, 4, 1, 1, 1],
    "merges": ["a b"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "add_bos_token": True,
}


def rebuild(**changes: Any) -> TokenizerFiles:
    ggml = {key: value for key, value in (GGML | changes).items() if value is not None}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in ggml.items()}
    return rebuild_tokenizer(Path("some.gguf"), metadata)


def test_control_tokens_are_special_and_user_defined_ones_are_text():
    files = rebuild(eot_token_id=2)
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    assert tokenizer.encode("ab<tool>a</s>").ids == [5, 2, 3, 1]
    assert tokenizer.decode([0, 5, 2, 1]) == "ab<tool>"
    assert files.eos_ids == (1, 2)
    assert (files.bos_token, files.add_bos) == ("<s>", True)
    assert files.chat_template is None
    assert files.pad_token is None


def test_add_bos_needs_a_bos_token():
    assert not rebuild(bos_token_id=None).add_bos


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "llama"}, "tokenizer llama/smollm cannot be rebuilt"),
        ({"pre": "qwen2"}, "tokenizer gpt2/qwen2 cannot be rebuilt; known are gpt2 with smollm"),
        ({"merges": None}, r"tokenizer\.ggml\.merges is missing"),
        ({"token_type": [1]}, "6 tokens but 1 token types"),
        ({"eos_token_id": 6}, r"tokenizer\.ggml\.eos_token_id is 6"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_by_name(changes: dict[str, Any], said: str):
    with pytest.raises(WeightsError, match=f"some.gguf.*{said}"):
        rebuild(**changes)


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def settings_of(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_says_its_tokens_template_and_ends(folder: Path):
    files = read_tokenizer(folder, {"eos_token_id": 1})
    assert files.tokenizer_json == (folder / "tokenizer.json").read_text()
    assert (files.bos_token, files.eos_token, files.pad_token) == (BOS, EOS, PAD)
    assert files.chat_template == CHAT_TEMPLATE
    assert files.eos_ids == (1,)
    assert not files.add_bos


@pytest.mark.parametrize(
    ("generation", "config", "eos_ids"),
    [
        ({"eos_token_id": [7, 5]}, {"eos_token_id": 9}, (1, 5, 7)),
        ({"eos_token_id": 5}, {}, (1, 5)),
        ({}, {"eos_token_id": [9, 1]}, (1, 9)),
        ({}, {}, (1,)),
        ({"eos_token_id": None}, {"eos_token_id": None}, (1,)),
    ],
)
def test_every_id_that_ends_an_answer_is_found(
    folder: Path, generation: dict[str, Any], config: dict[str, Any], eos_ids: tuple[int, ...]
):
    write(folder, "generation_config.json", generation)
    assert read_tokenizer(folder, config).eos_ids == eos_ids


def test_a_template_file_wins_and_of_named_templates_the_default(folder: Path):
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    settings_of(folder, chat_template=named)
    assert read_tokenizer(folder, {}).chat_template == "D"
    settings_of(folder, chat_template=named[:1])
    assert read_tokenizer(folder, {}).chat_template is None
    write(folder, "chat_template.jinja", "J")
    assert read_tokenizer(folder, {}).chat_template == "J"


def test_special_tokens_may_be_objects_or_stand_in_a_map_of_their_own(folder: Path):
    settings_of(folder, eos_token={"content": EOS, "lstrip": False}, bos_token=None)
    assert read_tokenizer(folder, {}).eos_token == EOS
    assert read_tokenizer(folder, {}).bos_token is None
    (folder / "tokenizer_config.json").unlink()
    write(folder, "special_tokens_map.json", {"bos_token": {"content": BOS}})
    files = read_tokenizer(folder, {})
    assert (files.bos_token, files.eos_token, files.chat_template) == (BOS, None, None)


@pytest.mark.parametrize("sequence", [False, True])
def test_add_bos_is_what_the_tokenizer_does_unless_its_settings_say_otherwise(
    folder: Path, sequence: bool
):
    from tokenizers import processors

    template = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = (
        processors.Sequence([processors.ByteLevel(), template]) if sequence else template
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    assert tokenizer.encode("a").ids[0] == 0
    assert read_tokenizer(folder, {}).add_bos
    settings_of(folder, add_bos_token=False)
    assert not read_tokenizer(folder, {}).add_bos


def test_a_suffix_is_not_a_prefix(folder: Path):
    from tokenizers import processors

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {BOS}", special_tokens=[(BOS, 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    assert not read_tokenizer(folder, {}).add_bos


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"added_tokens": [{"id": "x"}]}'),
        ("tokenizer_config.json", "[]"),
        ("generation_config.json", "{"),
    ],
)
def test_broken_files_are_named(folder: Path, name: str, content: str | None):
    if content is None:
        (folder / name).unlink()
    else:
        write(folder, name, content)
    with pytest.raises(WeightsError, match=name):
        read_tokenizer(folder, {})
