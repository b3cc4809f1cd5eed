"""What was aimed at, and whether it was reached: judged from the figures that the commands measured, never written by hand."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    "One line of the table of goals"
    command: str  # that measures it
    figure: str  # its name among the command's figures
    what: str  # in English
    zh: str  # in Chinese
    target: float | dict[str, float]  # for all sizes, or by size
    at_least: bool = True  # False: at most
    unit: str = "x"  # x, %, MiB or nothing

    def target_for(self, size: str) -> float | None:
        "The number to reach at this size; None where there is no goal for it"
        return self.target.get(size) if isinstance(self.target, dict) else self.target


GOALS = [
    Goal("train", "over_plain", "training step over plain", "训练一步，比朴素实现", dict(S=3.5, M=4.0)),
    Goal("train", "over_peer", "training step over the fastest packaged peer", "训练一步，比最快的现成训练库", dict(S=2.0, M=1.4)),
    Goal("train", "over_lean", "training step over a GPT-2 in nanoGPT's style, never behind", "训练一步，比 nanoGPT 风格的 GPT-2，不落后", 1.0),
    Goal("train", "peak_share", "share of the measured bf16 matrix-product peak", "达到实测 bf16 矩阵乘峰值的比例", dict(S=12.0, M=30.0), unit="%"),
    Goal("ddp", "over_never_synced", "DDP processes over processes that never sync, speed", "DDP 进程比从不同步的进程，速度", 0.99),
    Goal("ddp", "over_alone", "DDP processes over one process alone, speed of a process", "DDP 进程比单独一个进程，每进程速度", 0.95),
    Goal("ddp", "over_threads", "DDP processes over one process with all threads, tokens/s", "DDP 进程比一个多线程进程，词元/秒", dict(S=1.25)),
    Goal("ddp", "exchanges_per_update", "gradient exchanges per update when accumulating", "梯度累积时每次更新的梯度交换次数", 1.0, False, ""),
    Goal("tokenize", "over_one_by_one", "tokenising over one text at a time", "分词，比一次一篇文本", 20.0),
    Goal("tokenize", "ids_differ", "texts whose ids differ", "编号不一致的文本数", 0.0, False, ""),
    Goal("data", "prepare_mib", "encoding a 200 MB file, tokenizer learnt before: peak memory over imports", "编码 200 MB 文件（分词器已学好）：高出导入后的内存峰值", 100.0, False, "MiB"),
    Goal("data", "prepare_growth_mib", "the same, over a file a quarter as large: memory more", "同上，比四分之一大的文件多用的内存", 20.0, False, "MiB"),
    Goal("data", "load_share", "loading, share of a training step", "加载占训练一步的比例", dict(S=0.5), False, "%"),
    Goal("data", "load_mib", "loading, memory of a process at 8 million windows", "加载：八百万窗口时每进程内存", 50.0, False, "MiB"),
    Goal("checkpoint", "blocked_steps", "saving: what training waits for, in steps", "保存：训练等待的时间，以步计", dict(M=0.03), False, ""),
    Goal("evaluate", "over_rank_0", "evaluation on 2 ranks over rank 0 alone", "两个进程评估，比只用 0 号进程", 1.8),
    Goal("start", "over_torch", "imports of the main job over `import torch`, CPU seconds", "主任务的导入比 `import torch`，CPU 秒", 1.1, False),
]


def judged(
    command: str,
    size: str,
    figures: dict[str, dict],  # name -> value, low, high, as measured
) -> list[dict]:
    "The goals of a command at a size, each with what was reached and whether that is enough; None where it was not measured"
    rows = []
    for goal in GOALS:
        target = goal.target_for(size)
        if goal.command != command or target is None:
            continue
        reached = figures.get(goal.figure)
        value = reached["value"] if isinstance(reached, dict) else reached
        met = None if value is None else value >= target if goal.at_least else value <= target
        note = reached.get("note", "") if isinstance(reached, dict) else ""
        rows.append(dict(figure=goal.figure, what=goal.what, note=note, target=target, at_least=goal.at_least, unit=goal.unit, reached=reached, met=met))
    return rows
