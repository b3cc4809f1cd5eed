"""Chapter 04's Trainer in one process: schedule, step, precision, evaluation, log, checkpoints, choices."""
import math
from unittest import mock

import pytest
import torch
from torch import nn

import minigpt.pretrainer_single as single
from minigpt.pretrainer_single import BatchOrder, PlainCheckpoints, TrainArgs, build_optimizer, choose, choose_dtype, lr_at, rng_state, set_rng_state, token_loss
from trainer_job import CONTEXT, VOCAB, Windows, adamw, losses, make_model, make_trainer, trained, weights


pytestmark = pytest.mark.usefixtures("one_plain_process")


def equal_weights(one, other, **tolerance):
    torch.testing.assert_close(weights(one), weights(other), **tolerance or dict(rtol=0, atol=0))


# ---- learning rate


def test_t01_first_step_trains_and_the_log_says_at_which_rate(tmp_path):
    "T01: neither zero nor full rate; weights change; the log prints the rate used"
    trainer = make_trainer(tmp_path, train_batch_size=4, warmup_steps=10, max_steps=20)
    used, plain, before = [], trainer.optimizer_step, weights(trainer)

    def optimizer_step():
        used.append(trainer.optimizer.param_groups[0]["lr"])
        plain()
        if len(used) == 1:
            assert any(not torch.equal(before[name], value) for name, value in weights(trainer).items())

    trainer.optimizer_step = optimizer_step
    trainer.train()
    assert 0 < used[0] < 0.3 and used[0] == lr_at(0, 20, 10, 0.3, 0.03)
    assert losses(trainer.events, "lr") == used


@pytest.mark.parametrize("warmup", [1, 7, 20, 21, 50])
def test_t03_warmup_as_long_as_the_run(warmup):
    "T03: no division by zero, always between floor and peak"
    rates = [lr_at(step, 20, warmup, 1e-3, 1e-4) for step in range(24)]
    assert all(1e-4 <= rate <= 1e-3 for rate in rates) and rates[0] < 1e-3


def test_t05_no_warmup_starts_at_the_peak():
    "T05"
    assert lr_at(0, 20, 0, 1e-3, 1e-4) == 1e-3


def test_schedule_is_right_at_its_corners():
    assert lr_at(9, 100, 10, 1e-3) < lr_at(10, 100, 10, 1e-3) == 1e-3
    assert lr_at(100, 100, 10, 1e-3, 1e-4) == pytest.approx(1e-4) == lr_at(150, 100, 10, 1e-3, 1e-4)
    falling = [lr_at(step, 100, 10, 1e-3, 1e-4) for step in range(10, 101)]
    assert falling == sorted(falling, reverse=True)


# ---- one step


def test_t13_clips_after_unscaling(tmp_path):
    "T13: with the loss scaled by 65536 the norms and the weights are those of a run without a scaler"
    plain = trained(tmp_path / "plain", train_batch_size=4, clip=0.05)
    scaled = make_trainer(tmp_path / "scaled", train_batch_size=4, clip=0.05)
    scaled.set_grad_scaler(True)
    scaled.train()
    assert scaled.scaler.is_enabled() and min(losses(plain.events, "grad_norm")) > 0.05
    assert losses(scaled.events, "grad_norm") == pytest.approx(losses(plain.events, "grad_norm"), rel=1e-5)
    equal_weights(plain, scaled, rtol=1e-5, atol=1e-6)


def test_t14_unscales_once_an_update(tmp_path):
    "T14: accumulation 4, and the order unscale, clip, step, update"
    trainer = make_trainer(tmp_path, train_batch_size=2, accumulate=4, max_steps=3)
    trainer.set_grad_scaler(True)
    calls = mock.Mock()
    for name in ("unscale_", "step", "update"):
        calls.attach_mock(mock.Mock(side_effect=getattr(trainer.scaler, name)), name)
        setattr(trainer.scaler, name, getattr(calls, name))
    clip = torch.nn.utils.clip_grad_norm_
    with mock.patch("torch.nn.utils.clip_grad_norm_", side_effect=clip) as clipped:
        calls.attach_mock(clipped, "clip")
        trainer.train()
    assert [call[0] for call in calls.mock_calls] == ["unscale_", "clip", "step", "update"] * 3


