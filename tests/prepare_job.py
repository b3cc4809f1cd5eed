"""Kills a preparation of data at each of its moments, and says what it leaves; run as a file, for it forks.

Imports cost seconds, so they are made once, and each preparation is a fork of this process. A moment is the call of `os.fsync` or
`os.replace` before which the fork stops and tells so through a pipe: no sleep, no race.
"""
import json
import os
import select
import signal
import sys
from pathlib import Path

import minigpt.pretrain_dataset as data
from minigpt.tokenizer import Tokenizer, train_tokenizer

MOMENTS = ["train_tokenizer", "encode_batch", *(f"{call} {number}" for number in range(3) for call in ("fsync", "replace"))]
OLD, NEW = (["the old fish swam up the river " * 9], ["a new bird flew over the old tree " * 9])


def stop_at(moment, pipe):
    "Let this process stop before a call, and tell"
    places = dict(train_tokenizer=data, encode_batch=Tokenizer, fsync=os, replace=os)
    name, _, number = moment.partition(" ")
    real, calls = getattr(places[name], name), []

    def stopping(*args):
        calls.append(name)
        if len(calls) == int(number or 0) + 1:
            os.write(pipe, b"!")
            signal.pause()
        return real(*args)

    setattr(places[name], name, stopping)


def forked(work, moment=None, signum=None):
    "Do `work` in a fork, or kill it at a moment; its exit code, negative for a signal"
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            if moment:
                stop_at(moment, writer)
            work()
            code = 0
        except KeyboardInterrupt:
            code = 130
        finally:
            os._exit(code)
    os.close(writer)
    if moment:
        assert select.select([reader], [], [], 30)[0] and os.read(reader, 1) == b"!", f"never came to {moment}"
        os.kill(child, signum)
    os.close(reader)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def age(folder):
    "Let the part files in it be from long ago"
    for part in folder.glob(".*.part-*"):
        os.utime(part, (0, 0))


def overwrite(folder, documents):
    "Data of a fixed name, as a caller of `prepare_dataset` makes them"
    words = data.train_tokenizer(documents, 280)
    data.prepare_dataset(documents, folder / "x.bin", words, progress=False)


def found(path):
    "The documents that a token file gives with the tokenizer beside it; None where it is refused"
    try:
        tokens = data.PretrainBinaryDataset(path, 4).tokens
        words = Tokenizer.load(path.parent / data.load_sidecar(path)["tokenizer"])
    except (ValueError, OSError):
        return None
    assert words.hash == data.load_sidecar(path)["tokenizer_hash"]
    return [words.decode(tokens[:-1])]


def main(folder):
    "One line of JSON for each case"
    text = folder / "a.txt"
    text.write_text(NEW[0], encoding="utf-8")
    for moment in MOMENTS:
        for signum in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
            place = folder / f"{moment}-{signum}".replace(" ", "-")
            prepare = lambda: data.prepare_files([text], 280, place, progress=False)
            code = forked(prepare, moment, signum)
            names = sorted(path.name for path in place.iterdir()) if place.exists() else []
            age(place)
            again = forked(prepare)
            after = sorted(path.name.partition(".")[2] for path in place.iterdir())
            whole = found(next(place.glob("*.bin"))) == NEW
            print(json.dumps(dict(moment=moment, signal=int(signum), code=code, names=names, again=again, after=after, whole=whole)), flush=True)
        place = folder / f"over-{moment}".replace(" ", "-")
        overwrite(place, OLD)
        forked(lambda: overwrite(place, NEW), moment, signal.SIGKILL)
        between = {str(OLD): "old", str(NEW): "new", "None": "refused"}[str(found(place / "x.bin"))]
        age(place)
        overwrite(place, NEW)
        print(json.dumps(dict(moment=moment, over=between, after=len(list(place.iterdir())), whole=found(place / "x.bin") == NEW)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
