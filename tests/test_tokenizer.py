"""Tokenizers: ids, text, streams, templates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import OpenError, RequestError
from stages.models.fake import ByteTokens
from stages.models.loading.checkpoint import _write_tokenizer
from stages.models.loading.gguf_tokens import (
    Vocabulary,
    gguf_tokens,
    merges_from_scores,
    remembered_merges,
)
from stages.models.loading.hf_tokens import hf_tokens
from stages.models.text.chat_template import ChatTemplate, template_source
from stages.models.text.pieces import BytesDecoder, TextDecoder, join, sentencepiece

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    _write_tokenizer(folder)
    return hf_tokens(folder, None)[0]


def spm_metadata():
    """A small SentencePiece-style vocabulary with bytes, a control and a user-defined token."""
    import numpy as np

    pieces = ["<unk>", "<s>", "</s>", "\n\n", *(f"<0x{b:02X}>" for b in range(256))]
    words = ["\u2581", "a", "b", "c", "ab", "\u2581ab", "abc", "\u2581abc", "bc"]
    scores = [0.0] * 260 + [-9, -9, -9, -9, -1, -2, -4, -5, -3]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + words,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3, 4] + [6] * 256 + [1] * 9, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="module")
def spm(tmp_path_factory):
    return gguf_tokens(spm_metadata(), None, tmp_path_factory.mktemp("memory"))[0]


@pytest.fixture(scope="module", params=["tiny", "spm", "bytes"])
def any_tokens(request, tiny, spm):
    return {"tiny": tiny, "spm": spm, "bytes": ByteTokens(None)}[request.param]


# --- ids and text


def test_spm_ids(spm):
    assert spm.encode("abc") == [1, 267]  # <s> and "▁abc", by the best scores
    assert spm.encode("ab\n\nc", add_special=False) == [265, 3, 260, 263]
    assert spm.decode([1, 267, 3, 260, 264]) == "abc\n\n ab"
    assert spm.decode(spm.encode("é")) == "é"
    assert spm.token_bytes(2) == b"</s>" and spm.token_bytes(4 + 0xC3) == b"\xc3"


def test_merges_rank_by_score_then_by_halves():
    import numpy as np

    tokens = ["a", "b", "ab", "aba", "ba"]
    merges = merges_from_scores(tokens, np.array([0.0, 0.0, -1.0, -3.0, -2.0]))
    assert merges.tolist() == [[0, 1], [1, 0], [0, 4], [2, 0]]  # a b, b a, a ba, ab a


def test_merges_are_remembered(tmp_path, monkeypatch):
    words, note = Vocabulary(spm_metadata()), tmp_path / "merges" / "x.npy"
    first = remembered_merges(words, note)
    monkeypatch.setattr("stages.models.loading.gguf_tokens.merges_from_scores", None)
    assert remembered_merges(words, note).tolist() == first.tolist()
    monkeypatch.undo()
    note.write_bytes(note.read_bytes()[:-7])  # cut short: made again
    assert remembered_merges(words, note).tolist() == first.tolist()


def test_bos_is_added_once(tiny):
    ids = tiny.encode("Hi")
    assert ids[0] == 276 and ids.count(276) == 1
    assert tiny.encode("<|bos|>Hi") == ids
    assert tiny.encode("Hi", add_special=False) == ids[1:]
    assert tiny.render(USER, {}).count(276) == 1  # the template writes it


def test_a_template_without_bos_gets_what_the_tokenizer_adds(tmp_path):
    _write_tokenizer(tmp_path)
    tokens, _, origin = hf_tokens(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert tokens.render(USER, {}) == tokens.encode("Hi") and origin == "the recipe"


@given(st.text(max_size=60).filter(lambda text: "\n\n" not in text))  # a token of `spm`
@settings(max_examples=60, deadline=None)
def test_text_comes_back(any_tokens, text):
    ids = any_tokens.encode(text, add_special=False)
    assert any_tokens.decode(ids) == text
    joined = b"".join(map(any_tokens.token_bytes, ids)).decode()
    assert joined in (text, " " + text)  # a SentencePiece tokenizer begins with a space


def test_surrogates_and_nulls(any_tokens):
    assert any_tokens.decode(any_tokens.encode("a\ud800b", add_special=False)) == "a\ufffdb"
    assert any_tokens.decode(any_tokens.encode("\ud83d\ude00", add_special=False)) == "😀"
    assert any_tokens.decode(any_tokens.encode("a\x00\u2028", add_special=False)) == "a\x00\u2028"


def test_ids_out_of_range_give_nothing(any_tokens):
    assert any_tokens.token_bytes(10**6) == any_tokens.token_bytes(-1) == b""
    assert any_tokens.decode([10**6]) == ""


# --- streams


@given(st.lists(st.integers(0, 262), max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_ids_stream_to_their_decoding(any_tokens, ids):
    decoder = any_tokens.decoder()
    pieces = [decoder.push(token) for token in ids]
    whole = any_tokens.decode(ids)
    assert "".join(pieces) + decoder.flush() == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.text(max_size=12), st.data())
@settings(max_examples=60, deadline=None)
def test_a_stream_never_splits_a_character(any_tokens, text, data):
    """Whatever bytes a token ends at, what was given so far is a prefix of whole characters."""
    ids = any_tokens.encode(text, add_special=False)
    cut = data.draw(st.integers(0, len(ids)))
    decoder = any_tokens.decoder()
    given_text = "".join(decoder.push(token) for token in ids[:cut])
    assert text.startswith(given_text)


def test_broken_characters(tiny):
    family = "👩‍👩‍👧 🇫🇷 e\u0301 漢"
    ids = [*family.encode(), 0xFF, *b"ok", *"漢".encode()[:2]]
    decoder = tiny.decoder()
    pieces = [decoder.push(token) for token in ids] + [decoder.flush()]
    assert "".join(pieces) == family + "\ufffdok\ufffd" == tiny.decode(ids)


def test_special_tokens_give_no_text(tiny):
    assert tiny.decode([276, 72, 277, 105, 278]) == "Hi"
    assert tiny.token_bytes(277) == b"<|im_end|>"
    assert tiny.decode([0xE6, 277, 0xBC, 0xA2]) == "漢"


def test_leading_space_is_stripped_once():
    pieces = {0: "\u2581a", 1: "\u2581", 2: "<0x20>"}
    decoder = BytesDecoder(lambda i: sentencepiece(pieces[i]), frozenset(), strip=True)
    assert join(decoder, [1, 0, 2]) == " a "


def test_text_decoder_waits_for_what_may_change():
    """A decoder that joins words and drops the space before a mark, as WordPiece's does."""
    words = ["un", "do", ".", "x"]
    decoder = TextDecoder(lambda ids: " ".join(words[i] for i in ids).replace(" .", "."))
    assert join(decoder, [0, 1, 2, 3, 2]) == "un do. x."


