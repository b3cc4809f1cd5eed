"""Data at scale: folders of shards, opened few at a time, in an order that no process lists and no rank strays from its part of."""
import json
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
from torch.utils.data import DataLoader

import minigpt.pretrain_dataset as data
from minigpt.collectives import launch_env
from minigpt.pretrain_dataset import PretrainBinaryDataset, ShardedDataset, TokenFileError, open_dataset, prepare_shards, split_dataset, windows_at
from minigpt.pretrainer_single import BatchOrder, Trainer, unpatch
from minigpt.runlog import read_run
from minigpt.tokenizer import Tokenizer, train_tokenizer
from test_pretrain_dataset import ids_of, jsonl, one_line, token_file, write
from test_pretrainer import cli

ROOT = Path(__file__).resolve().parents[1]
SIZES = [1, 2, 15, 16, 26, 31, 32, 33, 97, 1000, 1024, 12_345, 16_384, 20_011, 65_537]


def shards(folder, counts, **more):
    "Token files in which each token's value is its place in the whole, as far as 16 bits go"
    folder.mkdir(exist_ok=True)
    starts = np.cumsum([0, *counts])
    for number, (start, count) in enumerate(zip(starts, counts)):
        token_file(folder / f"part-{number:04}.bin", np.arange(start, start + count) % 65_536, **dict(vocab_size=65_536) | more)
    return folder


def altered(path, **fields):
    sidecar = path.with_suffix(".json")
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | fields))


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    "300 shards of 25 to 90 tokens"
    draw = random.Random(0)
    return shards(tmp_path_factory.mktemp("many"), [draw.randint(25, 90) for _ in range(300)])


# --- a folder as one data set --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count, windows", [(9, 1), (16, 1), (17, 2), (100, 12)])
def test_d24_d26_tail_rule_of_a_shard_is_that_of_a_file(tmp_path, count, windows):
    "D24, D26: context + 1 tokens give one window; what is left over at each end is shorter than a window"
    ds = ShardedDataset(shards(tmp_path / "s", [count, 30, count]), 8)
    alone = [PretrainBinaryDataset(path, 8) for path in ds.files]
    assert len(ds) == 2 * windows + 3 == sum(map(len, alone))
    for part in (0, 1):
        assert torch.equal(ds[:][part], torch.cat([one[:][part] for one in alone]))
    with pytest.raises(IndexError):
        ds[len(ds)]


def test_all_ways_of_asking_give_the_same(many):
    ds = ShardedDataset(many, 8)
    asked = [len(ds) - 1, 3, 0, 700, 3]
    x, y = ds.__getitems__(asked)
    for row, number in enumerate(asked):
        assert torch.equal(ds[number][0], x[row]) and torch.equal(ds[number][1], y[row]) and ds[number][0].shape == (8,)
    assert ds[5:5][0].shape == (0, 8) and torch.equal(ds[-1][1], y[0])
    copy = pickle.loads(pickle.dumps(ds))
    assert len(pickle.dumps(ds)) < 1000 and torch.equal(copy[:][0], ds[:][0]) and copy.fingerprint == ds.fingerprint
    loader = DataLoader(split_dataset(ds, 0.9, 0)[0], batch_size=5, collate_fn=lambda batch: batch, num_workers=1)
    assert next(iter(loader))[0].shape == (5, 8)


def test_files_globs_and_folders_mean_the_same_shards(many, tmp_path, monkeypatch):
    (tmp_path / "s").mkdir()
    for path in sorted(many.iterdir())[:6]:
        (tmp_path / "s" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "s" / "._part-0000.bin").write_bytes(b"macOS")
    monkeypatch.chdir(tmp_path)
    ways = ["s", ["s"], "s/*.bin", ["s/part-0000.bin", "s", "s/part-0001.bin", "s/part-0002.bin"]]
    assert len({open_dataset(way, 8).fingerprint for way in ways}) == 1
    assert isinstance(open_dataset(["s/part-0000.bin"], 8), PretrainBinaryDataset) and not data.find_shards(["a.txt", "nowhere/"])
    with pytest.raises(FileNotFoundError, match="s/part-0009.bin: no such token file"):
        open_dataset(["s", "s/part-0009.bin"], 8)
    other = open_dataset(["s/part-0001.bin", "s/part-0000.bin", "s/part-0002.bin"], 8)
    assert other.fingerprint == open_dataset(ways[0], 8).fingerprint  # these stand-ins all have one hash; see the next


