"""Bad input of every kind: what readers do with files that nobody wrote well, or that somebody wrote to do harm.

Whatever a file holds, its reader either takes it or refuses it: a ValueError or OSError of one line that names the file. While it reads,
it writes nothing, starts nothing and imports nothing that the file names: an audit hook watches. Examples are drawn by hypothesis, always the same ones.
"""
import contextlib
import gzip
import hashlib
import io
import json
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import minigpt.pretrain_dataset as data
import minigpt.pretrainer as pretrainer
import minigpt.runlog as runlog
import minigpt.tokenizer as tk
from minigpt.checkpoint import Checkpointer
from minigpt.collectives import launch_env
from minigpt.runlog import RunLog, parse_line, read_run
from test_runlog import record, toy_trainer
from trainer_job import make_trainer

resource = pytest.importorskip("resource", reason="POSIX limits and signals")
ROOT = Path(__file__).resolve().parents[1]
TEXT = "the cat sat on the mat and the dog sat on the log. "


def fuzz(examples):
    "Settings of a fuzz test: the same examples each time, and no limit on a single one (a hang meets the alarm below)"
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def no_hang():
    "A reader that loops fails its test"
    def stuck(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, stuck)
    signal.alarm(100)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# --- what a reader may do ------------------------------------------------------------------------------------------------------

HARMFUL = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect", "pickle.find_class", "os.remove",
           "os.rename", "os.mkdir", "os.rmdir", "shutil.rmtree", "ctypes.dlopen"}  # fmt: skip
WATCH = []


def hook(event, args):
    "Note what would be harm, while somebody watches"
    if WATCH and (event in HARMFUL or (event == "open" and args[2] is not None and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))):
        WATCH[-1].append((event, *args))


sys.addaudithook(hook)


@contextlib.contextmanager
def only_reads():
    "Fails where the block writes a file or starts anything"
    WATCH.append([])
    try:
        yield
    finally:
        harm = WATCH.pop()
    assert not harm, harm


def refused(call, *names):
    "The value of a call; of one that refuses, None, after a look at its message"
    try:
        return call()
    except (ValueError, OSError) as error:
        lines = str(error).splitlines()
        assert len(lines) == 1 and len(lines[0]) < 6000, lines
        assert any(str(name) in lines[0] for name in names), (lines[0], names)


def test_the_watch_sees_harm(tmp_path):
    for harm in (lambda: open(tmp_path / "x", "w").close(), lambda: os.system("true"), lambda: (tmp_path / "x").unlink()):
        with pytest.raises(AssertionError), only_reads():
            harm()


# --- what files hold -----------------------------------------------------------------------------------------------------------

numbers = st.one_of(st.integers(), st.sampled_from([0, -1, 10**9, 10**18, 10**400, 1 << 48, 1 << 63]), st.floats())
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=8), st.sampled_from(["../../etc/passwd", "/etc/passwd", "<u2", "train"])),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)  # fmt: skip
DEEP = ["[" * depth + "]" * depth for depth in (200, 900, 100_000)] + ['{"a":' * 100_000]


@st.composite
def damaged(draw, whole):
    "The bytes of a good file after a cut, a few changed bytes, a part that stands twice, or something put in"
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        at, to = sorted(draw(st.integers(0, len(content))) for _ in range(2))
        kind = draw(st.sampled_from(["cut", "head", "tail", "twice", "change", "insert"]))
        content = {
            "cut": lambda: content[:at] + content[to:], "head": lambda: content[:at], "tail": lambda: content[at:],
            "twice": lambda: content[:to] + content[at:], "change": lambda: content[:at] + draw(st.binary(max_size=4)) + content[at + 2 :],
            "insert": lambda: content[:at] + draw(st.sampled_from([b"\x00", b"\xff\xfe", b"NaN", b"\n", b'"', b"[", b"1" * 5000])) + content[at:],
        }[kind]()  # fmt: skip
    return bytes(content)


def dump(value):
    return json.dumps(value).encode()


# --- text and JSONL ------------------------------------------------------------------------------------------------------------

lines = st.one_of(
    st.text(max_size=30).map(lambda text: dump({"text": text})), values.map(lambda value: dump({"text": value})), values.map(dump),
    st.binary(max_size=20), st.text(max_size=20).map(lambda text: text.encode("utf-8", "surrogatepass")), st.just(dump({"text": TEXT})),
    st.sampled_from([b"", b"  ", b'{"text": "\\ud83d"}', b'{"text"', *(text.encode() for text in DEEP[1:3])]),
)  # fmt: skip
packers = st.sampled_from([bytes, bytes, gzip.compress, zstandard.compress, lambda raw: zstandard.compress(gzip.compress(raw))])


@fuzz(120)
@given(st.lists(lines, max_size=6), st.sampled_from([b"\n", b"\r\n", b"\r"]), packers, st.data(), st.sampled_from(["stop", "skip"]),
       st.sampled_from(["a.jsonl", "a.txt", "a.md.gz", "a.jsonl.zst"]))  # fmt: skip
