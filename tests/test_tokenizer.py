"""Chapter 01: three ways to the same ids, any bytes back, files that cannot lie."""
import json
import os
import pickle
import random
import subprocess
import sys
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import regex
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import minigpt.tokenizer as tk

HARD = [
    "", " ", "\0", "a\0b", "\r\n", "line\r\nline\n\n\nend", "\ufeffbom", "naïve café",
    "🙂👩\u200d👩\u200d👧\u200d👦🇫🇷",
    "三国演义：话说天下大势，分久必合。", "don't  stop   'til", "tab\tindent\n    return x", "12345678901234567890", "हिन्दी भाषा", "العربية",
    "e\u0301", "<|endoftext|>", "a\u2028b\u00a0c", "\u200b\u200d", "-" * 100, "ab" * 200, "\U0010ffff",
]


@pytest.fixture(scope="module")
def documents():
    "Real text that every Python has: the sources of three standard modules, in paragraphs"
    import argparse, inspect, textwrap
    return [part for module in (argparse, textwrap) for part in inspect.getsource(module).split("\n\n")] + HARD


@pytest.fixture(scope="module")
def tok(documents):
    return tk.train_tokenizer(documents, 1000)


codec = tk.Codec(tk.train_bpe(["the cat on the mat, the hat"], 262))


@pytest.fixture
def saved(tok, tmp_path):
    tok.save(tmp_path / "t.json")
    return tmp_path / "t.json"


def fails(error, action, *words):
    "The message of `action`'s error: one line, with all `words` in it"
    with pytest.raises(error) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message and all(str(word) in message for word in words), message
    return message


# -- the same merges and the same ids, three ways

def test_hand_and_library_learn_the_same_merges(documents):
    merges = tk.train_bpe(documents, 600)
    assert len(merges) == 344 and merges == tk.library_merges(documents, 600)
    assert merges == tk.train_tokenizer(documents, 600 + len(tk.SPECIALS)).merges


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text(alphabet="ab \nß我", max_size=60), max_size=6))
def test_merges_are_the_same_on_texts_full_of_ties(texts):
    assert tk.train_bpe(texts, 290) == tk.library_merges(texts, 290)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(alphabet="aab bc", max_size=60), min_size=1, max_size=6), st.text(alphabet="abc 'é1-", max_size=80))
def test_hand_and_tiktoken_give_the_same_ids(texts, text):
    merges = tk.train_bpe(texts, 300)
    assert tk.bpe_encode(text, merges) == tk.Encoder(merges).encode(text)


def test_hand_and_tiktoken_give_the_same_ids_on_real_text(documents, tok):
    assert [tk.bpe_encode(text, tok.merges) for text in documents] == [tok.encode(text) for text in documents]


def test_merges_do_not_depend_on_the_order_of_documents(documents):
    assert tk.library_merges(documents, 500) == tk.library_merges(documents[::-1], 500)


def test_every_token_is_the_encoding_of_its_own_bytes(tok):
    for i, token in enumerate(tok.token_bytes[:-len(tok.specials)]):
        assert tok.encode_bytes(token) == [i] or b"\xef\xbf" in token


def test_split_covers_every_character_and_both_engines_agree_on_the_assigned_ones():
    "The hand encoder splits with `regex`, tiktoken with its own engine: a different class for one letter would be different ids"
    known = [chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")][::37]
    ranks = {bytes([b]): b for b in range(256)}
    probes = [char + other for char in known for other in "a1!\n"]
    for i, probe in enumerate(probes):
        ranks.setdefault(probe.encode("utf-8"), 256 + i)
    encoding = tk.tiktoken.Encoding("probe", pat_str=tk.SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})
    for probe in probes:
        pieces = tk.split_pieces(probe)
        assert "".join(pieces) == probe and (len(encoding.encode_ordinary(probe)) == 1) == (len(pieces) == 1), repr(probe)


# -- any bytes there and back

