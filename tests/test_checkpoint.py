"Checkpoints: what is written is whole, what is read is what was written, what goes on is the same run"
import json
import signal
import threading
from unittest import mock

import pytest
import torch
from trainer_job import make_trainer

import minigpt.checkpoint as checkpoint
from minigpt.checkpoint import Checkpointer


def trained(folder, **options):
    trainer = make_trainer(folder, **options)
    trainer.train()
    return trainer


def test_the_state_has_the_fields_that_loading_asks_for(tmp_path):
    trainer = make_trainer(tmp_path, train_batch_size=4)
    trainer.setup()
    assert trainer.checkpoint().keys() == checkpoint.CHECKPOINT_FIELDS.keys()


def test_an_altered_or_incomplete_checkpoint_is_refused_in_one_line(tmp_path):
    trained(tmp_path, train_batch_size=4, max_steps=2)
    path = tmp_path / "checkpoint-2.pth"
    load, whole = Checkpointer(tmp_path).load, path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with pytest.raises(ValueError, match="altered since it was written"):
        load(path)
    for junk in (b"", b"hello", whole[:middle]):
        (tmp_path / "junk.pth").write_bytes(junk)
        with pytest.raises(ValueError, match="damaged, no checkpoint"):
            load(tmp_path / "junk.pth")
    for state in ({"model_state": {}}, [1, 2], torch.zeros(3)):  # C24: weights alone
        torch.save(state, tmp_path / "part.pth")
        with pytest.raises(ValueError, match="lacks .*optimizer_state"):
            load(tmp_path / "part.pth")


def test_keep_last_keeps_the_newest(tmp_path):
    trained(tmp_path, train_batch_size=4, max_steps=8, save_steps=2, keep_last=2)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*.pth")) == ["checkpoint-6.pth", "checkpoint-8.pth"]


def test_a_failed_save_leaves_no_temporary_file_and_the_old_one_whole(tmp_path):
    trainer = trained(tmp_path, train_batch_size=4, max_steps=2)
    with mock.patch.object(torch, "save", side_effect=OSError(28, "No space left on device")):
        trainer.checkpointer.save({"step": 9, "eval_loss": None})
        with pytest.raises(OSError, match="checkpoint-9.pth"):
            trainer.checkpointer.saved(wait=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-2.json", "checkpoint-2.pth"]
    assert trainer.checkpointer.newest() == (tmp_path / "checkpoint-2.pth", [])


def test_a_second_signal_ends_the_wait_for_a_write(tmp_path):
    "Also one that the wait itself does not see, here because another thread takes it: to end at once must not take as long as the disk"
    begun, gate, keeper = threading.Event(), threading.Event(), Checkpointer(tmp_path)

    def held_save(state, file):
        begun.wait(20)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        gate.wait(20)

    try:
        with mock.patch.object(torch, "save", held_save), pytest.raises(KeyboardInterrupt):
            keeper.save({"step": 1, "eval_loss": None})
            begun.set()
            keeper.saved(wait=True)
        assert not keeper.pending[0].done()
    finally:
        gate.set()