def test_fingerprint_tells_content_and_cut(tmp_path):
    words = train_tokenizer(["the end of the end"] * 3, 270)
    prints = set()
    for number, (repeats, size) in enumerate([(40, 10), (41, 10), (40, 150)]):
        prepare_shards(["ab " * 40, "cd " * 40, "ef " * repeats], tmp_path / str(number), words, size, progress=False)
        prints.add(ShardedDataset(tmp_path / str(number), 4).fingerprint)
    assert len(prints) == 3


def test_few_files_are_open_however_many_there_are(many):
    "300 shards read in any order: at most MAX_OPEN files and maps at once, none before the first read, each shard opened when first read"
    if not Path("/proc/self/fd").exists():
        pytest.skip("reads /proc")
    open_now = lambda: len(os.listdir("/proc/self/fd"))
    maps = lambda: Path("/proc/self/maps").read_text().count(str(many))
    before, most = open_now(), 0
    ds = ShardedDataset(many, 8)
    assert open_now() == before and maps() == 0 and not ds.shard.cache_info().currsize
    for numbers in np.random.default_rng(0).permutation(len(ds))[:1600].reshape(-1, 16):
        ds[numbers]
        most = max(most, open_now() - before)
        assert maps() <= data.MAX_OPEN
    assert 0 < most <= data.MAX_OPEN + 1 and ds.shard.cache_info().currsize == data.MAX_OPEN
    assert ds.shard(int(ds.shard_of(numbers).max())) is ds.shard(int(ds.shard_of(numbers).max()))  # what was read last is still open
    del ds
    assert maps() == 0  # at once, without a search for cycles


def test_memory_of_an_open_folder_grows_by_little_per_shard(many):
    tracemalloc.start()
    ShardedDataset(many, 8)
    first = tracemalloc.get_traced_memory()[0]
    ds = ShardedDataset(many, 8)
    grown = tracemalloc.get_traced_memory()[0] - first
    tracemalloc.stop()
    assert len(ds.files) == 300 and grown < 300 * 2000  # names, as Path objects, and a number each


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_d29_shards_read_do_not_pile_up_in_memory(tmp_path):
    "D29: neither as memory of our own nor as mapped pages of more files than are open"
    folder = tmp_path / "s"
    folder.mkdir()
    for number in range(3 * data.MAX_OPEN):
        token_file(folder / f"{number:03}.bin", np.zeros(500_000))  # 1 MB each
    ds = ShardedDataset(folder, 128)

    def mb(what):
        return int(Path("/proc/self/status").read_text().split(what)[1].split()[0]) / 1024

    rng = np.random.default_rng(0)
    ds[rng.integers(0, len(ds), 64)]
    before, mapped = mb("RssAnon:"), mb("RssFile:")
    for _ in range(500):
        ds[rng.integers(0, len(ds), 64)]
    assert mb("RssAnon:") - before < 10 and mb("RssFile:") - mapped < data.MAX_OPEN + 4


@pytest.mark.skipif(not Path("/proc/self/io").exists() or not hasattr(os, "posix_fadvise"), reason="reads /proc")
def test_a_window_costs_its_own_pages_and_no_more(tmp_path):
    "what the disk gives for windows of shards that no memory holds: without advice the system reads ahead, here 8 MB a window"
    folder = shards(tmp_path / "s", [1_000] * 2)
    path = token_file(folder / "part-0000.bin", np.zeros(20_000_000), vocab_size=65_536)

    def from_disk():
        return int(Path("/proc/self/io").read_text().split("\nread_bytes: ")[1].split()[0])

    def forget():
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    ds = ShardedDataset(folder, 128)
    forget()
    before = from_disk()
    ds[np.random.default_rng(0).integers(0, 150_000, 40)]
    read = from_disk() - before
    if not read:
        pytest.skip("the folder of this test lies in memory")
    assert read <= 40 * 2 * 4096 + 16_384


# --- what is refused -----------------------------------------------------------------------------------------------------------


REFUSED = [
    (lambda s: s.with_suffix(".json").unlink(), "has no part-0001.json"),
    (lambda s: s.with_suffix(".json").write_text("{"), "not JSON"),
    (lambda s: s.write_bytes(s.read_bytes()[:-2]), "tokens = 80 bytes"),
    (lambda s: altered(s, vocab_size=300), "vocab_size 300, but 65536 in "),
    (lambda s: altered(s, tokenizer_hash="other"), "tokenizer_hash other, but t in "),
    (lambda s: token_file(s, range(40), vocab_size=65_536, dtype="<u4"), "dtype <u4, but <u2 in "),
    (lambda s: altered(s, tokenizer="../../x.json"), "no good tokenizer"),
]


