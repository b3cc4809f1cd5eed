"""Contenders take turns, round after round; what is compared are ratios within a round, so a machine that slows down slows all alike."""
import math
import statistics
import time
from collections.abc import Callable

import torch

CONFIDENCE = 0.95
MIN_ROUNDS = 6  # fewer values can't hold their median with 95 %


def timed(
    function: Callable,  # what to time
    times: int = 1,  # calls in a row
    device: str = "cpu",  # a GPU is waited for
) -> float:  # seconds of one call
    "Seconds of a call, the mean of some in a row"
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(times):
        function()
    wait()
    return (time.perf_counter() - start) / times


def interleave(
    contenders: dict[str, Callable[[], float]],  # name -> a turn; it returns what it measured, in seconds or any other unit
    rounds: int,  # turns of each
) -> dict[str, list[float]]:  # name -> what its turns returned, round by round
    "A B C, A B C, ...: each round holds a turn of every contender"
    found = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, turn in contenders.items():
            found[name].append(turn())
    return found


def median_interval(
    values: list[float],  # independent measurements, six or more
) -> tuple[float, float]:
    "The pair of order statistics that holds the median with 95 %, whatever the distribution: counting heads of fair coins"
    n, ordered, tail, cut = len(values), sorted(values), 0.0, 0
    while (tail := tail + math.comb(n, cut) / 2**n) <= (1 - CONFIDENCE) / 2:
        cut += 1
    if not cut:
        raise ValueError(f"{n} rounds: {MIN_ROUNDS} are the fewest that give an interval of {CONFIDENCE:.0%}")
    return ordered[cut - 1], ordered[n - cut]


def summary(
    values: list[float],  # one a round
) -> dict:  # median, and the ends of its 95 % interval
    "What a report says of a measurement"
    low, high = median_interval(values)
    return dict(value=statistics.median(values), low=low, high=high)


def ratio(
    slow: list[float],  # one contender's seconds, round by round
    fast: list[float],  # another's, in the same rounds
) -> dict:  # as `summary`: above 1 where the second is faster
    "How many times faster the second is: the median of the ratios within each round"
    return summary([a / b for a, b in zip(slow, fast, strict=True)])


def inverse(
    figure: dict,  # from `ratio` or `summary`
) -> dict:
    "One over it, with the ends of its interval"
    return dict(value=1 / figure["value"], low=1 / figure["high"], high=1 / figure["low"])


def scaled(
    figure: dict,  # from `ratio` or `summary`
    factor: float,  # above 0
) -> dict:
    "A figure in another unit"
    return {name: value * factor for name, value in figure.items()}