def test_d02_d03_any_text_is_prepared_or_refused(tmp_path_factory, parts, end, pack, more, on_bad, name):
    folder = tmp_path_factory.mktemp("text")
    content = pack(end.join(parts))
    content = more.draw(st.one_of(st.just(content), damaged(content)))
    (folder / name).write_bytes(content)
    with contextlib.redirect_stdout(io.StringIO()):
        path = refused(lambda: data.prepare_files([folder / name], 270, folder / "data", on_bad=on_bad, progress=False), name, "files-")
    assert (folder / name).read_bytes() == content and set(os.listdir(folder)) <= {name, "data"}
    left = sorted(os.listdir(folder / "data")) if (folder / "data").exists() else []
    assert left == (sorted([path.name, data.sidecar_path(path).name, data.tokenizer_path(path).name]) if path else [])
    if path:
        meta = data.load_sidecar(path)
        words = tk.Tokenizer.load(path.parent / meta["tokenizer"])
        assert np.fromfile(path, dtype=meta["dtype"]).tolist().count(words.eot) == meta["documents"] > 0


def test_d13_a_file_that_unpacks_to_itself_ends(tmp_path):
    "packed again and again, or without end: the reader stops after a few layers"
    content = b"text\n"
    for _ in range(9):
        content = gzip.compress(content)
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.txt is packed more than 4 times"):
        list(data.read_documents([tmp_path / "a.txt"]))


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
def test_d32_a_bomb_of_one_line_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch, pack):
    monkeypatch.setattr(data, "MAX_LINE", 1 << 20)
    (tmp_path / "bomb.jsonl.gz").write_bytes(pack(b"a" * (1 << 26)))
    assert (tmp_path / "bomb.jsonl.gz").stat().st_size < 1 << 17
    with pytest.raises(ValueError, match=r"bomb\.jsonl\.gz, line 1: longer than 1,048,576 bytes"):
        list(data.read_documents([tmp_path / "bomb.jsonl.gz"], on_bad="skip"))


def test_d32_zstd_is_unpacked_in_portions(tmp_path):
    "four bytes of zstd may stand for 128 KiB: a portion of packed bytes stays a portion of text"
    frame = b"\x28\xb5\x2f\xfd\x00\x58" + 4000 * b"\x02\x00\x10a" + b"\x01\x00\x00"  # 500 MiB in 16 kB
    portion = data._ZstdReader(io.BufferedReader(io.BytesIO(frame)))
    assert portion.readinto(bytearray(1 << 16)) == 1 << 16
    assert len(portion.ready) < 1 << 28


def test_d03_names_that_are_no_text_are_kept(tmp_path):
    "a file system gives any bytes as a name; the sidecar keeps them, and the data are found again"
    path = tmp_path / os.fsdecode(b"caf\xe9.txt")
    try:
        path.write_text(TEXT, encoding="utf-8")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    made = data.prepare_files([path], 270, tmp_path / "data", progress=False)
    when = made.stat().st_mtime_ns
    assert data.load_sidecar(made)["sources"][0]["name"] == path.name
    assert data.prepare_files([path], 270, tmp_path / "data", progress=False).stat().st_mtime_ns == when


@pytest.mark.parametrize("encoding", ["undefined", "idna", "rot13", "hex", "a\0b"])
def test_d03_odd_encodings_are_one_line(tmp_path, encoding):
    (tmp_path / "a.txt").write_bytes(b"\xff.\xfe" * 50)
    with pytest.raises(ValueError) as error:
        list(data.read_documents([tmp_path / "a.txt"], encoding=encoding))
    assert len(str(error.value).splitlines()) == 1 and encoding.split("\0")[0] in str(error.value)


# --- prepared data -------------------------------------------------------------------------------------------------------------


def prepared(folder):
    "Good data: 99 tokens of 300"
    np.arange(99, dtype="<u2").tofile(folder / "x.bin")
    meta = dict(format=data.FORMAT, version=data.VERSION, dtype="<u2", count=99, vocab_size=300, tokenizer="x.tokenizer.json",
                tokenizer_hash="t", sha256="s", sources=[dict(name="a", bytes=3, sha256="h")])  # fmt: skip
    (folder / "x.json").write_bytes(dump(meta))
    return meta


def open_data(folder):
    "What a reader gets: the data set, its windows read; or None"
    with only_reads():
        data._is_ready(folder / "x.bin", ["a"])
        found = refused(lambda: data.PretrainBinaryDataset(folder / "x.bin", 8), folder / "x.")
    if found:
        assert found[:][1].max() < found.vocab_size <= tk.MAX_VOCAB and len(found.fingerprint) == 16
        assert (folder / found.meta["tokenizer"]).parent == folder
    return found


def test_good_data_are_taken(tmp_path):
    prepared(tmp_path)
    assert len(open_data(tmp_path)) == 12


@fuzz(250)
@given(st.data())
def test_d20_d39_any_sidecar_is_taken_or_refused(tmp_path_factory, more):
    folder = tmp_path_factory.mktemp("sidecar")
    meta = prepared(folder)
    changed = st.dictionaries(st.sampled_from(sorted(meta)), values, max_size=2).map(lambda fields: dump(meta | fields))
    (folder / "x.json").write_bytes(more.draw(st.one_of(changed, damaged(dump(meta)), values.map(dump), st.sampled_from(DEEP).map(str.encode))))
    open_data(folder)