@pytest.mark.parametrize("harm, words", REFUSED, ids=[words for _, words in REFUSED])
def test_d23_a_bad_shard_is_refused_by_name_on_opening(tmp_path, harm, words):
    folder = shards(tmp_path / "s", [40] * 3)
    harm(folder / "part-0001.bin")
    with pytest.raises(ValueError) as error:
        ShardedDataset(folder, 8)
    assert "part-0001" in one_line(error) and words in str(error.value)


@pytest.mark.parametrize("place", [(0,), (1,), (3,), (0, 1), (2, 3), (1, 2), (0, 3)])
@pytest.mark.parametrize("count", [0, 1, 8])
def test_d23_a_shard_too_short_for_a_window_gives_none(tmp_path, place, count):
    "D23: first, in the middle, last, two in a row: the others' windows are found as before"
    counts = [count if number in place else 40 for number in range(4)]
    ds = ShardedDataset(shards(tmp_path / "s", counts), 8)
    alone = [PretrainBinaryDataset(path, 8) for path, count in zip(ds.files, counts) if count == 40]
    assert len(ds) == sum(map(len, alone)) and torch.equal(ds[:][0], torch.cat([one[:][0] for one in alone]))
    assert {int(ds.shard_of(number)) for number in range(len(ds))} == {number for number in range(4) if number not in place}


def test_d23_a_folder_without_a_window_is_refused(tmp_path):
    with pytest.raises(ValueError, match="s, the longest of 3 files: 8 tokens; context_length=8 must be positive and needs at least 9") as error:
        ShardedDataset(shards(tmp_path / "s", [8, 3, 8]), 8)
    one_line(error)


def test_d23_what_our_own_writer_left_for_the_last_shard_may_be_short(tmp_path, tokenizer):
    prepare_shards([*["two fish, a river " * 60] * 3, "end"], tmp_path, tokenizer, 150, progress=False)
    ds = ShardedDataset(tmp_path, 16)
    assert data.load_sidecar(ds.files[-1])["count"] <= 16 and ds.edges[-1] == ds.edges[-2] > 0


def test_a_shard_that_was_never_copied_is_noticed(tmp_path, tokenizer):
    "the last, one in the middle, all but one: as a folder, as a glob, and prepare_files makes them anew; some of a whole folder may be chosen"
    path = jsonl(tmp_path / "a.jsonl", *({"text": text} for text in texts(40)))
    prepare = lambda: data.prepare_files([path], 290, tmp_path / "d", progress=False, shard_tokens=200)
    folder = prepare()
    names = [file.name for file in data.find_shards(folder)]
    assert all(data.load_sidecar(folder / name)["shards"] == len(names) for name in names) and len(names) > 3
    assert len(open_dataset([folder / names[1], folder / names[2]], 8)) and len(open_dataset(folder / names[1], 8))
    for lost in (names[-1:], names[1:2], names[1:]):
        for name in lost:
            (folder / name).unlink(), (folder / name).with_suffix(".json").unlink()
        for paths in (folder, [folder / "*.bin"]):
            with pytest.raises(ValueError, match=f"holds {len(names) - len(lost)} shards, but its sidecars tell of {len(names)}") as error:
                open_dataset(paths, 8)
            assert str(folder) in one_line(error)
        assert prepare() == folder and len(data.find_shards(folder)) == len(names)


def test_a_file_added_meanwhile_is_noticed_by_a_worker(tmp_path):
    "it opens the folder anew, and windows that shift would be others there than in the process that asks for them"
    ds = ShardedDataset(shards(tmp_path / "s", [40, 40]), 8)
    state = pickle.dumps(ds)
    assert len(pickle.loads(state)) == len(ds)
    token_file(tmp_path / "s" / "added.bin", range(40), vocab_size=65_536)
    with pytest.raises(TokenFileError, match="files were added or changed since training began") as error:
        pickle.loads(state)
    one_line(error)


def test_a_folder_without_shards_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no .bin files.*--shard_tokens"):
        ShardedDataset(tmp_path, 8)
    with pytest.raises(ValueError, match="context_length"):
        ShardedDataset(shards(tmp_path / "s", [40]), 0)


