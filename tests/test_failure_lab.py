"""Chapter 12: the cases of the failure lab, by two launches at once, and the self-test of a machine under friendly and hostile conditions."""
import ast
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest

import minigpt.failure_lab as lab
import minigpt.pretrainer as pretrainer
from minigpt.collectives import RANK_VARIABLES, launch_env
from minigpt.pretrain_dataset import PretrainBinaryDataset, prepare_files

posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
pytestmark = posix

WAITING = ["gather_on_main", "barrier_on_main", "evaluate_with_grad", "uneven", "shapes", "late", "recorded"]
OTHERS = [name for name in lab.CASES if name not in WAITING and name != "endless"]  # evaluate_long among them waits, too


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def seen():
    "Every case but the endless one, in two launches at once: while one waits for time-outs the other computes"
    found = {}
    launches = [threading.Thread(target=lambda names=names: found.update(lab.run_cases(*names, timeout=3, limit=20))) for names in (WAITING, OTHERS)]
    for launch in launches:
        launch.start()
    for launch in launches:
        launch.join()
    return found


def ended(outcomes):
    return [outcome.ended for outcome in outcomes]


def values(outcomes):
    assert ended(outcomes) == ["returned"] * len(outcomes), [lab.said(outcome) for outcome in outcomes]
    return [outcome.value for outcome in outcomes]


def gave_up(outcomes):
    "All raised, one by its time-out; it closes its connections, so the other may report that"
    return ended(outcomes) == ["raised"] * len(outcomes) and any(map(lab.timed_out, outcomes))


# ---- somebody waits


def test_p01_evaluation_on_rank_0_hangs_through_the_wrapper_and_passes_through_the_module(seen):
    "P01: and all ways that pass train the same"
    assert gave_up(seen["evaluate_with_grad"])
    assert "ended by SIGABRT" in ended(seen["evaluate_no_grad_after_1"])
    right = [values(seen[f"evaluate_{way}"]) for way in ("inner", "everybody", "not_synced", "no_grad")]
    assert all(way == right[0] for way in right) and right[0][0] == right[0][1]


def test_p04_uneven_batches_wait_for_ever_join_and_equal_counts_do_not(seen):
    "P04"
    assert gave_up(seen["uneven"])
    for case, batches in (("uneven_join", [3, 2]), ("uneven_equal", [2, 2])):
        found = values(seen[case])
        assert [value["batches"] for value in found] == batches and found[0]["weights"] == found[1]["weights"]


def test_p44_a_gather_or_barrier_on_rank_0_only_hangs(seen):
    "P44: and the lab survives it"
    assert gave_up(seen["gather_on_main"]) and gave_up(seen["barrier_on_main"])


def test_a_barrier_cures_an_early_read_but_no_long_evaluation(seen):
    assert seen["read_early"][1].error.startswith("FileNotFoundError")
    assert values(seen["read_after_barrier"]) == ["wrote it", "read weights"]
    assert ended(seen["evaluate_long"]) == ["raised"] * 2 and values(seen["evaluate_shared"]) == [1.5, 1.5]


# ---- nobody complains


def test_crossed_sums_are_wrong_without_an_error_and_the_guard_names_both_calls(seen):
    assert values(seen["two_sums"]) == [dict(loss=101.0, count=102.0), dict(count=101.0, loss=102.0)]
    assert all("by rank: ['loss (1,)', 'count (1,)']" in outcome.error for outcome in seen["two_sums_guarded"])


def test_p36_the_sync_flag_counts_at_the_forward_pass(seen):
    "P36"
    assert values(seen["flag_after"]) == [2.5, 3.5] and values(seen["flag_before"]) == [3.0, 3.0]


def test_p37_rank_0s_loss_is_not_the_mean(seen):
    "P37"
    assert values(seen["own_loss"]) == [2.0, 6.0] and values(seen["mean_loss"]) == [4.0, 4.0]


def test_p38_one_seed_for_all_drops_the_same_units(seen):
    "P38: seed + rank does not"
    same, own = values(seen["dropout_same"]), values(seen["dropout_own"])
    assert same[0] == same[1] and own[0] != own[1]


def test_p39_without_set_epoch_each_epoch_has_the_first_ones_order(seen):
    "P39: told, the epochs differ, and each row is read once"
    assert all(first == second for first, second in values(seen["epochs_untold"]))
    told = values(seen["epochs_told"])
    assert all(first != second for first, second in told)
    assert all(sorted(one + other) == list(range(12)) for one, other in zip(*told))


def test_a_split_per_rank_trains_on_what_another_rank_evaluates_on(seen):
    def leaked(case):
        one, other = values(seen[case])
        return set(one["held"]) & set(other["train"])

    assert leaked("split_each") and not leaked("split_seeded")
    one, other = values(seen["shard_by_local_rank"])
    assert one == other and sorted(sum(values(seen["shard_by_rank"]), [])) == list(range(40))