@fuzz(100)
@given(st.binary(max_size=64), st.integers(-1, 40), st.integers(-1, 70_000), st.sampled_from(["<u2", "<u4", "<f8"]))
def test_d20_d23_any_token_file_is_taken_or_refused(tmp_path_factory, content, count, vocab_size, dtype):
    folder = tmp_path_factory.mktemp("bin")
    meta = prepared(folder)
    (folder / "x.bin").write_bytes(content)
    (folder / "x.json").write_bytes(dump(meta | dict(count=count, vocab_size=vocab_size, dtype=dtype)))
    found = open_data(folder)
    assert not found or len(found.tokens) == count


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..\\x.json", "C:x.json", "", "..", "a\0.json", "x.bin"])
def test_a_sidecar_leads_nowhere_else(tmp_path, name):
    meta = prepared(tmp_path)
    (tmp_path / "x.json").write_bytes(dump(meta | dict(tokenizer=name)))
    with pytest.raises(ValueError, match=r"x\.json has no good tokenizer"):
        data.load_sidecar(tmp_path / "x.bin")


@pytest.mark.parametrize("field, value", [("vocab_size", 10**9), ("vocab_size", 0), ("count", -1), ("sources", [1]), ("sources", [{}])])
def test_d22_sizes_and_sources_that_cannot_be_are_refused(tmp_path, field, value):
    meta = prepared(tmp_path)
    (tmp_path / "x.json").write_bytes(dump(meta | {field: value}))
    with pytest.raises(ValueError, match=rf"x\.json has no good {field}"):
        data.load_sidecar(tmp_path / "x.bin")
    assert not data._is_ready(tmp_path / "x.bin", ["a"])


def test_d22_another_vocabulary_size_than_the_tokenizers_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text(TEXT * 9, encoding="utf-8")
    path = data.prepare_files([tmp_path / "a.txt"], 270, tmp_path, progress=False)
    meta = json.loads(data.sidecar_path(path).read_text("utf-8"))
    data.sidecar_path(path).write_bytes(dump(meta | dict(vocab_size=900_000)))
    assert pretrainer.main(["--dataset_path", str(path), "--output_dir", str(tmp_path / "run"), "--context_length", "8"]) == 2
    assert "not the tokenizer" in capsys.readouterr().err


# --- tokenizer file ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def words():
    return tk.train_tokenizer([TEXT], 270)


def hashed(words, **fields):
    "A tokenizer file with other fields and the hash that belongs to them"
    content = {key: value for key, value in (tk.tokenizer_content(words.merges, words.specials) | fields).items() if key != "hash"}
    return dump(content | dict(hash=tk._digest(content)))


@fuzz(250)
@given(st.data())
def test_d39_any_tokenizer_file_is_taken_or_refused(tmp_path_factory, words, more):
    path = tmp_path_factory.mktemp("tokenizer") / "t.json"
    pairs = st.lists(st.one_of(st.tuples(*[st.integers(-1, 300)] * 2), values), max_size=5)
    specials = st.lists(st.one_of(st.text(max_size=4), st.just("<|endoftext|>"), values), max_size=4)
    fields = st.fixed_dictionaries({}, optional=dict(merges=st.one_of(pairs, values), specials=st.one_of(specials, values), more=values))
    raw = st.one_of(fields.map(lambda some: hashed(words, **some)), damaged(hashed(words)), st.sampled_from(DEEP).map(str.encode))
    path.write_bytes(more.draw(raw))
    with only_reads():
        again = refused(lambda: tk.Tokenizer.load(path), path)
    if again:
        assert again.decode(again.encode(TEXT)) == TEXT and again.vocab_size == len(again.token_bytes)


@pytest.mark.parametrize("depth", [100, 300, 480, 700, 950])
@pytest.mark.parametrize("field", ["merges", "specials", "version", "more"])
def test_nesting_of_any_depth_is_one_line(tmp_path, words, depth, field):
    nested = 1
    for _ in range(depth):
        nested = [nested]
    content = json.loads(hashed(words)) | {field: nested}
    del content["hash"]
    try:
        content["hash"] = tk._digest(content)
    except RecursionError:  # deeper than a hash can be made for: then any will do
        content["hash"] = "0" * 64
    (tmp_path / "t.json").write_text(deep_json(content), encoding="utf-8")
    taken = refused(lambda: tk.Tokenizer.load(tmp_path / "t.json"), "t.json")
    assert not taken or field == "more"  # that nobody reads


def deep_json(content):
    "JSON of fields that may be nested deeper than the library can write"
    def text(value):
        depth = 0
        while isinstance(value, list) and len(value) == 1 and isinstance(value[0], (list, int)):
            value, depth = value[0], depth + 1
        return "[" * depth + json.dumps(value) + "]" * depth

    return "{" + ", ".join(f"{json.dumps(key)}: {text(value)}" for key, value in content.items()) + "}"


def test_a_vocabulary_of_millions_is_refused_at_once(tmp_path, words, monkeypatch):
    monkeypatch.setattr(tk, "MAX_VOCAB", 300)
    (tmp_path / "t.json").write_bytes(hashed(words, merges=[[97, 98]] * 45))
    with pytest.raises(ValueError, match=r"t\.json: 45 merges make a vocabulary beyond 300"):
        tk.Tokenizer.load(tmp_path / "t.json")


