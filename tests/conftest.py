"What several test files need set up"
import signal

import pytest
import torch

from minigpt.pretrainer_single import Trainer, unpatch

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs deaf to Ctrl-C, and their children inherit it


@pytest.fixture
def one_plain_process(monkeypatch):
    "No launcher in the environment, the trainer's own seams, one thread"
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    unpatch(Trainer)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