def test_d20_an_id_beyond_the_vocabulary_is_found_when_it_is_read(tmp_path):
    "D20: with file, place and vocabulary; reading others is not disturbed, and opening scans nothing"
    folder = shards(tmp_path / "s", [90, 90, 90], vocab_size=300)
    tokens = np.arange(90)
    tokens[[41, 89]] = 300  # the last stands in no window
    token_file(folder / "part-0001.bin", tokens)
    ds = ShardedDataset(folder, 8)
    good = [number for number in range(len(ds)) if number != 11 + 5]
    assert len(ds[good][0]) == len(ds) - 1
    with pytest.raises(TokenFileError) as error:
        ds[16]
    assert all(part in one_line(error) for part in ("part-0001.bin", "id 300", "position 41", "vocab_size is 300"))
    assert isinstance(error.value, ValueError) and isinstance(error.value, OSError)  # main tells the second in one line


@pytest.mark.parametrize("harm, words", [
    (lambda path: path.unlink(), "can't be opened any more"), (lambda path: path.write_bytes(b""), "can't be opened any more"),
    (lambda path: path.write_bytes(bytes(40)), "its size has changed"),
])
def test_a_shard_that_changes_while_we_train_is_told(tmp_path, harm, words):
    ds = ShardedDataset(shards(tmp_path / "s", [90, 90]), 8)
    harm(ds.files[1])
    assert len(ds[:11][0]) == 11
    with pytest.raises(TokenFileError, match=f"part-0001.bin: {words}") as error:
        ds[12]
    one_line(error)


# --- writing -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["One fish swam by, then two fish and the end of the river. "] * 3, 290)


def texts(n, blank=()):
    return [" \n" if i in blank else f"fish {i} swam by the river and the end " * (1 + i % 3) for i in range(n)]


def test_shards_hold_what_one_file_holds(tmp_path, tokenizer):
    source = [dict(name="x", bytes=1, sha256="0")]
    report = data.ReadReport(skipped=2, first_bad="line 7")
    prepare_shards(iter(texts(60, blank=(0, 30, 59))), tmp_path / "s", tokenizer, 100, source, False, report)
    whole = data.prepare_dataset(texts(60, blank=(0, 30, 59)), tmp_path / "x.bin", tokenizer, progress=False)
    files = data.find_shards(tmp_path / "s")
    assert sum(map(ids_of, files), []) == ids_of(tmp_path / "x.bin") and len(files) > 10
    metas = [data.load_sidecar(path) for path in files]
    assert all(100 <= meta["count"] < 200 for meta in metas[:-1]) and all(ids_of(path)[-1] == tokenizer.eot for path in files)
    for key in ("count", "documents", "bytes"):
        assert sum(meta[key] for meta in metas) == whole[key]
    assert [meta["sources"] for meta in metas] == [source] + [[]] * (len(metas) - 1) and [meta["skipped"] for meta in metas[:2]] == [2, 0]
    ds = ShardedDataset(tmp_path / "s", 16)
    assert Tokenizer.load(ds.tokenizer_file).hash == ds.meta["tokenizer_hash"] == tokenizer.hash
    assert ds.meta["count"] == whole["count"] and sorted(path.suffix for path in (tmp_path / "s").iterdir()).count(".json") == len(files) + 1


def test_fewer_shards_leave_none_of_the_older_ones(tmp_path, tokenizer):
    prepare_shards(texts(60), tmp_path, tokenizer, 100, progress=False)
    prepare_shards(texts(6), tmp_path, tokenizer, 100, progress=False)
    assert sum(meta["documents"] for meta in map(data.load_sidecar, data.find_shards(tmp_path))) == 6


def test_half_a_folder_is_never_taken_for_a_whole_one(tmp_path, tokenizer, monkeypatch):
    "killed while the shards are written, or while their sidecars are: refused by name; an error on the way leaves nothing"
    def broken():
        yield from texts(30)
        raise ValueError("line 3 is bad")

    with pytest.raises(ValueError, match="line 3"):
        prepare_shards(broken(), tmp_path / "a", tokenizer, 100, progress=False)
    assert not list((tmp_path / "a").iterdir())
    with pytest.raises(ValueError, match="no text for"):
        prepare_shards([" "], tmp_path / "a", tokenizer, 100, progress=False)

    class Killed(BaseException):
        pass

    write_sidecar, written = data._write_sidecar, []

    def dying(*args):
        written.append(args)
        if len(written) > 5:
            raise Killed
        return write_sidecar(*args)

    monkeypatch.setattr(data, "_write_sidecar", dying)
    with pytest.raises(Killed):
        prepare_shards(texts(60), tmp_path / "b", tokenizer, 100, progress=False)
    with pytest.raises(ValueError, match="shard-00005.bin has no shard-00005.json"):
        ShardedDataset(tmp_path / "b", 8)
    monkeypatch.undo()
    prepare_shards(texts(60), tmp_path / "b", tokenizer, 100, progress=False)
    assert len(ShardedDataset(tmp_path / "b", 8))


