"""Chapter 10: the patched Trainer on one, two and three processes. One launch serves all cases and ends with an error on purpose."""
import socket
import time
import weakref
from collections import Counter
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import minigpt.ddp as ddp
from minigpt.collectives import RankError, process_group, run_ranks
from minigpt.pretrainer_single import STRATEGY_SEAMS, Trainer, choose, patch_strategy, unpatch
from trainer_job import EQUAL_CASES, losses, make_model, make_trainer, weights

JOB = str(Path(__file__).with_name("trainer_job.py"))
ONE_THREAD = dict(OMP_NUM_THREADS="1")
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def plain_trainer(monkeypatch):
    "Every test starts and ends with the trainer as chapter 04 made it, and without a launcher's variables"
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    unpatch(Trainer)
    yield
    unpatch(Trainer)


def free_ports(n):
    "Different ones, since all are held until the last is found"
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    "Three processes for all cases, then two of them for the same, then rank 1's error"
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.raises(RankError, match="rank 1: RuntimeError: the third step is bad") as failure:
        run_ranks(JOB, 3, args=[folder, *free_ports(5)], env=ONE_THREAD, stream=False)
    return SimpleNamespace(folder=folder, logs=failure.value.logs, ended=time.time())


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def ranks(request, launch):
    "What each rank told, with the folder they wrote to and what they printed"
    world = request.param
    told = [torch.load(launch.folder / f"{world}/rank-{rank}.pt") for rank in range(world)]
    printed = [log.partition(f"world of {world}")[2].partition("world of")[0] for log in launch.logs[:world]]
    return SimpleNamespace(
        told=told, world=world, folder=launch.folder / str(world), printed=printed, of=lambda name: [t[name] for t in told]
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    "The same jobs in one process, unpatched, with the joined batch"
    unpatch(Trainer)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder, trained = tmp_path_factory.mktemp("alone"), {}
    for name, case in EQUAL_CASES.items():
        trained[name] = make_trainer(folder / name, **case(12))
        trained[name].train()
    torch.set_num_threads(threads)
    return trained


def largest_difference(one, other):
    return max((one[name] - other[name]).abs().max().item() for name in one)


# ---- equalities


@pytest.mark.parametrize("name", [name for name in EQUAL_CASES if name != "adamw"])
def test_p42_ranks_equal_one_process_with_the_joined_batch(ranks, alone, name):
    "P42, X03, P36, T25, T17: weights under SGD, losses and gradient norms; accumulation by 2 and 3; unequal counts of real tokens"
    for told in ranks.of(name):
        assert largest_difference(weights(alone[name]), told["weights"]) < 1e-5
    for field in ("train_loss", "eval_loss", "grad_norm"):
        torch.testing.assert_close(losses(ranks.told[0][name]["events"], field), losses(alone[name].events, field), rtol=1e-5, atol=1e-5)


def test_adamw_equals_within_its_own_tolerance(ranks, alone):
    "AdamW divides by the gradient's size, which enlarges rounding where that is small"
    assert largest_difference(weights(alone["adamw"]), ranks.told[0]["adamw"]["weights"]) < 1e-3
    assert losses(ranks.told[0]["adamw"]["events"]) == pytest.approx(losses(alone["adamw"].events), abs=1e-4)


def test_accumulation_exchanges_once_a_step(ranks):
    "The one bucket of this small model travels with the last micro-batch only"
    assert ranks.of("exchanges") == [2] * ranks.world


def test_p36_weights_are_equal_on_all_ranks(ranks):
    "P36: to the last bit, with and without accumulation, also when the dropout differs"
    for name in [*EQUAL_CASES, "epochs", "dropout"]:
        for told in ranks.of(name)[1:]:
            assert largest_difference(ranks.told[0][name]["weights"], told["weights"]) == 0


@pytest.mark.parametrize("drop_rate", [0.0, 0.3])
def test_patched_and_alone_equals_unpatched_bit_for_bit(tmp_path, drop_rate):
    trained = []
    for patch in (unpatch, ddp.patch_ddp):
        patch(Trainer)
        trainer = make_trainer(tmp_path / patch.__name__, model=make_model(drop_rate), train_batch_size=4, accumulate=2)
        trainer.train()
        trained.append(trainer)
    assert largest_difference(weights(trained[0]), weights(trained[1])) == 0
    assert losses(trained[0].events) == losses(trained[1].events)


def test_resumed_ranks_equal_uninterrupted_ones(ranks):
    """With dropout: each rank gets its own random state back. Bit for bit on two ranks; on more, DDP arranges its buckets
    anew after a run's first step, and with them the order of its sums"""
    for told in ranks.of("resumed"):
        assert largest_difference(told["whole"], told["half"]) <= (0 if ranks.world == 2 else 1e-6)
        assert told["rng_states"] == ranks.world


# ---- data


def epochs_of(told, ranks, share):
    "Windows read per epoch, over all ranks"
    size = 43 // 12 * share
    return [[row for t in told for row in t["seen"][e * size : (e + 1) * size]] for e in range(3)]


def test_t32_each_window_at_most_once_an_epoch(ranks):
    "T32, D26: less than a global batch is left out, others each time, as the first record says"
    epochs = epochs_of(ranks.of("epochs"), ranks, 12 // ranks.world)
    assert all(len(set(rows)) == len(rows) == 36 for rows in epochs)
    assert len({frozenset(range(43)) - frozenset(rows) for rows in epochs}) == 3
    start = ranks.told[0]["epochs"]["events"][0]
    assert start["event"] == "start" and start["dropped_per_epoch"] == 43 % 12
    assert len({told["steps"] for told in ranks.of("epochs")}) == 1


def test_p39_order_differs_by_epoch_and_agrees_on_rerun(ranks, alone):
    "P39, also between 1 and several processes: the first global batch holds the same windows"
    share = 12 // ranks.world
    epochs = epochs_of(ranks.of("epochs"), ranks, share)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [told["seen"][:share] for told in ranks.of("sgd")] == [told["seen"][:share] for told in ranks.of("epochs")]
    assert [row for told in ranks.of("sgd") for row in told["seen"][:share]] == alone["sgd"].train_set.seen[:12]


def test_p38_ranks_read_different_data_from_equal_weights(ranks):
    "P38, P34: no window on two ranks; weights drawn apart are rank 0's once set up"
    seen = [set(told["seen"]) for told in ranks.of("sgd")]
    assert sum(map(len, seen)) == len(set.union(*seen))
    first = ranks.of("first")
    assert largest_difference(first[0]["before"], first[1]["before"]) > 0
    for told in first:
        assert largest_difference(told["after"], first[0]["before"]) == 0


def test_p41_more_ranks_mean_fewer_steps_an_epoch(ranks, tmp_path):
    "P41: the same --train_batch_size on each process makes the global batch grow"
    share = 12 // ranks.world
    one = make_trainer(tmp_path, train_batch_size=share)
    one.setup()
    start = ranks.told[0]["sgd"]["events"][0]
    assert one.steps_per_epoch == 43 // share and start["steps_per_epoch"] == 43 // 12
    assert start["global_batch"] == 12 and start["world_size"] == ranks.world


def test_p45_evaluation_counts_every_window_once(ranks):
    "P45: 11 windows on 2 and 3 ranks, at each evaluation of the run"
    evaluations = len(losses(ranks.told[0]["sgd"]["events"], "eval_loss"))
    counted = Counter(row for told in ranks.of("sgd") for row in told["eval_seen"])
    assert counted == {row: evaluations for row in range(43, 54)}


def test_p45_fewer_evaluation_windows_than_ranks(ranks, tmp_path):
    "P45: one window, or none: some ranks have nothing to evaluate and still take part in the sum"
    one = make_trainer(tmp_path, train_batch_size=12, evaluation=1)
    one.train()
    assert losses(ranks.told[0]["one window"]["events"], "eval_loss") == pytest.approx(losses(one.events, "eval_loss"), abs=1e-5)
    assert set(losses(ranks.told[0]["no window"]["events"], "eval_loss")) == {None}


# ---- log, files, text


def test_p37_logged_loss_is_the_mean_over_ranks(ranks):
    "P37: sums and counts of each rank, over all steps between evaluations"
    sums = [[part for part in told["parts"] if isinstance(part[0], float)] for told in ranks.of("sgd")]
    first = [part[0] for part in sums]
    logged = losses(ranks.told[0]["sgd"]["events"])[0]
    assert logged == pytest.approx(sum(loss for loss, _ in first) / sum(count for _, count in first), abs=1e-9)
    assert all(logged != pytest.approx(loss / count, abs=1e-6) for loss, count in first)


def test_l08_one_rank_logs(ranks):
    "L08: events on rank 0 only; lines too"
    assert ranks.told[0]["sgd"]["events"] and not any(told["sgd"]["events"] for told in ranks.told[1:])
    lines = [[line for line in text.splitlines() if "train_loss" in line] for text in ranks.printed]
    assert len(lines[0]) == 3 == len(set(lines[0])) and not any(lines[1:])


def test_dropout_differs_per_rank(ranks):
    "Noise differs in training mode, nothing does in evaluation mode"
    assert len({told["noisy"] for told in ranks.of("dropout")}) == ranks.world
    assert len({told["quiet"] for told in ranks.of("dropout")}) == 1


def test_c10_files_hold_bare_names_and_load_in_one_process(ranks, tmp_path):
    "C10, C11: every file that a run of several ranks wrote"
    files = sorted(ranks.folder.rglob("*.pth"))
    assert len(files) > 5
    for path in files:
        state = torch.load(path, weights_only=True)
        make_model().load_state_dict(state["model_state"])
        assert not any(name.startswith("module.") for name in state["model_state"])
        assert len(state["rng_states"]) == state["world_size"] == ranks.world
    one = make_trainer(tmp_path, train_batch_size=12, resume=str(ranks.folder / "sgd" / "checkpoint-3.pth"))
    one.setup()
    assert largest_difference(weights(one), ranks.told[0]["sgd"]["weights"]) == 0


def test_p40_predict_works_under_the_wrapper(ranks):
    "P40: each rank, equal text"
    texts = [told["text"] for told in ranks.of("sgd")]
    assert len(texts[0][0]) == 6 and all(text == texts[0] for text in texts)


def test_p11_no_complex_buffer_is_managed_by_ddp(ranks):
    "P11: found by type, whatever its name"
    for told in ranks.of("first"):
        assert told["ignored"] and not told["managed_complex"]


def test_p11_complex_buffers_are_found_by_type():
    "P11: a renamed, nested buffer too"
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].register_buffer("turns", torch.ones(2, dtype=torch.complex64))
    model.register_buffer("table", torch.ones(2))
    trainer = SimpleNamespace(ddp=True, model=model, device=torch.device("cpu"))
    with mock.patch.object(ddp, "DistributedDataParallel") as wrapper:
        ddp.wrap_model(trainer)
    assert model._ddp_params_and_buffers_to_ignore == {"0.turns"} and wrapper.call_args.kwargs["device_ids"] is None


# ---- starts and ends


def test_p04_ranks_that_were_given_different_things_say_so(ranks):
    "P04: both numbers, the same line on all ranks, before the first step"
    said = ranks.of("refusals")
    assert all(other == said[0] for other in said)
    numbers = [43 - rank for rank in range(ranks.world)]
    assert "train_windows" in said[0]["windows"] and str(numbers) in said[0]["windows"]
    assert "--train_batch_size" in said[0]["batch"] and "[4, 5" in said[0]["batch"]
    assert "checkpoint-1.pth" in said[0]["checkpoint"]
    assert "chosen dtype" in said[0]["cards"] and "['float32', 'bfloat16'" in said[0]["cards"] and "--dtype" in said[0]["cards"]
    assert all("\n" not in line for line in said[0].values())


def test_t29_too_few_windows_name_the_numbers(ranks):
    "T29 on several ranks: never an epoch of no steps that succeeds"
    said = ranks.told[0]["refusals"]["too few"]
    assert "7 training windows" in said and f"{ranks.world} x --train_batch_size 4" in said


def test_p26_group_is_left(ranks):
    "P26: normal end, the trainer's own group; a group made by the program stays until the program leaves it"
    assert all(ranks.of("left own group"))


def test_p26_failing_rank_ends_the_job_with_its_own_error(launch):
    "P26: no wait for the time-out of 60 s; `launch` has compared the error"
    assert launch.ended - (launch.folder / "failed").stat().st_mtime < 30


def test_p26_no_warning_at_a_normal_end_or_after_an_error(launch):
    "P26: rank 2 ends normally, rank 1 by its own error, rank 0 by the loss of its peer"
    assert "Traceback" not in launch.logs[2] and "the third step is bad" in launch.logs[1]
    for log in launch.logs:
        assert "destroy_process_group" not in log and "Warning" not in log and "terminate" not in log


def launcher_env(rank=2, local_rank=0, world_size=4, local_world_size=2):
    values = (rank, local_rank, world_size, local_world_size, "127.0.0.1", 29500)
    return {name: str(value) for name, value in zip(LAUNCHER, values)}


def test_p30_plain_run_is_one_process(tmp_path):
    "P30: no variables, no group"
    ddp.patch_ddp(Trainer)
    trainer = make_trainer(tmp_path, train_batch_size=4, max_steps=1)
    trainer.train()
    assert (trainer.rank, trainer.world_size, trainer.ddp) == (0, 1, False)


def test_torchrun_with_one_process_equals_plain_python(tmp_path, monkeypatch):
    "A group of one, left at the end; an existing group is used and stays"
    plain = make_trainer(tmp_path / "plain", train_batch_size=4)
    plain.train()
    ddp.patch_ddp(Trainer)
    for name, value in zip(LAUNCHER, (0, 0, 1, 1, "127.0.0.1", *free_ports(1))):
        monkeypatch.setenv(name, str(value))
    alone = make_trainer(tmp_path / "alone", train_batch_size=4)
    alone.train()
    assert alone.ddp and largest_difference(weights(plain), weights(alone)) == 0 and not ddp.dist.is_initialized()
    monkeypatch.setenv("MASTER_PORT", str(*free_ports(1)))
    with process_group():
        for name in ("first", "second"):
            make_trainer(tmp_path / name, train_batch_size=4).train()
            assert ddp.dist.is_initialized()


def test_the_wrapper_is_gone_before_its_group(tmp_path, monkeypatch):
    "Whoever ends the group: gloo's threads may hang a process, or end it by a signal, where a wrapper outlives it"
    ddp.patch_ddp(Trainer)
    leave, wrap, wrappers, gone = ddp.dist.destroy_process_group, Trainer.wrap_model, [], []
    monkeypatch.setattr(Trainer, "wrap_model", lambda self: wrap(self) or wrappers.append(weakref.ref(self.model)))
    monkeypatch.setattr(ddp.dist, "destroy_process_group", lambda *group: gone.append(wrappers[-1]() is None) or leave(*group))
    for name, own_group in (("own", nullcontext), ("given", process_group)):
        for variable, value in zip(LAUNCHER, (0, 0, 1, 1, "127.0.0.1", *free_ports(1))):
            monkeypatch.setenv(variable, str(value))
        with own_group():
            make_trainer(tmp_path / name, train_batch_size=4, max_steps=2).train()
    assert gone == [True, True]


@pytest.mark.parametrize("given", [["RANK"], ["RANK", "WORLD_SIZE"], ["LOCAL_RANK"], list(LAUNCHER[:3]), ["RANK", "WORLD_SIZE", "MASTER_PORT"]])
def test_p30_partial_variables_name_the_missing_ones(given, tmp_path, monkeypatch):
    "P30: at once, not after a wait; the trainer leaves cleanly"
    env = {name: value for name, value in launcher_env().items() if name in given}
    with pytest.raises(ValueError) as error:
        ddp.place_from_env(env)
    needed = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    assert all(name in str(error.value) for name in needed - set(given)) and "torchrun" in str(error.value)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    ddp.patch_ddp(Trainer)
    with pytest.raises(ValueError, match="torchrun"):
        make_trainer(tmp_path, train_batch_size=4).train()


def test_p23_more_processes_than_gpus():
    "P23, P24: the visible cards of this machine are compared with its processes"
    with mock.patch("torch.cuda.device_count", return_value=1), pytest.raises(ValueError, match="4 processes, 1 visible GPU.*--nproc_per_node 1"):
        ddp.own_device(torch.device("cuda"), ddp.Place(0, 0, 4, 4))
    with mock.patch("torch.cuda.device_count", return_value=2), pytest.raises(ValueError, match="8 processes, 2 visible"):
        ddp.own_device(torch.device("cuda"), ddp.Place(9, 1, 16, 8))
    with mock.patch("torch.cuda.device_count", return_value=2):  # 4 processes on two nodes of 2 cards
        assert ddp.own_device(torch.device("cuda"), ddp.Place(3, 1, 4, 2)) == torch.device("cuda:1")


def test_p34_each_local_rank_has_its_own_card():
    "P34, P24: one numbered card can't serve two processes; one process may choose its card; the CPU and mps"
    with mock.patch("torch.cuda.device_count", return_value=4):
        devices = [ddp.own_device(torch.device("cuda"), ddp.Place(rank, rank % 4, 8, 4)) for rank in range(8)]
        assert [d.index for d in devices] == [0, 1, 2, 3, 0, 1, 2, 3]
        assert ddp.own_device(torch.device("cuda:3"), ddp.Place(0, 0, 1, 1)) == torch.device("cuda:3")
        with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES"):
            ddp.own_device(torch.device("cuda:0"), ddp.Place(0, 0, 2, 2))
    assert ddp.own_device(torch.device("cpu"), ddp.Place(1, 1, 2, 2)) == torch.device("cpu")
    with pytest.raises(ValueError, match="mps"):
        ddp.own_device(torch.device("mps"), ddp.Place(0, 0, 2, 2))


def test_p33_device_is_set_before_the_group_is_made(monkeypatch):
    "P33: the local rank's card, and the group is bound to it"
    for name, value in launcher_env(rank=3, local_rank=1).items():
        monkeypatch.setenv(name, value)
    order = mock.Mock()
    trainer = SimpleNamespace(device=torch.device("cuda"), choices=SimpleNamespace(backend="nccl"), args=SimpleNamespace(timeout=5))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", order.set_device)
    monkeypatch.setattr(ddp.dist, "init_process_group", order.init)
    ddp.init_distributed_mode(trainer)
    assert [call[0] for call in order.mock_calls] == ["set_device", "init"]
    order.set_device.assert_called_with(torch.device("cuda:1"))
    assert order.init.call_args.args == ("nccl",) and order.init.call_args.kwargs["device_id"] == torch.device("cuda:1")
    assert order.init.call_args.kwargs["timeout"].total_seconds() == 5


def test_t33_world_size_counts_not_local_world_size(tmp_path, monkeypatch):
    "T33: two nodes of two processes"
    for name, value in launcher_env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ddp.dist, "init_process_group", mock.Mock())
    trainer = make_trainer(tmp_path, train_batch_size=2, accumulate=3)
    ddp.init_distributed_mode(trainer)
    trainer.build_loaders(trainer.rank, trainer.world_size)
    assert trainer.facts()["global_batch"] == 4 * 2 * 3 and trainer.train_loader.batch_sampler.rank == 2


# ---- patching


def seams():
    return {name: getattr(Trainer, name) for name in STRATEGY_SEAMS}


def test_patching_twice_is_harmless_and_unpatch_restores():
    plain = seams()
    ddp.patch_ddp(Trainer)
    patched = seams()
    ddp.patch_ddp(Trainer)
    assert seams() == patched != plain
    unpatch(Trainer)
    assert seams() == plain


def test_strategies_exclude_one_another_in_any_order():
    def backward(self, loss):
        "Another strategy's"

    plain = seams()
    patch_strategy(Trainer, [backward])
    ddp.patch_ddp(Trainer)
    assert Trainer.backward is plain["backward"]
    patch_strategy(Trainer, [backward])
    assert seams() == plain | dict(backward=backward)


def test_only_seams_can_be_patched():
    def train(self):
        "The loop is nobody's to replace"

    with pytest.raises(ValueError, match="train is no seam"):
        patch_strategy(Trainer, [train])


def test_importing_patches_nothing(ranks):
    "Each rank compared the class before and after its import of the module"
    assert not any(ranks.of("patched by import"))


def test_the_cpu_talks_through_gloo():
    assert choose(device="cpu").backend == "gloo"
    assert choose(device="cpu", backend="gloo").backend == "gloo"