@pytest.mark.parametrize("text", HARD)
def test_text_comes_back(tok, text):
    assert tok.decode(tok.encode(text)) == text
    assert tok.encode_bytes(text.encode("utf-8")) == tok.encode(text)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_come_back(data):
    assert codec.decode_bytes(codec.encode_bytes(data)) == data


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200))
def test_any_text_comes_back(text):
    assert codec.decode(codec.encode(text)) == text


def test_all_single_bytes_and_random_bytes_come_back(tok):
    data = bytes(range(256)) + random.Random(0).randbytes(20_000)
    assert tok.decode_bytes(tok.encode_bytes(data)) == data


def test_half_a_character_is_shown_as_a_replacement(tok):
    ids = tok.encode("🙂")
    assert tok.decode(ids[:1] if len(ids) > 1 else [0xF0]) == "\ufffd"


def test_lone_surrogates_from_broken_json_do_not_stop_anything(tok):
    text = json.loads('"\\ud83d cut, whole \\ud83d\\ude42"')
    assert tok.encode(text) == tk.bpe_encode(text, tok.merges) == tok.encode_batch([text])[0].tolist()
    assert tok.decode(tok.encode(text)) == "\ufffd cut, whole 🙂"
    assert tk.train_tokenizer([text] * 3, 262).vocab_size >= 260


def test_batch_equals_one_by_one(documents, tok):
    awkward = ["", "\uffff", "a\uffff\uffffb", " ", "\ud83d", "", "end of one ", " start of the next", "\n\n", "\n", "<|endoftext|>"]
    for texts in (documents, awkward, *([text] for text in awkward), awkward * 50 + documents):
        assert [ids.tolist() for ids in tok.encode_batch(texts)] == [tok.encode(text) for text in texts]
    assert tok.encode_batch([]) == [] and tok.encode_batch(iter(["a"]))[0].tolist() == [97]


def test_decode_takes_lists_arrays_and_tensors(tok):
    ids = tok.encode("the cat")
    for kind in (list, tuple, iter, np.uint16, torch.tensor):
        assert tok.decode(np.array(ids, kind) if kind is np.uint16 else kind(ids)) == "the cat"
    assert tok.decode([]) == tok.decode(torch.tensor([], dtype=torch.int64)) == ""


@pytest.mark.parametrize("bad", [-1, 1000, 70_000])
def test_ids_outside_the_vocabulary_are_refused(tok, bad):
    fails(ValueError, lambda: tok.decode([1, bad, 2]), bad, tok.vocab_size - 1)


# -- the failure cases