def test_d31_a_vocabulary_asked_for_beyond_all_measure_is_one_line(tmp_path, capsys):
    "the library would reserve memory for it, and end the process"
    for size in (tk.MAX_VOCAB + 1, 10**9, 10**25):
        with pytest.raises(ValueError, match=f"vocab_size {size} is too large: at most {tk.MAX_VOCAB}"):
            tk.train_tokenizer([TEXT], size)
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    command = ["--dataset_path", tmp_path / "a.txt", "--vocab_size", 10**9, "--output_dir", tmp_path / "run"]
    with pytest.MonkeyPatch.context() as m:
        m.setenv("MINIGPT_DATA", str(tmp_path / "data"))
        assert pretrainer.main([str(word) for word in command]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


# --- run log -------------------------------------------------------------------------------------------------------------------

events = st.fixed_dictionaries(
    dict(event=st.sampled_from(["train", "eval", "start", "resume", "note", "end", "sample", "save"]), step=st.one_of(st.integers(0, 9), values)),
    optional=dict.fromkeys(["time", "train_loss", "eval_loss", "tokens", "lr", "grad_norm", "rank", "minutes", "baselines", "nonfinite", "bigram"], values),
)
words_of_logs = st.sampled_from(["2026-01-05 09:00:00 ", "steps: 3/9", "train_loss: 2.5, ", "eval_loss: nan, ", "event: 5, ", "time: 1, ", "step=2, ",
                                 "total_steps=1, ", "lr=1e-3, ", "resume from: x at step 3", "start: ", "end: 1.5 min", "[rank 3] ", "\r", "\x1b[2K",
                                 "save checkpoint: a", "sample: ", "9" * 400, "1e999", "é", "\x00", "{", "-inf", ": ", "0001-01-01 00:00:00 "])  # fmt: skip
log_lines = st.one_of(events.map(json.dumps), st.lists(words_of_logs, max_size=8).map("".join), st.text(max_size=20), values.map(json.dumps))


@fuzz(400)
@given(st.lists(log_lines, max_size=8), st.sampled_from(["utf-8", "utf-16", "latin-1"]), st.sampled_from(["metrics.jsonl", "train.log"]))
def test_l05_any_log_is_read(tmp_path_factory, parts, encoding, name):
    folder = tmp_path_factory.mktemp("log")
    (folder / name).write_bytes("\n".join(parts).encode(encoding, "replace"))
    for part in parts:
        parse_line(part)
    with only_reads():
        found = read_run(folder)
        assert "\n" not in runlog.health_line(found) and sum(map(len, runlog.sessions(found))) == len(found)
        kept = runlog.stitch(found, both=True)
        for value in ("train_loss", "eval_loss", "lr", "grad_norm"):
            at, curve = runlog.curve(kept, value)
            assert all(isinstance(v, (int, float)) for v in at + curve)
        assert all(math.isfinite(nats) for nats in runlog.run_baselines(found).values())


@fuzz(12)
@given(st.lists(events.map(json.dumps), min_size=2, max_size=8))
def test_l05_any_log_is_drawn(tmp_path_factory, parts):
    folder = tmp_path_factory.mktemp("log")
    (folder / "metrics.jsonl").write_text("\n".join(parts), encoding="utf-8")
    runlog.plot_runs([folder])


@pytest.mark.parametrize("line", [
    "resume from: " * 20_000, "x=" + "1" * 200_000 + ":", "a=1" * 50_000, "a" + " " * 200_000 + "b", "resume from: " + " at step " * 50_000,
    "x=1e" + "1" * 200_000 + ".", "end: 1" * 50_000,
], ids=lambda line: line[:12])  # fmt: skip
def test_l05_no_line_takes_long(line):
    "a pattern that tries each place again would take hours; the alarm is far above what these take"
    signal.alarm(20)
    runlog.parse_log(f"2026-01-05 09:00:00 {line} train_loss: 1, steps: 1/2\n{line}\n")


def test_l05_fields_named_like_our_own_do_not_win():
    line = "2026-01-05 09:00:00 event: 5, step: 7, total_steps: 8, time: 3, train_loss: 2.5, steps: 1/2"
    assert {key: parse_line(line)[key] for key in ("event", "step", "total_steps", "time")} == dict(
        event="train", step=1, total_steps=2, time="2026-01-05 09:00:00")  # fmt: skip


def test_l05_devices_and_giants_are_no_logs(tmp_path):
    os.truncate(open(tmp_path / "train.log", "w").name, runlog.MAX_LOG_BYTES + 1)  # sparse: it takes no disk
    for path in ("/dev/zero", tmp_path / "train.log"):
        with pytest.raises(ValueError, match="no log"):
            read_run(path)


# --- a log that can't be written -----------------------------------------------------------------------------------------------


def one_of_three_unwritten(tmp_path, harm, heal):
    "Steps 1 to 3, with trouble around the second; what was shown"
    shown, log = [], None
    log = RunLog(tmp_path / "run", echo=shown.append)
    log(record(1))
    harm()
    log(record(2))
    waiting = list(log.unwritten)
    heal()
    log(record(3))
    return log, waiting, shown


def steps_in(path):
    return [e["step"] for e in read_run(path) if e["event"] == "train"]


def test_l01_a_log_on_a_full_disk_waits_and_is_written_later(tmp_path):
    "the half line that the full disk left is ended, and the whole one follows"
    target, soft = tmp_path / "run" / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (target.stat().st_size + 40, soft[1]))
    log, waiting, shown = one_of_three_unwritten(tmp_path, limit, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, soft))
    assert [name for name, _ in waiting].count("metrics.jsonl") == 2 and not log.unwritten  # the record, and the note about it
    assert len(shown) == 1 and str(target) in shown[0] and "the training goes on" in shown[0] and "\n" not in shown[0]
    assert steps_in(tmp_path / "run") == [1, 2, 3] and read_run(tmp_path / "run").ignored == 1
    assert [e["text"][:5] for e in read_run(tmp_path / "run") if e["event"] == "note"] == [str(target)[:5]]