def test_overflow_under_a_scaler_skips_that_update(tmp_path):
    trainer = make_trainer(tmp_path, train_batch_size=4, max_steps=2)
    trainer.set_grad_scaler(True)
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)  # the scaled loss overflows at once
    before = weights(trainer)
    trainer.train()
    assert all(torch.equal(before[name], value) for name, value in weights(trainer).items())
    assert trainer.step == 2 and trainer.scaler.get_scale() < 2.0**127


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_t19_logged_loss_does_not_depend_on_accumulation(accumulate, tmp_path):
    "T19, T28: the first loss is ln V, whatever the number of micro-batches; losses and weights equal the big batch's"
    trainer = trained(tmp_path / "parts", train_batch_size=12 // accumulate, accumulate=accumulate)
    whole = trained(tmp_path / "whole", train_batch_size=12)
    assert losses(trainer.events)[0] == pytest.approx(math.log(VOCAB), abs=0.2)
    assert losses(trainer.events)[:3] == pytest.approx(losses(whole.events)[:3], abs=1e-5)


def test_t16_last_group_is_averaged_over_what_it_holds(tmp_path):
    "T16: 10 micro-batches in groups of 4 make a last update of 2, equal to one batch of these windows"
    parts = trained(tmp_path / "parts", train=40, train_batch_size=4, accumulate=4)
    assert parts.step == parts.steps_per_epoch == 3 and parts.samples_seen == 40
    by_hand = make_trainer(tmp_path / "hand", train=40, train_batch_size=4, accumulate=4)
    by_hand.setup()
    order = torch.tensor(sum(BatchOrder(40, 4, by_hand.seed), []))
    for step, rows in enumerate(order.split(16)):
        by_hand.step = step
        by_hand.adjust_lr()
        by_hand.train_step([by_hand.train_set[rows]])
    equal_weights(parts, by_hand, rtol=1e-5, atol=1e-6)


def test_t17_mean_is_over_tokens_not_over_micro_batches(tmp_path):
    "T17: one micro-batch with 1 token that counts, one with 8"
    x, y = torch.arange(2 * CONTEXT).view(2, -1), torch.arange(1, 2 * CONTEXT + 1).view(2, -1)
    y[0, 1:] = -100
    trainers = [make_trainer(tmp_path, train_batch_size=1, warmup_steps=0) for _ in range(2)]
    for trainer, group in zip(trainers, ([(x, y)], [(x[:1], y[:1]), (x[1:], y[1:])])):
        trainer.setup()
        trainer.train_step(group)
    equal_weights(*trainers, rtol=1e-5, atol=1e-6)
    assert trainers[0].loss_acc.tolist() == pytest.approx(trainers[1].loss_acc.tolist(), rel=1e-6)
    assert trainers[1].loss_acc[1] == 1 + CONTEXT


@pytest.mark.parametrize("scaler", [False, True])
def test_x02_clips_on_every_path(scaler, tmp_path):
    "X02: with and without a scaler the update is no longer than rate x clip; the norm in the log is the one before clipping"
    trainer = make_trainer(tmp_path, train_batch_size=4, max_steps=1, warmup_steps=0, clip=0.01)
    trainer.set_grad_scaler(scaler)
    before = weights(trainer)
    trainer.train()
    moved = math.sqrt(sum((before[name] - value).square().sum().item() for name, value in trainer.model.named_parameters()))
    assert moved == pytest.approx(0.3 * 0.01, rel=1e-3)
    assert losses(trainer.events, "grad_norm")[0] > 0.1


def test_clip_0_does_not_clip(tmp_path):
    equal_weights(trained(tmp_path / "off", train_batch_size=4, clip=0), trained(tmp_path / "high", train_batch_size=4, clip=1e9))


def test_decay_is_on_matrices_only():
    "Norms and biases do not decay; every parameter is in one group"
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Embedding(4, 3))
    optimizer = build_optimizer(model, 1e-3, 0.1)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        "0.weight": 0.1, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0, "2.weight": 0.1}  # fmt: skip
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 5