def test_a_kill_while_the_old_shards_are_deleted_leaves_no_shorter_folder(tmp_path, tokenizer, monkeypatch):
    "before each of the deletions: what is left is the old folder, or refused"
    class Killed(BaseException):
        pass

    def killed_before(last):
        done, unlink = [], Path.unlink

        def dying(path, *args, **more):
            if len(done) == last:
                raise Killed
            done.append(path)
            unlink(path, *args, **more)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", dying)
            try:
                prepare_shards(iter(["a new text"] * 3), tmp_path, tokenizer, 100, progress=False)
            except Killed:
                return True

    prepare_shards(texts(6), tmp_path, tokenizer, 100, progress=False)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for last in range(2 * len(data.find_shards(tmp_path))):
        assert killed_before(last)
        if last:
            with pytest.raises(ValueError):
                ShardedDataset(tmp_path, 8)
        else:
            assert len(ShardedDataset(tmp_path, 8))
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)


def test_files_prepared_one_by_one_make_a_folder(tmp_path, tokenizer):
    "as machines do that prepare apart; another's tokenizer is noticed"
    for number in range(3):
        data.prepare_dataset(texts(9 + number), tmp_path / f"part-{number}.bin", tokenizer, progress=False)
    ds = open_dataset(tmp_path, 8)
    assert len(ds) == sum(len(PretrainBinaryDataset(path, 8)) for path in ds.files) and Tokenizer.load(ds.tokenizer_file).hash == tokenizer.hash
    data.prepare_dataset(texts(9), tmp_path / "part-3.bin", train_tokenizer(["another text"] * 3, 290), progress=False)
    with pytest.raises(ValueError, match="part-3.bin: .*prepare all with one tokenizer"):
        open_dataset(tmp_path, 8)