def test_l01_a_log_whose_folder_is_removed_is_begun_again(tmp_path):
    log, waiting, shown = one_of_three_unwritten(tmp_path, lambda: (tmp_path / "run").rename(tmp_path / "gone"), lambda: None)
    assert waiting == []  # telling it was the next chance
    assert not log.unwritten and steps_in(tmp_path / "gone") == [1] and steps_in(tmp_path / "run") == [2, 3]
    assert len(shown) == 1 and "No such file" in shown[0]


def test_l01_trouble_with_one_file_leaves_the_other_whole(tmp_path):
    target = tmp_path / "run" / "train.log"
    log, waiting, shown = one_of_three_unwritten(tmp_path, lambda: (target.unlink(), target.mkdir()), lambda: None)
    assert {name for name, _ in waiting} == {"train.log"} and steps_in(tmp_path / "run") == [1, 2, 3]
    for step in range(4, 40):
        log(record(step))
    log(dict(event="end", step=40, minutes=1))
    assert len(shown) == 3 and f"note: {len(log.unwritten)} lines of the log are not written" in shown[2] and str(target) in shown[2]
    target.rmdir()
    log(record(41))
    assert not log.unwritten and steps_in(target) == [*range(2, 40), 41]


def test_l01_a_log_that_cannot_be_begun_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(OSError) as error:
        RunLog(tmp_path)(record(1))
    assert error.value.filename == str(tmp_path / "metrics.jsonl") and error.value.strerror


def test_l01_training_goes_on_without_its_log(tmp_path):
    log = RunLog(tmp_path, echo=lambda line: None)

    def break_at_5(event):
        log(event)
        if event.get("step") == 5 and event["event"] == "train":
            (tmp_path / "metrics.jsonl").rename(tmp_path / "kept")
            (tmp_path / "metrics.jsonl").mkdir()

    trainer = toy_trainer(tmp_path, break_at_5, max_steps=9, log_every=1)
    trainer.train()
    kept = [json.loads(line) for name, line in log.unwritten if name == "metrics.jsonl"]
    assert trainer.step == 9 and [e["step"] for e in kept if e["event"] in ("train", "eval")] == [6, 7, 8, 9]
    assert (tmp_path / "checkpoint-9.pth").exists() and steps_in(tmp_path / "train.log") == list(range(1, 9))


@pytest.mark.parametrize("name", ["metrics.jsonl", "train.log"])
def test_l01_each_record_begins_a_line(tmp_path, name):
    "whenever the cut happened: before the program started, or while it runs"
    log = RunLog(tmp_path, echo=lambda line: None)
    for step in (1, 2):
        with open(tmp_path / name, "ab") as file:
            file.write(b'{"event": "tr' if name == "metrics.jsonl" else b"2026-01-05 09:0")
        log(record(step))
    assert steps_in(tmp_path / name) == [1, 2]


# --- checkpoints ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "The bytes and the sidecar of a checkpoint of step 3"
    folder = tmp_path_factory.mktemp("whole")
    make_trainer(folder, train_batch_size=4, max_steps=3).train()
    return (folder / "checkpoint-3.pth").read_bytes(), json.loads((folder / "checkpoint-3.json").read_text("utf-8"))


def look(folder):
    "The newest whole checkpoint of a folder, after a look at what is said of the others"
    keeper = Checkpointer(folder)
    with only_reads():
        newest, notes = keeper.newest()
        keeper.best(), keeper.complete()
    assert all(len(note.splitlines()) == 1 and str(folder) in note for note in notes), notes
    return newest, notes


def take(path):
    "What loading gives; None where it is refused"
    with only_reads():
        return refused(lambda: Checkpointer(path.parent).load(path), path)


@fuzz(120)
@given(st.data())
def test_c01_c27_any_folder_has_a_newest_checkpoint_or_none(tmp_path_factory, whole, more):
    "sidecars and checkpoints of any content and name, around one that is whole"
    folder, (content, facts) = tmp_path_factory.mktemp("run"), whole
    (folder / "checkpoint-3.pth").write_bytes(content)
    (folder / "checkpoint-3.json").write_bytes(dump(facts))
    for name in more.draw(st.lists(st.sampled_from(["7", "12", "", "1e3", "-1", "007", "x", "\u0663", "9" * 30]), max_size=3, unique=True)):
        wrong = st.dictionaries(st.sampled_from(sorted(facts)), values, max_size=2).map(lambda fields: dump(facts | dict(step=7) | fields))
        (folder / f"checkpoint-{name}.json").write_bytes(more.draw(st.one_of(wrong, damaged(dump(facts)), values.map(dump), st.sampled_from(DEEP).map(str.encode))))
        (folder / f"checkpoint-{name}.pth").write_bytes(more.draw(st.one_of(st.just(content), damaged(content), st.binary(max_size=20))))
    newest, notes = look(folder)
    assert newest and newest.read_bytes() == content
    for path in folder.glob("*.pth"):
        state = take(path)
        assert state is None or state["step"] == 3