def test_decay_leaves_frozen_parameters_alone():
    model = nn.Linear(3, 3)
    model.weight.requires_grad_(False)
    assert [len(group["params"]) for group in build_optimizer(model, 1e-3, 0.1).param_groups] == [1]


def test_t07_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    "T07: at once, before the weights are touched, naming step and last checkpoint"
    trainer = make_trainer(tmp_path, train_batch_size=4, save_steps=2, max_steps=8)
    plain = trainer.backward
    trainer.backward = lambda loss: plain(loss * (math.inf if trainer.step == 4 else 1))
    with pytest.raises(FloatingPointError, match="step 5: gradient norm is .*checkpoint-4.pth"):
        trainer.train()
    assert all(value.isfinite().all() for value in weights(trainer).values())
    rest = make_trainer(tmp_path, train_batch_size=4, max_steps=8, resume=str(tmp_path / "checkpoint-4.pth"))
    rest.backward = lambda loss: (loss * math.inf).backward()
    with pytest.raises(FloatingPointError, match="step 5: .*checkpoint-4.pth"):  # where it came from, before its own first save
        rest.train()


def test_t07_skipping_for_ever_is_no_training(tmp_path):
    "T07: `--on_nan skip` is for accidents; twenty in a row end the run"
    trainer = make_trainer(tmp_path, train_batch_size=4, max_steps=60, num_train_epochs=0, on_nan="skip")
    plain = trainer.backward
    trainer.backward = lambda loss: plain(loss * (1 if trainer.step in (3, 10) else math.inf))
    with pytest.raises(FloatingPointError, match="step 31: 20 updates in a row"):
        trainer.train()
    assert trainer.skipped_steps == 29


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
@pytest.mark.parametrize("bad, ends", [(range(20), False), (range(19), True), ([*range(15), *range(16, 30)], True), (range(3, 30), False)])
def test_t07_a_scaler_does_not_skip_for_ever(bad, ends, on_nan, tmp_path):
    "T07: it leaves an update out and halves its scale, which is how a run starts; twenty in a row, down to a sixteenth, end it"
    trainer = make_trainer(tmp_path, train_batch_size=4, max_steps=32, num_train_epochs=0, on_nan=on_nan)
    trainer.set_grad_scaler(True)
    plain = trainer.backward
    trainer.backward = lambda loss: plain(loss * (math.nan if trainer.step in bad else 1))
    if ends:
        trainer.train()
        assert trainer.step == 32 and trainer.skipped_steps == len(bad)
        assert torch.load(tmp_path / "checkpoint-32.pth")["skipped_steps"] == len(bad)
    else:
        with pytest.raises(FloatingPointError, match=f"step {bad[0] + 20}: 20 updates in a row .*float16") as error:
            trainer.train()
        assert "\n" not in str(error.value) and trainer.skipped_steps == 20 and trainer.scaler.get_scale() == 2.0**-4
    assert all(value.isfinite().all() for value in weights(trainer).values())


def test_who_is_asked_to_end_does_not_evaluate_first(tmp_path):
    "a scheduler gives seconds, an evaluation may take minutes"
    trainer = make_trainer(tmp_path, train_batch_size=4, eval_steps=1, save_steps=0)
    plain = trainer.backward
    trainer.backward = lambda loss: (plain(loss), trainer.stop() if trainer.step == 2 else None)
    trainer.train()
    assert [event["step"] for event in trainer.events if event["event"] == "eval"] == [1, 2, 3] and trainer.step == 4
    assert trainer.events[-1]["event"] == "end" and (tmp_path / "checkpoint-4.pth").exists()


def test_a_new_trainer_draws_no_random_number_and_sets_no_seed(tmp_path):
    model = make_model()
    before = torch.get_rng_state()
    make_trainer(tmp_path, model=model)
    assert torch.equal(before, torch.get_rng_state())


# ---- evaluation