def test_prepare_files_finds_its_shards_again(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", *({"text": text} for text in texts(60)))
    folder = data.prepare_files([path], 290, tmp_path / "d", progress=False, shard_tokens=200)
    when = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert folder.is_dir() and len(data.find_shards(folder)) > 3
    again = lambda: data.prepare_files([path], 290, tmp_path / "d", progress=False, shard_tokens=200)
    assert again() == folder and {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == when
    (folder / "shard-00002.json").unlink()
    assert again() == folder and len(ShardedDataset(folder, 8)) and sorted(file.name for file in folder.iterdir()) == sorted(when)
    assert data.prepare_files([path], 290, tmp_path / "d", progress=False).suffix == ".bin"


# --- the order -----------------------------------------------------------------------------------------------------------------


def epoch_of(n, seed, epoch):
    return windows_at(np.arange(n), n, seed, epoch)


@pytest.mark.parametrize("n", SIZES)
def test_each_window_once_whatever_their_number(n):
    for seed, epoch in ((0, 0), (0, 1), (2**32 - 1, 3)):
        assert np.array_equal(np.sort(epoch_of(n, seed, epoch)), np.arange(n))


def test_other_seeds_and_epochs_are_other_orders():
    orders = {tuple(epoch_of(97, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100
    assert np.array_equal(epoch_of(97, 3, 4), epoch_of(97, 3, 4))


def test_any_place_is_found_without_those_before_it():
    whole = epoch_of(12_345, 1, 2)
    for first in (0, 1, 511, 512, 7777, 12_340):
        assert np.array_equal(windows_at(np.arange(first, min(first + 600, 12_345)), 12_345, 1, 2), whole[first : first + 600])


def test_permutations_are_as_good_as_drawn_ones():
    "over many keys every number goes everywhere equally often, and neighbours end up at any distance"
    n, keys = 50, np.random.SeedSequence(0).generate_state(data.ROUNDS * 2 * 20_000, np.uint64).reshape(data.ROUNDS, 2, -1)
    table = np.stack([data.permuted(np.full(20_000, i), n, 6, keys) for i in range(n)], axis=1)  # (keys, n)
    assert np.array_equal(np.sort(table, axis=1)[::997], np.tile(np.arange(n), (21, 1)))
    places = np.stack([np.bincount(table[:, i], minlength=n) for i in range(n)])
    steps = np.bincount(((table[:, 1:] - table[:, :-1]) % n).ravel(), minlength=n)[1:]
    chi2 = lambda counts: ((counts - counts.mean()) ** 2 / counts.mean()).sum() / counts.size
    assert chi2(places) < 1.2 and chi2(steps) < 1.6  # 1 for drawn ones
    whole = data.permuted(np.arange(100_003), 100_003, 17, keys[..., :1])
    grid = np.histogram2d(np.arange(100_003), whole, bins=30)[0]
    assert chi2(grid) < 1.2 and abs(np.corrcoef(whole[1:], whole[:-1])[0, 1]) < 0.02


def test_neighbouring_places_are_spread_over_the_data():
    "any 2, 4, ... 1,024 places that begin at a multiple of their number lie in as many equal parts"
    n, whole = 65_613, epoch_of(65_613, 5, 0)
    for size in (2, 16, 1024):
        parts = np.searchsorted(np.arange(size) * n // size, whole[:65_536], side="right").reshape(-1, size)
        assert np.array_equal(np.sort(parts), np.tile(np.arange(size) + 1, (len(parts), 1)))
    assert len(np.unique(parts, axis=0)) > 32  # of 64 turns: each takes the lanes in an order of its own


def test_an_order_of_a_billion_windows_takes_no_memory():
    n = 10**9 + 7
    order = BatchOrder(n, 8, 1, rank=3, world_size=1024, order=data.partial(data.window_order, n))
    tracemalloc.start()
    order.start = 8192 * 100_000
    batches = iter(order)
    first = [next(batches) for _ in range(3)][0]
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    assert peak < 8 and len(order) == n // 8192 and all(3 / 1024 <= number / n < 4 / 1024 for number in first)


@pytest.mark.skipif(sys.platform == "win32", reason="files of holes take room there")
def test_a_trillion_tokens_on_1024_ranks(tmp_path):
    "2,000 shards of 500 million tokens, all of them holes: opened in seconds and megabytes; a rank reads 3 shards, a node of 8 reads 17"
    count = 500_000_000
    first = token_file(tmp_path / "shard-00000.bin", np.zeros(9))
    altered(first, count=count)
    os.truncate(first, 2 * count)
    if first.stat().st_blocks > 100:
        pytest.skip("a file system without holes")
    for number in range(1, 2000):
        path = tmp_path / f"shard-{number:05}.bin"
        path.touch()
        os.truncate(path, 2 * count)
        path.with_suffix(".json").write_text(first.with_suffix(".json").read_text())
    tracemalloc.start()
    train_set, eval_set = split_dataset(ShardedDataset(tmp_path, 2048), 0.9999, 1)
    ds, n, by_rank = train_set.parent, len(train_set), {rank: set() for rank in range(512, 520)}
    read, reading = ds.shard, []
    ds.shard = lambda shard: reading.append(shard) or read(shard)
    for step in range(0, n // 8192, n // 8192 // 30):
        batch = train_set.order(1, 0, 8192 * step, 8192 * (step + 1)).reshape(1024, 8)
        for rank, seen in by_rank.items():
            reading.clear()
            assert train_set[batch[rank]][0].shape == (8, 2048)
            seen |= set(reading)
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    assert len(ds) == 2000 * ((count - 1) // 2048) and len(eval_set) == len(ds) - n and peak < 10
    assert max(map(len, by_rank.values())) <= 4 and len(set.union(*by_rank.values())) <= 18


def global_batches(n, world, batch=12, epoch=0, start=0):
    orders = [BatchOrder(n, batch // world, 1, rank, world, data.partial(data.window_order, n)) for rank in range(world)]
    for order in orders:
        order.epoch, order.start = epoch, start
    return [sum(parts, []) for parts in zip(*orders)]


@pytest.mark.parametrize("n", [997, 5003])
def test_world_sizes_share_one_order(n):
    "1, 2, 3 and 6 ranks see the same windows in each step; less than a batch is left out, others each time; going on anywhere, in any number"
    one = global_batches(n, 1)
    assert all(global_batches(n, world) == one for world in (2, 3, 6))
    assert global_batches(n, 6, start=36) == global_batches(n, 2)[3:] == one[3:]
    seen = [set(sum(global_batches(n, 2, epoch=epoch), [])) for epoch in (0, 1)]
    assert [len(one) for one in seen] == [n // 12 * 12] * 2 and seen[0] != seen[1]
    rest = sum(global_batches(n, 2, batch=16, start=36), [])  # another batch size from there on
    assert not set(rest) & set(sum(one[:3], [])) and len(set(rest)) == len(rest) > n - 36 - 16


@pytest.mark.parametrize("world", [2, 4, 8])
def test_each_rank_reads_its_part_only(many, world):
    ds = ShardedDataset(many, 8)
    train_set, eval_set = split_dataset(ds, 0.9, 0)
    n, read = len(train_set), []
    for rank in range(world):
        order = BatchOrder(n, 16 // world, 1, rank, world, train_set.order)
        numbers = np.array(sum(list(order)[:-1], []))  # the last batch of an epoch may lack some lanes
        assert rank * n // world <= numbers.min() and numbers.max() < (rank + 1) * n // world
        parent = numbers + train_set.shifts[np.searchsorted(train_set.ends, numbers, side="right")]
        read.append(set(ds.shard_of(parent).tolist()))
    assert all(len(one & other) <= 1 for one, other in zip(read, read[1:]))  # one shard lies on the border
    assert all(len(shards) < 300 / world + 20 for shards in read) and sum(map(len, read)) > 280


def test_three_ranks_share_no_more_than_the_borders(many):
    n = len(ShardedDataset(many, 8))
    for rank in range(3):
        numbers = np.array(sum(BatchOrder(n, 16, 1, rank, 3, data.partial(data.window_order, n)), [])) / n
        assert rank / 3 - 1 / 16 <= numbers.min() and numbers.max() <= (rank + 1) / 3 + 1 / 16


def test_small_single_files_keep_their_shuffle(tmp_path):
    ds = PretrainBinaryDataset(token_file(tmp_path / "x.bin", np.arange(1000), vocab_size=1000), 8)
    assert ds.order is None and split_dataset(ds, 0.9, 0)[0].order is None
    ds.windows = np.broadcast_to(ds.windows[0], (data.MAX_SHUFFLED + 1, 9))
    assert ds.order is not None


# --- the command line ----------------------------------------------------------------------------------------------------------


SMALL = "--n_layers 1 --emb_dim 32 --n_heads 2 --context_length 16 --vocab_size 300 --prompt Anna --train_batch_size 8".split()
SMALL += "--warmup_steps 0 --min_lr 4e-3 --sample_tokens 4 --log_every 1 --eval_steps 6 --save_steps 4 --train_ratio 0.9 --drop_rate 0".split()


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("story"), random.Random(1)
    names, verbs = ["Anna", "Pierre", "Sonya", "曹操", "Holmes"], ["sees", "hears", "答", "loves"]
    lines = [" ".join(f"{draw.choice(names)} {draw.choice(verbs)} {draw.choice(names)}." for _ in range(12)) for _ in range(400)]
    return jsonl(folder / "a.jsonl", *({"text": line} for line in lines))


@pytest.fixture(scope="module")
def run(story, tmp_path_factory):
    "What `torchrun` on a text with --shard_tokens left behind, two processes, resumed by one, and the same never stopped"
    base = tmp_path_factory.mktemp("runs")
    env = launch_env(2, dict(MINIGPT_DATA=str(base / "data"), OMP_NUM_THREADS="1"))

    def launch(processes, name, *words):
        (base / name).mkdir(exist_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes, ROOT / "tests" / "shard_job.py", base / name]
        done = subprocess.run([str(c) for c in [*command, *SMALL, *words]], env=env, cwd=base, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    launch(2, "one", "--dataset_path", story, "--shard_tokens", "150", "--output_dir", base / "whole", "--max_steps", "12")
    folder, = (base / "data").glob("files-*-150")
    launch(2, "two", "--dataset_path", folder, "--output_dir", base / "half", "--max_steps", "8")
    launch(1, "three", "--dataset_path", folder / "*.bin", "--output_dir", base / "half", "--max_steps", "12", "--train_batch_size", "16")
    return base, folder


def test_torchrun_trains_on_a_folder_and_each_rank_reads_its_part(run):
    base, folder = run
    losses = [event["train_loss"] for event in read_run(base / "whole") if "train_loss" in event]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.2 and len(data.find_shards(folder)) > 100
    first, second = (set(json.loads((base / "one" / f"rank-{rank}.json").read_text())) for rank in (0, 1))
    assert len(first & second) <= 1 and max(first) <= min(second) and len(first) > 30 < len(second)


def test_resumed_equals_the_uninterrupted_run(run):
    "folder, glob and prepared text are one data set; the last four steps of one process with the joined batch equal those of two"
    base, _ = run
    one, other = (torch.load(base / name / "checkpoint-12.pth", weights_only=True) for name in ("whole", "half"))
    assert one["data_fingerprint"] == other["data_fingerprint"] and other["samples_seen"] == one["samples_seen"] == 12 * 16
    names = one["model_state"].keys()
    assert all(torch.allclose(one["model_state"][name], other["model_state"][name], rtol=1e-3, atol=2e-4) for name in names)
    curves = [[event["train_loss"] for event in read_run(base / name) if "train_loss" in event] for name in ("whole", "half")]
    assert curves[0][-4:] == pytest.approx(curves[1][-4:], abs=1e-3)


@pytest.fixture
def alone(monkeypatch, tmp_path):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MINIGPT_DATA", str(tmp_path / "data"))
    yield
    unpatch(Trainer)


def test_one_process_resumes_to_the_bit(run, alone, tmp_path):
    folder = run[1]
    for steps, name in ((8, "a"), (4, "b"), (8, "b")):
        assert cli("--dataset_path", folder, "--output_dir", tmp_path / name, *SMALL, "--max_steps", steps) == 0
    one, other = (torch.load(tmp_path / name / "checkpoint-8.pth", weights_only=True)["model_state"] for name in "ab")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_mistakes_with_folders_are_one_line(run, alone, tmp_path, capsys):
    folder = tmp_path / "s"
    folder.mkdir()
    for path in run[1].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    text = write(tmp_path / "a.txt", "some text")
    out = ("--output_dir", tmp_path / "out", *SMALL, "--max_steps", 100)
    assert cli("--dataset_path", folder, text, *out) == 2 and "or texts, not both" in capsys.readouterr().err
    assert cli("--dataset_path", folder, *out, "--vocab_size", 400) == 2 and "was prepared with 300" in capsys.readouterr().err
    assert cli("--shard_tokens", -1, *out) == 2 and "--shard_tokens -1" in capsys.readouterr().err
    (folder / "shard-00007.json").unlink()
    assert cli("--dataset_path", folder, *out) == 2
    assert "shard-00007.bin has no shard-00007.json" in capsys.readouterr().err
    (folder / "shard-00007.json").write_bytes((run[1] / "shard-00007.json").read_bytes())
    (folder / "tokenizer.json").unlink()
    assert cli("--dataset_path", folder, *out) == 2 and "tokenizer.json" in capsys.readouterr().err


def test_d20_a_bad_id_met_in_training_is_one_line(run, alone, tmp_path, capsys):
    folder = tmp_path / "s"
    folder.mkdir()
    for path in run[1].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    out = ("--output_dir", tmp_path / "out", *SMALL, "--max_steps", 100, "--train_ratio", "1")
    ds = ShardedDataset(folder, 16)
    shard = ds.shard_of(ds.order(123, 0, 16, 24)[-1])  # read in the third step
    tokens = np.fromfile(ds.files[shard], "<u2")
    tokens[:] = 60_000
    tokens.tofile(ds.files[shard])
    code = cli("--dataset_path", folder, *out)
    err = capsys.readouterr().err
    assert code == 1 and "id 60000 at position" in err and ds.files[shard].name in err and "Traceback" not in err


def test_d20_a_bad_id_in_one_file_is_one_line_too(run, alone, tmp_path, capsys, monkeypatch):
    "a small file is refused before the first step, exit code 2; a large one when the window is read, exit code 1"
    tokens = np.concatenate([np.fromfile(path, "<u2") for path in data.find_shards(run[1])])
    tokens[len(tokens) // 2 :] = 60_000
    words = Tokenizer.load(run[1] / "tokenizer.json")
    path = token_file(tmp_path / "x.bin", tokens, vocab_size=words.vocab_size)
    altered(path, tokenizer_hash=words.hash)
    words.save(tmp_path / "x.tokenizer.json")
    for checked, expected in ((data.CHECKED_AT_ONCE, 2), (0, 1)):
        monkeypatch.setattr(data, "CHECKED_AT_ONCE", checked)
        code = cli("--dataset_path", path, "--output_dir", tmp_path / str(expected), *SMALL, "--max_steps", 100, "--train_ratio", "1")
        err = capsys.readouterr().err
        assert code == expected and "x.bin: id 60000 at position" in err and "Traceback" not in err