@fuzz(60)
@given(st.data())
def test_c01_a_damaged_checkpoint_is_refused_in_one_line(tmp_path_factory, whole, more):
    path = tmp_path_factory.mktemp("run") / "checkpoint-3.pth"
    path.write_bytes(more.draw(damaged(whole[0])))
    take(path)  # without a sidecar there is no hash to compare: PyTorch's own reader has to bear it
    path.with_suffix(".json").write_bytes(dump(whole[1]))
    assert take(path) is None or path.read_bytes() == whole[0]


class Harm:
    "What a pickle runs when it is loaded"

    def __reduce__(self):
        return os.system, ("touch gone",)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("kind", ["pickle", "torch", "old", "state"])
def test_c06_c07_a_checkpoint_that_means_harm_runs_nothing(tmp_path, monkeypatch, whole, kind, protocol):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "checkpoint-3.pth"
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Harm(), protocol))
    else:
        (tmp_path / "good").write_bytes(whole[0])
        state = torch.load(tmp_path / "good", weights_only=True) | dict(config=Harm()) if kind == "state" else Harm()
        torch.save(state, path, _use_new_zipfile_serialization=kind != "old")
    facts = whole[1] | dict(bytes=path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    path.with_suffix(".json").write_bytes(dump(facts))  # hashes can be made for anything: the hash is no proof of good will
    assert look(tmp_path)[0] == path and take(path) is None and not (tmp_path / "gone").exists()


def test_c01_what_is_no_file_is_passed_over(tmp_path, whole):
    "folders, and links that lead nowhere or around"
    content, facts = whole
    (tmp_path / "checkpoint-3.pth").write_bytes(content)
    (tmp_path / "checkpoint-3.json").write_bytes(dump(facts))
    (tmp_path / "checkpoint-4.pth").mkdir()
    (tmp_path / "checkpoint-5.pth").symlink_to("checkpoint-5.pth")
    (tmp_path / "checkpoint-6.pth").symlink_to("nowhere")
    for step in range(4, 7):
        size = (tmp_path / "checkpoint-4.pth").stat().st_size if step == 4 else 0
        (tmp_path / f"checkpoint-{step}.json").write_bytes(dump(facts | dict(step=step, serial=step, bytes=size)))
    (tmp_path / "checkpoint-7.pth").write_bytes(content)
    (tmp_path / "checkpoint-7.json").mkdir()
    newest, notes = look(tmp_path)
    assert newest == tmp_path / "checkpoint-3.pth" and len(notes) == 4
    assert {path.name for path in tmp_path.glob("*.pth") if take(path)} == {"checkpoint-3.pth"}


def test_c01_pipes_and_devices_are_passed_over(tmp_path, whole):
    "what never ends, or never begins, under a checkpoint's name"
    content, facts = whole
    (tmp_path / "checkpoint-3.pth").write_bytes(content)
    (tmp_path / "checkpoint-3.json").write_bytes(dump(facts))
    (tmp_path / "checkpoint-4.pth").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "checkpoint-5.pth")
    for step in (4, 5):
        (tmp_path / f"checkpoint-{step}.json").write_bytes(dump(facts | dict(step=step, serial=step, bytes=0)))
    (tmp_path / "checkpoint-6.pth").write_bytes(content)
    os.mkfifo(tmp_path / "checkpoint-6.json")
    signal.alarm(20)
    newest, notes = look(tmp_path)
    assert newest == tmp_path / "checkpoint-3.pth" and len(notes) == 3
    assert {path.name for path in tmp_path.glob("*.pth") if take(path)} == {"checkpoint-3.pth"}


# --- YAML ----------------------------------------------------------------------------------------------------------------------


def job(folder, content, *flags):
    "What a config file makes of the command line; the line that refuses it"
    path = folder / "job.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told), only_reads():
            return pretrainer.parse_args(["--config", str(path), *flags])
    except SystemExit as stop:
        assert stop.code == 2
    [line] = told.getvalue().splitlines()
    assert line.startswith("pretrainer.py: ") and str(path) in line and len(line) < 2000, line
    return line


names = st.sampled_from([*pretrainer.OPTIONS, *pretrainer.ALIASES, "lr", "<<", "? a", "", "!!python/name:os.system", "&x a", "*x"])
scalars = st.one_of(
    numbers.map(str), st.text(max_size=9), st.sampled_from(["yes", "~", "null", ".inf", "2020-13-45", "1:30", "0x1F", "!!int x", "!!set {a}", "[1, [2]]",
    "&x [*x]", "*x", "!!python/object/apply:os.system [touch x]", "!foo bar", "|", "[", "{a: 1}", "'", "%", "@", "1_000", "- 1", "[a, b]", "!!binary x"]),
)  # fmt: skip