def test_t20_no_dropout_in_evaluation(tmp_path):
    "T20, T31: the same weights, the same windows, the same loss; equal to a model without dropout"
    noisy = make_trainer(tmp_path, model=make_model(drop_rate=0.5), train_batch_size=4)
    quiet = make_trainer(tmp_path, train_batch_size=4)
    for trainer in (noisy, quiet):
        trainer.setup()
    assert noisy.evaluate() == noisy.evaluate() == noisy.evaluate() == quiet.evaluate()


def test_evaluation_is_the_mean_over_all_windows(tmp_path):
    "11 windows in batches of 4: the short last batch counts for what it holds"
    trainer = make_trainer(tmp_path, train_batch_size=4)
    trainer.setup()
    loss, count = token_loss(trainer.model(trainer.eval_set.x), trainer.eval_set.y)
    assert trainer.evaluate() == pytest.approx((loss / count).item(), abs=1e-6)
    assert sorted(trainer.eval_set.seen) == list(range(43, 54))


def test_t21_mode_is_restored(tmp_path):
    "T21: training after an evaluation in training mode, evaluation mode kept, also when evaluation raises"
    trainer = make_trainer(tmp_path, train_batch_size=4)
    trainer.setup()
    for mode in (True, False):
        trainer.model.train(mode)
        trainer.evaluate()
        assert trainer.model.training is mode
    trainer.model.train()
    with mock.patch.object(single, "token_loss", side_effect=RuntimeError), pytest.raises(RuntimeError):
        trainer.evaluate()
    assert trainer.model.training


def test_evaluation_changes_nothing_in_training(tmp_path):
    "Weights with many evaluations equal those with none, with dropout"
    often = trained(tmp_path / "often", model=make_model(drop_rate=0.3), train_batch_size=4, eval_steps=1)
    never = trained(tmp_path / "never", model=make_model(drop_rate=0.3), train_batch_size=4, evaluation=0)
    equal_weights(often, never)
    assert losses(often.events) == losses(never.events) and set(losses(never.events, "eval_loss")) == {None}


def test_evaluation_makes_no_more_logits_than_training(tmp_path):
    "with --loss_rows 5 an evaluation holds five rows of logits at a time, and finds the same loss"
    whole, sliced = (make_trainer(tmp_path, train_batch_size=4, loss_rows=rows) for rows in (0, 5))
    shapes, plain = {}, single.token_loss
    for trainer in (whole, sliced):
        trainer.setup()
        with mock.patch.object(single, "token_loss", lambda logits, y: shapes.setdefault(trainer, []).append(tuple(logits.shape)) or plain(logits, y)):
            trainer.loss = trainer.evaluate()
    assert set(shapes[whole]) == {(4, CONTEXT, VOCAB), (3, CONTEXT, VOCAB)} and max(shapes[sliced]) == (5, VOCAB)
    assert sliced.loss == pytest.approx(whole.loss, rel=1e-6)


# ---- log and saves


def test_x11_evaluation_and_saving_fire_on_the_same_steps(tmp_path):
    "X11: 5, 10, and at the end"
    trainer = trained(tmp_path, train_batch_size=4, max_steps=12, eval_steps=5, save_steps=5)
    steps = {kind: [event["step"] for event in trainer.events if event["event"] == kind] for kind in ("eval", "save")}
    assert steps == dict(eval=[5, 10, 12], save=[5, 10, 12])


def test_x05_mean_is_over_the_steps_seen(tmp_path):
    "X05, L10: windows of 4 steps, resumed in the middle of one; each record is the mean of its steps"
    single_steps = losses(trained(tmp_path / "ones", train_batch_size=4, max_steps=10).events)
    options = dict(train_batch_size=4, max_steps=10, log_every=4, eval_steps=0, save_steps=6)
    whole = trained(tmp_path / "whole", **options)
    wanted = [sum(steps) / len(steps) for steps in (single_steps[:4], single_steps[4:8], single_steps[8:])]
    assert losses(whole.events) == pytest.approx(wanted, abs=1e-6)
    rest = trained(tmp_path / "rest", **options | dict(resume=str(tmp_path / "whole" / "checkpoint-6.pth")))
    assert losses(rest.events) == pytest.approx(wanted[1:], abs=1e-6)
    assert [event["step"] for event in rest.events if "train_loss" in event] == [8, 10]