# ---- somebody complains


def test_p47_an_unused_parameter_is_told_in_the_second_step_and_found_by_its_gradient(seen):
    "P47"
    for outcome in seen["unused"]:
        assert "Expected to have finished reduction" in outcome.error and [label for _, label in outcome.marks].count("forward") == 2
    assert values(seen["unused_found"]) == [["spare.weight", "spare.bias"]] * 2


def test_r01_only_reentrant_recomputation_with_unused_search_is_ready_twice(seen):
    "R01: four ways, one fails"
    assert all("ready only once" in outcome.error for outcome in seen["reentrant_find"])
    assert all(values(seen[case]) == [[], []] for case in ("reentrant", "recompute", "recompute_find"))


def test_two_shapes_end_the_process_and_the_guard_names_them(seen):
    assert "ended by SIGABRT" in ended(seen["shapes"]) and "returned" not in ended(seen["shapes"])
    assert all("(4,)" in outcome.error and "(5,)" in outcome.error for outcome in seen["shapes_guarded"])


def test_c10_keys_with_module_load_nothing_when_made_quiet(seen):
    "C10"
    for value in values(seen["prefixed"]):
        assert "module.0.weight" in value["told"] and value["loaded_nothing"] and value["right"]


def test_p06_a_dead_rank_is_noticed_before_the_time_out_and_a_raising_one_has_the_root_error(seen):
    "P06"
    survivor, victim = seen["killed"]
    assert victim.ended == "ended by SIGKILL" and "Connection" in survivor.error and not lab.timed_out(survivor)
    assert seen["raises"][1].error == "ValueError: bad batch: label 7 of 4 classes" and "Connection" in seen["raises"][0].error


# ---- finding out


def test_monitored_barrier_names_the_late_rank_and_the_recorder_the_call(seen):
    assert "Ranks 1 failed to pass monitoredBarrier" in seen["late"][0].error
    assert [value[-1] for value in values(seen["recorded"])] == ["gloo:all_reduce", "gloo:broadcast"]