@fuzz(150)
@given(st.lists(st.tuples(names, st.sampled_from([": ", ":", " : ", "\n"]), scalars), max_size=5), st.sampled_from(["\n", "\n---\n", "\r\n", "\n  ", ", "]))
def test_t26_any_yaml_is_taken_or_refused_in_one_line(tmp_path_factory, parts, end):
    job(tmp_path_factory.mktemp("yaml"), end.join("".join(part) for part in parts))


@fuzz(100)
@given(st.one_of(st.binary(max_size=40), damaged(b"max_steps: 10\nlearning_rate: 1e-3\ndataset_path: [a.txt, b.txt]\n")))
def test_t26_any_bytes_as_yaml_are_taken_or_refused_in_one_line(tmp_path_factory, content):
    job(tmp_path_factory.mktemp("yaml"), content)


LAUGHS = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n" for a, b in zip("abcdefghi", "bcdefghij"))
HOSTILE = {  # content -> words of the line
    "max_steps: 10\nseed: 1\nmax_steps: 20\n": "line 3: max_steps line 1",
    "resume: never\nlast_checkpoint_path: x\n": "line 2: line 1",
    "seed: 1\n\nmax_stps: 3\n": "line 3: max_stps max_steps?",
    "seed: 1\nmax_steps: ten\n": "line 2: max_steps ten whole number",
    "seed: 1\ntrain_ratio: 1.5\n": "line 2: --train_ratio 1.5",
    "size: XL\n": "line 1: --size XL S, M, L",
    "seed: 1\nmin_lr: 1\n": "line 2: --learning_rate 0.004 --min_lr 1.0",
    "seed: 1\n# why\nclip: -1\n": "line 3: --clip -1.0 negative",
    "seed:\n": "line 1: seed give a value",
    "seed: !!python/object/apply:os.system ['touch gone']\n": "line 1: seed python/object/apply:os.system",
    "!!python/object/apply:os.system ['touch gone']\n": "expected list",
    "seed: !!python/name:os.system\n": "line 1: seed python/name",
    "? !!python/object/apply:os.system ['touch gone']\n: 1\n": "line 1: list or mapping",
    "seed: !secret 1\n": "line 1: seed !secret",
    LAUGHS: "line 1: a no such option",
    "dataset_path: " + LAUGHS.replace("\n", "\n ") : "line 2 not YAML",
    "dataset_path: &x [*x]\n": "line 1: dataset_path single values",
    "dataset_path: " + "[" * 60_000: "nested too deeply",
    "seed: 1\n" * 20_000: "more than 65,536 bytes",
    "seed: 1\nprompt: \x07\n": "line 2: not YAML",
    "seed: 1\n---\nseed: 2\n": "line 2: not YAML",
    "seed: 1\n<<: {max_steps: 3}\n": "line 2: << no such option",
    "just words": "expected text",
}  # fmt: skip