def test_constant_loss_is_logged_as_it_is(tmp_path):
    "X05: also in the first record"
    trainer = make_trainer(tmp_path, train_batch_size=4, log_every=5, max_steps=10, eval_steps=0)
    with mock.patch.object(single, "token_loss", lambda logits, y: (logits.sum() * 0 + y.numel(), torch.tensor(y.numel()))):
        trainer.train()
    assert losses(trainer.events) == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("saved", [4, 5])
def test_resumed_run_equals_an_unbroken_one(saved, tmp_path):
    "Bit for bit, with dropout, AdamW and accumulation, from within an epoch and from its end"
    options = dict(optimizer=adamw, train_batch_size=4, accumulate=2, max_steps=9, save_steps=saved)
    whole = trained(tmp_path / "whole", model=make_model(0.3), **options)
    rest = trained(tmp_path / "rest", model=make_model(0.3, seed=8), **options | dict(resume=str(tmp_path / "whole" / f"checkpoint-{saved}.pth")))
    equal_weights(whole, rest)
    assert (rest.epoch, rest.samples_seen, rest.tokens_seen) == (whole.epoch, whole.samples_seen, whole.tokens_seen)
    assert losses(rest.events) == losses(whole.events)[saved:]


def test_c13_an_apple_gpus_random_state_is_kept_too(monkeypatch):
    "C13: dropout on mps draws from a generator of its own; a state of CUDA's or none is left alone"
    drawn, apple = torch.arange(44, dtype=torch.uint8), torch.device("mps")
    put = mock.Mock()
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: drawn)
    monkeypatch.setattr(torch.mps, "set_rng_state", put)
    state = rng_state(apple)
    set_rng_state(state, torch.device("cpu"))
    set_rng_state(rng_state(torch.device("cpu")) | dict(device=torch.zeros(16, dtype=torch.uint8)), apple)
    put.assert_not_called()
    set_rng_state(state, apple)
    assert torch.equal(put.call_args.args[0], drawn) and state["device"] is None


# ---- data


@pytest.mark.parametrize("train, batch", [(5, 8), (1, 2), (0, 1)])
def test_t29_fewer_windows_than_a_batch(train, batch, tmp_path):
    "T29: both numbers, before the first step"
    with pytest.raises(ValueError, match=f"{train} training windows.*--train_batch_size {batch}"):
        make_trainer(tmp_path, train=train, train_batch_size=batch).train()


def test_each_window_once_an_epoch_and_the_rest_another_time(tmp_path):
    trainer = trained(tmp_path, train_batch_size=4, num_train_epochs=3)
    epochs = [trainer.train_set.seen[40 * e : 40 * (e + 1)] for e in range(3)]
    assert all(len(set(rows)) == 40 for rows in epochs) and len({frozenset(rows) for rows in epochs}) == 3


@pytest.mark.parametrize("accumulate", [1, 3])
def test_t25_any_accumulation_works(accumulate, tmp_path):
    "T25: it counts per process, so it need not divide by the number of ranks"
    trainer = trained(tmp_path, train_batch_size=4, accumulate=accumulate)
    assert trainer.step == math.ceil(10 / accumulate)


def test_any_model_and_any_dataset_of_pairs(tmp_path):
    "The trainer knows neither class: a list of pairs, a bare module"
    pairs = [(row[:-1], row[1:]) for row in torch.arange(60).view(6, 10)]
    model = nn.Sequential(nn.Embedding(60, 8), nn.Linear(8, 60))
    trainer = make_trainer(tmp_path, model=model, train_batch_size=2)
    trainer.set_dataset(pairs, pairs[:1])
    trainer.train()
    assert trainer.step == 3 and losses(trainer.events, "eval_loss")[-1] > 0