# --- templates


def test_no_template_says_what_to_do(spm):
    with pytest.raises(RequestError, match=r"no chat template.*model\.template=") as caught:
        spm.render(USER, {})
    assert caught.value.param == "messages" and caught.value.status == 400
    assert spm.encode("ab")  # completions still work


def test_template_features():
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ bos_token }}{{ mood }}"
        "{{ strftime_now('%Y') | length }}{{ tools is none }}"
    )
    text = ChatTemplate(source, {"bos_token": "<s>"}).render(
        [{"role": "user", "content": "<é>"}, {}], {"mood": "!"}, True
    )
    assert text == '{"role": "user", "content": "<é>"}<s>!4True'


def test_a_template_may_refuse(tiny):
    refusing = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(RequestError, match="refuses these messages: roles must alternate"):
        refusing.render(USER, {}, True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_cannot_crash_or_escape(source):
    with pytest.raises(RequestError, match="cannot render these messages"):
        ChatTemplate(source, {}).render(USER, {}, True)


def test_a_wrong_template_is_found_at_open(tmp_path):
    with pytest.raises(OpenError, match="no valid Jinja"):
        ChatTemplate("{% for %}", {})
    with pytest.raises(OpenError, match="neither Jinja source nor a readable file"):
        template_source(str(tmp_path / "absent.jinja"))
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    assert template_source(str(tmp_path / "t.jinja")) == "{{ messages }}"


@pytest.mark.parametrize(
    ("files", "setting", "expected"),
    [
        ({}, None, (None, "none")),
        ({"chat_template.jinja": "own {{ 1 }}"}, None, ("own {{ 1 }}", "the model folder")),
        ({"chat_template.json": '{"chat_template": "json"}'}, None, ("json", "the model folder")),
        ({"tokenizer_config.json": '{"chat_template": "cfg"}'}, None, ("cfg", "the model folder")),
        (
            {"tokenizer_config.json": '{"chat_template": [{"name": "tool", "template": "t"}]}'},
            "tool",
            ("t", "the model folder ('tool')"),
        ),
        ({"additional_chat_templates/rag.jinja": "r"}, "rag", ("r", "the model folder ('rag')")),
        ({"chat_template.jinja": "own"}, "{{ mine }}", ("{{ mine }}", "the recipe")),
    ],
)  # fmt: skip
def test_places_of_a_template(tmp_path, files, setting, expected):
    _write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    tokens, _, origin = hf_tokens(tmp_path, setting)
    assert (tokens.template, origin) == expected


def test_an_unknown_template_name_lists_the_known(tmp_path):
    _write_tokenizer(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r")
    with pytest.raises(OpenError, match=r"templates are \['default', 'rag'\]. Did you mean 'rag'"):
        hf_tokens(tmp_path, "rga")


def test_identity_follows_template_and_vocabulary(tmp_path, tiny):
    _write_tokenizer(tmp_path)
    assert hf_tokens(tmp_path, None)[0].identity == tiny.identity
    assert hf_tokens(tmp_path, "{{ messages }}")[0].identity != tiny.identity


# --- the real ones: ids checked against llama.cpp's own tokenizer on 358 texts, some kept here


@pytest.fixture(scope="module")
def smollm2():
    return real("smollm2", "Smollm2")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return real("gemma3_270m", "Gemma3270m")


def real(module, name):
    from importlib import import_module

    from stages.models.loading.gguf_reader import read

    part = getattr(import_module(f"stages.models.{module}"), name)(SimpleNamespace(kind="cpu"))
    return gguf_tokens(read(part.locate()).metadata, None, part.memory)[0]


GOLDEN_TEXTS = ["Hello, world!", "1234 3.14", "  two\n\n\tx", "日本 👩‍👧", "don't"]
SMOLLM2_IDS = [
    [19556, 28, 905, 17],
    [33, 34, 35, 36, 216, 35, 30, 33, 36],
    [216, 827, 1116, 197, 104],
    [23274, 115, 40993, 15107, 235, 119, 321, 231, 10813, 235, 117],
    [12420, 982],
]
GEMMA_IDS = [
    [2, 9259, 236764, 1902, 236888],
    [2, 236770, 236778, 236800, 236812, 236743, 236800, 236761, 236770, 236812],
    [2, 138, 13498, 108, 255968, 236781],
    [2, 10956, 236743, 243767, 237243, 244814],
    [2, 13246, 236789, 236745],
]


@pytest.mark.real
def test_smollm2_ids(smollm2):
    ids = [smollm2.encode(text) for text in GOLDEN_TEXTS]
    assert ids == SMOLLM2_IDS
    assert [smollm2.decode(i) for i in ids] == GOLDEN_TEXTS
    assert smollm2.decode(smollm2.render(USER, {}))  == (
        "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\n"
        "user\nHi\nassistant\n"
    )  # fmt: skip


@pytest.mark.real
def test_gemma_ids(gemma):
    ids = [gemma.encode(text) for text in GOLDEN_TEXTS]
    assert ids == GEMMA_IDS
    assert [gemma.decode(i) for i in ids] == GOLDEN_TEXTS
    assert gemma.template is None