@pytest.mark.parametrize("text", ["^" * 1_000_000, "我" * 100_000, " " * 400_000, "a1" * 100_000, "\n" * 400_000])
def test_d32_a_million_equal_characters_take_linear_time(tok, text):
    quarter = text[:len(text) // 4]
    start = time.process_time()
    ids = tok.encode(text)
    assert time.process_time() - start < 2
    assert len(tok.encode(quarter)) * 4 == pytest.approx(len(ids), rel=0.001) and tok.decode(ids) == text


def test_d32_one_line_of_megabytes_is_one_document(tok):
    line = "the quick brown fox " * 50_000
    assert tok.decode(tok.encode(line)) == line


def test_d32_the_hand_written_trainer_takes_long_runs_too():
    assert tk.train_bpe(["^" * 200_000], 270) == tk.library_merges(["^" * 200_000], 270)


def test_d17_ids_beyond_16_bits_stay_whole():
    big = tk.Codec([(a, b) for a in range(256) for b in range(256)] + [(256, 257)])
    assert big.encode_bytes(b"\xff\xfe\x00\x00\x00\x01")[-1] == 65_792 and big.decode_bytes([65_792, 70]) == b"\x00\x00\x00\x01F"


def test_d19_the_vocabulary_counts_the_special_tokens(tok):
    assert tok.vocab_size == 256 + len(tok.merges) + len(tok.specials) == 1000
    assert max(tok.id_of(name) for name in tok.specials) == tok.vocab_size - 1
    assert tok.eot == tok.id_of("<|endoftext|>") == 996


def test_d22_a_1500_entry_tokenizer_has_1500_entries(documents):
    assert tk.train_tokenizer(documents, 1500).vocab_size == 1500


def test_d22_a_small_text_gives_a_smaller_vocabulary_never_padding():
    small = tk.train_tokenizer(["aaaa aaaa"], 5000)
    assert small.vocab_size == 256 + len(small.merges) + 4 < 270
    assert tk.train_tokenizer([], 5000).vocab_size == tk.train_tokenizer(["abc"], 5000).vocab_size == 260


@pytest.mark.parametrize("text", ["<|endoftext|>", "<|user|>hi<|end|>", "a<|endoftext|>b"])
def test_d34_d35_d38_encode_adds_nothing_and_text_never_becomes_a_special_id(tok, text):
    ids = tok.encode(text)
    assert not {tok.id_of(name) for name in tok.specials} & set(ids)
    assert tok.decode(ids) == text and tok.encode_batch([text])[0].tolist() == ids
    assert tok.encode("a") == [97]  # no token before it, none after it


def test_d34_special_ids_decode_to_their_names(tok):
    assert tok.decode([tok.id_of("<|user|>"), *tok.encode("hi"), tok.eot]) == "<|user|>hi<|endoftext|>"


def test_d39_one_byte_more_in_the_text_is_another_hash(documents, tok):
    other = tk.train_tokenizer([*documents, "zq zq zq zq zq zq zq zq zq zq" * 30], 1000)
    assert tk.train_tokenizer(documents, 1000).hash == tok.hash != other.hash
    assert tk.Tokenizer(tok.merges, ["<|endoftext|>"]).hash != tok.hash


def test_d39_the_hash_is_the_same_on_every_machine():
    assert tk.Tokenizer([(116, 104), (256, 101)]).hash == "3d6d5f80b05e0f4a80469bd25fa612b1051ca168fce5b8b3b2164e7659bb78e6"


def test_d07_the_file_is_utf8_under_any_locale(tok, saved):
    code = "import sys, minigpt.tokenizer as t; k = t.Tokenizer.load(sys.argv[1]); print(k.hash, k.encode('caf\\u00e9 \\u4e09'))"
    env = dict(os.environ, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    out = subprocess.run([sys.executable, "-c", code, saved], env=env, capture_output=True, text=True, check=True).stdout
    assert out.strip() == f"{tok.hash} {tok.encode('café 三')}"


# -- files

def test_save_and_load(tok, saved):
    again = tk.Tokenizer.load(saved)
    assert (again.merges, again.specials, again.hash, again.vocab_size) == (tok.merges, tok.specials, tok.hash, tok.vocab_size)
    assert again.encode("the cat 🙂") == tok.encode("the cat 🙂") and os.listdir(saved.parent) == ["t.json"]
    assert {"format", "version", "pattern", "merges", "specials", "hash"} == set(json.loads(saved.read_text("utf-8")))


def test_other_special_tokens_are_kept(tmp_path, tok):
    tk.Tokenizer(tok.merges, ["<|结束|>", "<|endoftext|>"]).save(str(tmp_path / "new" / "folder" / "x.json"))
    again = tk.Tokenizer.load(str(tmp_path / "new" / "folder" / "x.json"))
    assert again.eot == again.vocab_size - 1 and again.decode([again.id_of("<|结束|>")]) == "<|结束|>"


def test_pickled_to_another_process_it_still_encodes(tok):
    again = pickle.loads(pickle.dumps(tok))
    assert again.hash == tok.hash and again.encode("the cat") == tok.encode("the cat")


def change(saved, **fields):
    "Rewrite some fields of a saved file"
    saved.write_text(json.dumps(json.loads(saved.read_text("utf-8")) | fields), "utf-8")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"a": 1}', b"PK\x03\x04", b"[" * 100_000, b"1" * 10_000])
def test_foreign_files_are_one_clear_line(saved, content):
    saved.write_bytes(content)
    fails(ValueError, lambda: tk.Tokenizer.load(saved), saved, "tokenizer file")


@pytest.mark.parametrize("fields", [
    dict(format="other"), dict(version=2), dict(pattern=r"\w+"), dict(hash="0" * 64), dict(hash=None),
    dict(merges=[]), dict(merges={}), dict(merges=None), dict(merges=[5]), dict(merges=[[97]]), dict(merges=[[97, 98]]),
    dict(merges=[[97, 98.0]]),
    dict(specials=[]), dict(specials=None), dict(specials="<|endoftext|>"),
    dict(specials=["<|endoftext|>"]), dict(specials={"<|endoftext|>": 1}),
])
def test_changed_files_are_one_clear_line(saved, fields):
    change(saved, **fields)
    fails(ValueError, lambda: tk.Tokenizer.load(saved), saved)


@pytest.mark.parametrize("key", ["version", "pattern", "merges", "specials", "hash"])
def test_a_missing_field_is_one_clear_line(saved, key):
    saved.write_text(json.dumps({k: v for k, v in json.loads(saved.read_text("utf-8")).items() if k != key}), "utf-8")
    fails(ValueError, lambda: tk.Tokenizer.load(saved), saved, "train the tokenizer again")


@pytest.mark.parametrize("fields, words", [
    (dict(merges=None), ["list of pairs"]), (dict(merges=[5]), ["merge 0 is 5"]),
    (dict(merges=[[97, 256]]), ["merge 0 is [97, 256]", "0 to 255"]),
    (dict(merges=[[97, -1]]), ["merge 0"]), (dict(merges=[[True, 98]]), ["merge 0"]), (dict(merges=[[97, 98.0]]), ["merge 0"]),
    (dict(merges=[[97, 98], [97, 98]]), ["merge 1", "there already"]),
    (dict(merges=[[97, 97]] + [[256 + i, 256 + i] for i in range(40)]), ["longer than 68 bytes"]),
    (dict(specials=None), ["None"]), (dict(specials=["<|end|>"]), ["<|endoftext|>"]), (dict(specials=["<|endoftext|>", ""]), ["non-empty"]),
    (dict(specials=["<|endoftext|>"] * 2), ["different"]), (dict(specials=[1, "<|endoftext|>"]), ["strings"]),
])
def test_a_well_hashed_file_that_no_training_makes_is_one_clear_line(saved, fields, words):
    content = json.loads(saved.read_text("utf-8")) | fields
    del content["hash"]
    saved.write_text(json.dumps(dict(content, hash=tk._digest(content))), "utf-8")
    fails(ValueError, lambda: tk.Tokenizer.load(saved), saved, *words)


def test_the_order_of_fields_does_not_matter(tok, saved):
    saved.write_text(json.dumps(json.loads(saved.read_text("utf-8")), sort_keys=True, indent=1), "utf-8")
    assert tk.Tokenizer.load(saved).hash == tok.hash


def test_a_file_too_large_is_refused_before_it_is_read(saved):
    os.truncate(saved, tk.MAX_FILE_BYTES + 1)
    fails(ValueError, lambda: tk.Tokenizer.load(saved), saved, "too large")


def test_no_file_is_one_clear_line(tmp_path):
    fails(FileNotFoundError, lambda: tk.Tokenizer.load(tmp_path / "none.json"), tmp_path / "none.json")
    fails(FileNotFoundError, lambda: tk.Tokenizer.load(tmp_path), tmp_path)


# -- mistakes of the caller

@pytest.mark.parametrize("size", [-5, 0, 259])
def test_a_vocabulary_too_small_is_refused(size):
    fails(ValueError, lambda: tk.train_tokenizer(["abc"], size), size, 260)


def test_one_string_in_place_of_documents_is_refused(tok):
    for action in (lambda: tk.train_tokenizer("abc", 300), lambda: tk.train_bpe("abc", 300), lambda: tok.encode_batch("abc")):
        fails(ValueError, action, "[text]")


def test_an_unknown_special_token_is_refused(tok):
    fails(ValueError, lambda: tok.id_of("<|system|>"), "<|system|>", "<|user|>")


def test_training_reads_a_stream_once(documents):
    assert tk.train_tokenizer((text for text in documents), 400).merges == tk.train_tokenizer(documents, 400).merges


def test_threads_can_share_a_tokenizer(documents, tok):
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tok.encode, documents)) == [tok.encode(text) for text in documents]