def test_t28_first_loss_is_ln_vocabulary():
    "T28: two seeds"
    data = Windows(range(16))
    for seed in (1, 2):
        loss, count = token_loss(make_model(seed=seed)(data.x), data.y)
        assert (loss / count).item() == pytest.approx(math.log(VOCAB), abs=0.2)


# ---- device, number type, scaler


def cuda(monkeypatch, bf16):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16)


@pytest.mark.parametrize(
    "device, mixed, bf16, wanted",
    [
        ("cpu", None, False, ("float32", "gloo", False)),
        ("cpu", True, False, ("bfloat16", "gloo", False)),
        ("mps", None, False, ("float32", "gloo", False)),
        ("mps", True, False, ("float16", "gloo", True)),
        ("cuda", None, True, ("bfloat16", "nccl", False)),
        ("cuda:1", None, True, ("bfloat16", "nccl", False)),
        ("cuda", None, False, ("float16", "nccl", True)),
        ("cuda", False, True, ("float32", "nccl", False)),
    ],
)
def test_t11_one_table_decides(device, mixed, bf16, wanted, monkeypatch):
    "T11: number type, back end and scaler by device; mps is neither a CPU nor CUDA"
    cuda(monkeypatch, bf16)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    choices = choose(device, use_mixed_precision=mixed)
    assert (choices.dtype, choices.backend, choices.scaler) == wanted and choices.device == device


@pytest.mark.parametrize("device", ["cuda:2", "cuda:7", "cuda:" + "9" * 5000])
def test_t11_a_gpu_that_is_not_there_is_refused_by_its_number(device, monkeypatch):
    "T11: before anything is set up; two cards are cuda:0 and cuda:1"
    cuda(monkeypatch, bf16=True)
    with pytest.raises(ValueError, match=f"--device {device}: 2 visible GPU.*from cuda:0"):
        choose(device)
    assert choose("cuda:1").device == "cuda:1"


@pytest.mark.parametrize("device", ["xpu", "gpu", "cpux", ""])
def test_t11_unknown_devices_are_refused(device):
    "T11"
    with pytest.raises(ValueError, match="--device.*auto, cpu, mps, cuda"):
        choose(device)


def test_t09_bfloat16_on_a_card_without_it(monkeypatch):
    "T09: auto falls back to float16, asking for it names what the card accepts"
    cuda(monkeypatch, bf16=False)
    assert choose_dtype("cuda") == "float16"
    with pytest.raises(ValueError, match="--dtype bfloat16.*float32, float16"):
        choose("cuda", "bfloat16")


def test_contradicting_options_are_refused():
    with pytest.raises(ValueError, match="contradicts"):
        choose("cpu", "float32", use_mixed_precision=True)
    with pytest.raises(ValueError, match="--dtype float16"):
        choose("cpu", "float16")


def test_t10_no_cuda_call_on_the_cpu_path(tmp_path, monkeypatch):
    "T10: a box without a driver trains"
    for name in ("is_available", "device_count", "current_device", "get_rng_state", "is_bf16_supported", "max_memory_allocated", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, mock.Mock(side_effect=AssertionError(f"torch.cuda.{name} was called")))
    assert trained(tmp_path, train_batch_size=4, max_steps=2).step == 2


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda.*--device cpu"):
        choose("cuda")


def test_auto_takes_no_mps_for_several_processes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose().device == "mps"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert choose().device == "cpu"


def test_autocast_takes_bfloat16(tmp_path):
    "On the CPU too; weights and gradients stay in 32 bits, and the loss follows that of 32 bits"
    plain = trained(tmp_path / "fp32", train_batch_size=4)
    half = make_trainer(tmp_path / "bf16", train_batch_size=4, dtype="bfloat16")
    dtypes = set()
    half.model.head.register_forward_hook(lambda module, args, out: dtypes.add(out.dtype))
    half.train()
    assert dtypes == {torch.bfloat16} and {value.dtype for value in half.model.parameters()} == {torch.float32}
    assert losses(half.events) == pytest.approx(losses(plain.events), abs=0.05)