@pytest.mark.parametrize("content", HOSTILE, ids=lambda content: content[:24].strip())
def test_t26_yaml_that_is_wrong_or_means_harm_is_named_by_line(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    line = job(tmp_path, content)
    assert all(word in line for word in HOSTILE[content].split()), line
    assert os.listdir(tmp_path) == ["job.yaml"]


def test_t26_a_flag_that_wins_over_the_file_is_the_one_blamed(tmp_path, capsys):
    (tmp_path / "job.yaml").write_text("train_ratio: 0.5\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        pretrainer.parse_args(["--config", str(tmp_path / "job.yaml"), "--train_ratio", "1.5"])
    assert "job.yaml" not in capsys.readouterr().err


def test_t26_yaml_and_flags_read_values_alike(tmp_path):
    "also where YAML has ideas of its own: 010 is ten, as it is on the command line"
    config = job(tmp_path, "seed: 010\nprompt: 2020-01-01\nmin_lr: ~\nflash_attn: ON\ndataset_path: [1.txt, '2']\nmax_steps: 1e3\n")
    assert config == pretrainer.parse_args("--seed 010 --prompt 2020-01-01 --min_lr none --flash_attn ON --dataset_path 1.txt 2 --max_steps 1e3".split())
    assert job(tmp_path, "# nothing\n") == pretrainer.parse_args([])


@pytest.mark.parametrize("path", ["/dev/zero", "/proc/self/mem"])
def test_t26_devices_are_no_config(path, capsys):
    with pytest.raises(SystemExit):
        pretrainer.parse_args(["--config", path])
    [line] = capsys.readouterr().err.splitlines()
    assert path in line or "Input/output" in line


# --- preparing data: stopped at any moment -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    "A preparation, killed at each of its moments: what was left"
    command = [sys.executable, ROOT / "tests" / "prepare_job.py", tmp_path_factory.mktemp("stopped")]
    done = subprocess.run([str(word) for word in command], env=launch_env(1), capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def is_part(name):
    return name.startswith(".") and ".part-" in name


def test_a_stop_leaves_nothing_half_made_under_a_final_name(stopped):
    "SIGKILL, SIGINT, SIGTERM at eight moments: without its sidecar nothing counts as data, and the next run makes them whole"
    cases = [case for case in stopped if "signal" in case]
    assert len(cases) == 24 and {case["code"] for case in cases} == {-9, 130, -15}
    for case in cases:
        assert not any(name.endswith(".json") and "tokenizer" not in name and not is_part(name) for name in case["names"]), case
        assert case["again"] == 0 and case["whole"] and case["after"] == ["bin", "json", "tokenizer.json"], case


def test_an_interrupt_cleans_up_and_a_kill_is_cleaned_up_after(stopped):
    for case in stopped:
        if case.get("signal") == signal.SIGINT:
            assert not any(map(is_part, case["names"])), case
    assert sum(any(map(is_part, case["names"])) for case in stopped if "signal" in case) == 14  # all but those that wrote nothing yet


def test_a_kill_never_mixes_old_data_with_new(stopped):
    cases = [case for case in stopped if "over" in case]
    assert {case["over"] for case in cases} == {"old", "refused"} and all(case["whole"] and case["after"] == 3 for case in cases)


def test_p10_a_part_file_in_use_is_left_alone(tmp_path):
    "one that was written to today may be another process's; one of yesterday is a dead one's"
    for name, age in ((".y.bin.part-1", 3600), (".x.bin.part-2", 90_000)):
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    with tk.part_file(tmp_path / "x.bin") as file:
        file.write(b"ours")
    assert sorted(os.listdir(tmp_path)) == [".y.bin.part-1", "x.bin"] and (tmp_path / "x.bin").read_bytes() == b"ours"


def test_a_planted_part_file_leads_nowhere_else(tmp_path, monkeypatch):
    "a link under the name that we would write, could anybody guess it: nothing is written, what it points at stays"
    (tmp_path / "victim").write_bytes(b"mine")
    monkeypatch.setattr(tk.os, "urandom", bytes)
    (tmp_path / f".x.bin.part-{os.getpid()}-00000000").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError), tk.part_file(tmp_path / "x.bin") as file:
        file.write(b"data")
    assert (tmp_path / "victim").read_bytes() == b"mine" and not (tmp_path / "x.bin").exists()


def test_two_containers_with_one_pid_do_not_meet(tmp_path):
    "on a shared volume, each process being number 1 of its own: neither deletes what the other writes"
    with tk.part_file(tmp_path / "x.bin") as one:
        one.write(b"one")
        with tk.part_file(tmp_path / "x.bin") as other:
            other.write(b"other")
        assert (tmp_path / "x.bin").read_bytes() == b"other"
    assert (tmp_path / "x.bin").read_bytes() == b"one" and os.listdir(tmp_path) == ["x.bin"]


def test_two_at_once_on_one_target_do_not_meet(tmp_path):
    "many writers, each clearing what it takes for dead: none fails, and the file is always one writer's"
    code = ("import sys; from minigpt.tokenizer import part_file\n"
            "for i in range(60):\n    with part_file(sys.argv[1]) as file:\n        file.write(sys.argv[2].encode() * 9)")
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    running = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "x"), word], stderr=subprocess.PIPE, env=env) for word in "abc"]
    errors = [process.communicate(timeout=60)[1] for process in running]
    assert errors == [b""] * 3 and (tmp_path / "x").read_bytes() in (b"a" * 9, b"b" * 9, b"c" * 9) and os.listdir(tmp_path) == ["x"]


def test_ctrl_c_while_data_are_prepared_is_one_line(tmp_path):
    "exit code 130, and the folder of data holds no file under a final name"
    draw = random.Random(0)
    (tmp_path / "a.txt").write_text("".join(f"{draw.random()} {draw.choice('abcdefgh') * 9}\n" for _ in range(150_000)), encoding="utf-8")
    command = [sys.executable, "-m", "minigpt.pretrainer", "--dataset_path", "a.txt", "--output_dir", "run"]
    env = launch_env(1, dict(MINIGPT_DATA=str(tmp_path / "data"), PYTHONPATH=str(ROOT)))
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert "text: a.txt" in process.stdout.readline()  # the preparation begins
        process.send_signal(signal.SIGINT)
        error = process.stderr.read()
        assert process.wait(60) == 130
    assert len(error.splitlines()) == 1 and "interrupted" in error, error
    assert [name for name in os.listdir(tmp_path / "data") if name != "prepare.lock"] == [] and not (tmp_path / "run").exists()


def test_a_full_disk_while_data_are_prepared_names_the_file_and_leaves_nothing(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT * 2000, encoding="utf-8")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(OSError) as error:
            data.prepare_files([tmp_path / "a.txt"], 270, tmp_path / "data", progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path / "data" / "files-") in str(error.value) and os.listdir(tmp_path / "data") == []


# --- a rest --------------------------------------------------------------------------------------------------------------------


def test_n10_no_flood_of_fork_warnings():
    "N10: a tokenizer is trained, text encoded on all cores, then a loader forks workers: nothing but the answer is printed"
    code = ("from torch.utils.data import DataLoader; from minigpt.tokenizer import train_tokenizer\n"
            f"words = train_tokenizer([{TEXT!r} * 99] * 9, 300)\nwords.encode_batch([{TEXT!r}] * 99)\n"
            "print(sum(len(batch) for batch in DataLoader(range(20), batch_size=4, num_workers=2)))")
    env = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"} | dict(PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("20\n", "")