def test_the_command_line_runs_cases_and_one_that_never_ends_is_stopped_and_says_where_it_stood():
    command = [sys.executable, "-m", "minigpt.failure_lab", "run", "endless", "two_sums", "--limit", "4"]
    done = subprocess.run(command, env=launch_env(2), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert told[:2] == [["endless", "rank 0: stopped in wait_for_message"], ["endless", "rank 1: stopped in read_slowly"]]
    assert told[2] == ["two_sums", "rank 0: returned {'loss': 101.0, 'count': 102.0}"]


def test_an_unknown_case_is_one_line_and_exit_code_2(capsys):
    with pytest.raises(ValueError, match="no case typo; there are: killed, "):
        lab.run_cases("typo")
    with pytest.raises(SystemExit) as end:
        lab.main(["run", "typo"])
    assert end.value.code == 2 and capsys.readouterr().err.splitlines()[-1].startswith("minigpt.failure_lab: error: no case typo")


# ---- check


def self_test(*prefix, **env):
    "`check` in a process; its lines and exit code"
    command = [*prefix, sys.executable, "-m", "minigpt.failure_lab", "check"]
    done = subprocess.run(command, env=launch_env(2, env), capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done.stdout.splitlines(), done.returncode


def test_p35_the_self_test_sums_right_and_reports_bandwidth_and_switches():
    "P35; and half a launch left in the environment costs one line"
    lines, code = self_test(RANK="0")
    assert code == 1 and [line for line in lines if line.startswith("warn")] == [line for line in lines if line.startswith("warn environment: RANK set")]
    assert all(line.split()[0] in ("ok", "hint", "warn") for line in lines)
    sums = [line for line in lines if "all-reduce" in line]
    assert len(sums) == 2 and all(line.startswith("ok") and line.endswith("GB/s") and " right in " in line for line in sums)
    assert any("2 met; switches set: " in line and "GLOO_SOCKET_IFNAME" in line for line in lines)


def may(*command):
    try:
        return subprocess.run(["unshare", *command, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not may("--net"), reason="needs the right to make a network namespace")
def test_check_without_any_network_says_so_and_ends():
    lines, code = self_test("unshare", "--net")
    assert code == 1 and [line for line in lines if line.startswith("warn port: 127.0.0.1 does not answer") and "cure: ip link set lo up" in line]


def test_check_of_each_thing_warns_with_a_cure(tmp_path, monkeypatch):
    "A folder that can't be written, a full disk, small shared memory, a name that does not resolve, an interface that isn't there"
    assert lab.check_disk(tmp_path).level == "ok"
    unwritable = "/proc" if sys.platform == "linux" else tmp_path / "missing"
    usage = mock.Mock(return_value=mock.Mock(free=5e7))
    with mock.patch.object(lab.shutil, "disk_usage", usage):
        findings = [lab.check_disk(tmp_path), lab.check_shared_memory(tmp_path, path=tmp_path)]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with mock.patch.object(socket, "gethostbyname", side_effect=socket.gaierror(-2, "unknown")):
        findings.append(lab.check_interface(tmp_path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    findings += [lab.check_interface(tmp_path), lab.check_disk(unwritable)]
    for finding in findings:
        assert finding.level == "warn" and finding.cure and "\n" not in str(finding), finding


def cures():
    "Every text from which the self-test makes a cure"
    tree = ast.parse(Path(lab.__file__).read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding" and len(node.args) > 3]
    strings = [part.value for call in calls for part in ast.walk(call.args[3]) if isinstance(part, ast.Constant)]
    assert len(strings) > 8
    return [*strings, *lab.CURES.values()]


def test_every_flag_in_a_cure_is_one_of_ours():
    others = {"shm-size"}  # docker's
    flags = {flag for cure in cures() for flag in re.findall(r"--([\w-]+)", str(cure))}
    assert "workers" in flags and flags - others <= set(pretrainer.OPTIONS)


def test_a_node_with_fewer_cards_than_ranks_is_named():
    "And where all have cards enough, or none has any, or a machine alone starts more ranks than cards, there is nothing to mend"
    node = lambda number, cards: [dict(node=number, ranks=2, cards=cards)] * 2
    for fine in (node("0", 2) + node("1", 2), node("0", 0) + node("1", 0), node("0", 1)):
        assert lab.check_cards(fine) == []
    found, = lab.check_cards(node("0", 2) + node("1", 1))
    assert found.level == "warn" and found.text == "node 1 has 1 for 2 ranks" and found.cure


@pytest.mark.parametrize("cards, groups", [(1, 1), (0, 0)])
def test_cards_are_tried_with_the_probes_own_patience(cards, groups, monkeypatch):
    "NCCL's default is ten minutes"
    monkeypatch.setattr(lab.torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(lab.torch.cuda, "set_device", mock.Mock())
    monkeypatch.setattr(lab.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(lab.dist, "new_group", new_group := mock.Mock())
    monkeypatch.setattr(lab, "time_sum", lambda *args: (True, 1.0))
    assert ("1 MB on cards" in lab.probe(timeout=7)["sums"]) == bool(groups)
    assert new_group.call_count == groups and all(call.kwargs["timeout"].total_seconds() == 7 for call in new_group.call_args_list)


def test_run_without_a_case_starts_nothing(monkeypatch, capsys):
    monkeypatch.setattr(lab, "run_cases", mock.Mock())
    with pytest.raises(SystemExit) as stop:
        lab.main(["run"])
    assert stop.value.code == 2 and "name a case: " in capsys.readouterr().err and not lab.run_cases.called


def test_nodes_that_differ_are_named_by_rank(tmp_path):
    "A node without the data, one with another torch; a .bin has the fingerprint of the run's log; Python's caches don't count"
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("text")
    before = lab.fingerprint(tmp_path / "a")
    (tmp_path / "a" / "__pycache__").mkdir()
    (tmp_path / "a" / "__pycache__" / "x.pyc").write_text("cache")
    assert lab.fingerprint(tmp_path / "a") == before
    path = prepare_files([tmp_path / "a" / "x.txt"], 260, tmp_path / "b", progress=False)
    assert lab.fingerprint(path) == PretrainBinaryDataset(path, 2).fingerprint
    here, nowhere = lab.facts(path), lab.facts(tmp_path / "missing.bin")
    assert [finding.level for finding in lab.check_same([here, here])] == ["ok"] * 4
    *same, torch_, data = sorted(lab.check_same([here, here, nowhere | dict(torch="2.9.1")]), key=lambda finding: finding.level)
    assert [finding.level for finding in same] == ["ok", "ok"] and "\n" not in str(data)
    assert str(torch_).endswith("on 2 of 3 ranks, but rank 2 2.9.1; cure: install one version everywhere")
    assert "but rank 2 unreadable (" in str(data)
    assert lab.check_same([nowhere, nowhere])[-1].level == "warn"


def test_a_check_that_breaks_is_a_finding_and_no_answer_a_time_out():
    assert str(lab.guarded("disk", mock.Mock(side_effect=KeyError("x")), ".")).startswith("warn disk: KeyError")
    never = threading.Event()
    with pytest.raises(TimeoutError):
        lab.within(0.05, never.wait)
    never.set()