@pytest.mark.parametrize(
    "wrong",
    [dict(train_batch_size=0), dict(accumulate=-1), dict(warmup_steps=-5), dict(clip=-1.0), dict(learning_rate=0.0),
     dict(min_lr=1.0), dict(train_ratio=0.0), dict(train_ratio=1.5), dict(max_steps=-1)],
)  # fmt: skip
def test_wrong_arguments_are_named(wrong):
    "One line with option and value"
    (name, value), = wrong.items()
    with pytest.raises(ValueError, match=f"--{name} {value}"):
        TrainArgs(**wrong)


def test_predict_keeps_mode_and_device(tmp_path):
    trainer = make_trainer(tmp_path, train_batch_size=4)
    trainer.model.train()
    text = trainer.predict(torch.tensor([[1, 6]]), 4, temperature=0)
    assert text.shape == (1, 6) and trainer.model.training


def test_order_is_a_function_of_seed_epoch_and_position():
    whole = [BatchOrder(43, 6, seed) for seed in (1, 1, 2)]
    assert list(whole[0]) == list(whole[1]) != list(whole[2])
    whole[1].start = 18  # windows, whatever the batch
    assert list(whole[1]) == list(whole[0])[3:]
    parts = [BatchOrder(43, 2, 1, rank, 3) for rank in range(3)]
    assert [sum(batches, []) for batches in zip(*parts)] == list(whole[0])


# ---- a checkpoint that must not be gone on from


@pytest.mark.parametrize("changed", [dict(seed=7), dict(train_ratio=0.5)])
def test_another_split_is_not_the_same_run(tmp_path, changed):
    "another seed or ratio would evaluate on windows that were trained on"
    trained(tmp_path, train_batch_size=4, max_steps=2)
    with pytest.raises(ValueError, match=next(iter(changed))):
        trained(tmp_path, train_batch_size=4, max_steps=4, resume="auto", **changed)


@pytest.mark.parametrize("option", ["resume", "init_from"])
@pytest.mark.parametrize("kept", [{7: torch.zeros(2)}, {"model_state": None}, {"model_state": {}}, {"model_state": {0: torch.zeros(2)}}, torch.zeros(3), [1]],
                         ids=["whole numbers", "None", "no weights", "numbers within", "a tensor", "a list"])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_c24_files_of_another_kind_are_refused_in_one_line(kept, option, tmp_path):
    "C24: by chapter 04's keeper and by chapter 06's; bare weights fit --init_from alone"
    path = tmp_path / "weights-only.pth"
    torch.save(kept, path)
    for keeper in (PlainCheckpoints(tmp_path), None):
        trainer = make_trainer(tmp_path / "run", train_batch_size=4, **{option: str(path)})
        trainer.checkpointer = keeper or trainer.checkpointer
        with pytest.raises(ValueError, match="weights-only.pth") as error:
            trainer.train()
        assert "\n" not in str(error.value) and not trainer.events


def test_c24_weights_alone_are_no_checkpoint(tmp_path):
    "C24: what is missing is named"
    torch.save({"model_state": make_model().state_dict()}, tmp_path / "weights-only.pth")
    trainer = make_trainer(tmp_path / "run", train_batch_size=4, resume=str(tmp_path / "weights-only.pth"))
    trainer.checkpointer = PlainCheckpoints(tmp_path)
    with pytest.raises(ValueError, match="weights-only.pth: does not fit this run: lacks 'choices'"):
        trainer.train()


@pytest.mark.parametrize("wrong", [dict(device="mps"), dict(device="cpu:x"), dict(device="tpu")])
def test_t11_devices_that_are_not_there(wrong):
    with mock.patch.object(torch.backends.mps, "is_available", return_value=False), pytest.raises(ValueError, match="--device"):
        choose(**wrong)


@pytest.mark.parametrize("wrong", [dict(backend="mpi"), dict(timeout=1e300), dict(timeout=1e-9), dict(accumulate=10**30), dict(seed=-1)])
def test_arguments_out_of_range(wrong):
    with pytest.raises(ValueError, match="--" + next(iter(wrong))):
        TrainArgs(**wrong)
