"""minigpt and its peers on the same work: interleaved rounds, ratios with their 95 % intervals, the loss beside each speed.

    ./run python -m bench train --size S [--quick]     one command
    ./run python -m bench --quick                      all of them
    ./run python -m bench readme                       their figures into the READMEs
"""
import argparse
import sys
import time
from importlib import import_module
from pathlib import Path

import torch

from minigpt.pretrainer import SIZES

from . import goals, machine, readme, report
from .work import BATCH, Work

COMMANDS = {  # name -> module
    "train": "training", "data": "preparing", "tokenize": "tokenizing", "ddp": "parallel", "checkpoint": "saving", "evaluate": "evaluating", "start": "starting",
}
RESULTS = Path(__file__).parent / "results"


class OneLineParser(argparse.ArgumentParser):
    "An argument parser whose errors are one line, exit code 2"

    def error(self, message):
        sys.exit(complain(message))


def complain(message) -> int:
    "A mistake, told in one line; its exit code"
    print("bench:", " ".join(str(message).split()), file=sys.stderr)
    return 2


def build_parser() -> argparse.ArgumentParser:
    "What can be asked for"
    parser = OneLineParser(prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=[*COMMANDS, "readme"], help="what to measure; none: all")
    parser.add_argument("--size", choices=SIZES, default="S", help="of the model [S]")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: wider intervals")
    parser.add_argument("--batch", type=int, help="windows per process and step [by size and device]")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of one process [the machine's]")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="[cuda where there is one]")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="train: contenders whose name holds one of these, besides plain")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results [bench/results]")
    return parser


def device_here() -> str:
    "The one that is measured unless another is asked for"
    return "cuda" if torch.cuda.is_available() else "cpu"


def work_of(options) -> Work:
    "The work that the options mean; a ValueError where it can't be done"
    device = device_here() if options.device == "auto" else options.device
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch sees no CUDA GPU here; use --device cpu")
    for name in ("batch", "threads"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name} {value}: give a whole number of 1 or more")
    if options.only and options.command != "train":
        raise ValueError("--only: `bench train` alone has contenders to choose from")
    if options.out == RESULTS and (options.only or options.batch or options.threads != torch.get_num_threads() or device != device_here()):
        raise ValueError("--only, --batch, --threads and another --device measure something else than the README tells of: give a folder of their own by --out")
    return Work(options.size, options.quick, device, options.threads, options.batch or BATCH[device][options.size], only=tuple(options.only))


def measured(command: str, work: Work) -> dict:
    "One command's whole result"
    found = import_module(f".{COMMANDS[command]}", __package__).run(work)
    result = dict(command=command, size=work.size, quick=work.quick, date=time.strftime("%Y-%m-%d %H:%M"), limits={}, not_installed={}, notes=[]) | found
    result["goals"] = goals.judged(command, work.size, found["figures"])
    return result | dict(work=work.described(), machine=machine.described())


def tried(command: str, work: Work, out: Path) -> int:
    "Measure and write one command; what this machine can't do is told, and the next one may come; the exit code"
    try:
        result = measured(command, work)
        paths = report.write(result, out)
    except (ValueError, OSError) as error:
        return complain(f"{command}: {error}")
    print(report.markdown(result))
    print("written:", *paths)
    return 0


def main(argv: list[str] | None = None) -> int:
    "Measure, write, print; the exit code"
    options = build_parser().parse_args(argv)
    try:
        if options.command == "readme":
            print("written:", *readme.rewrite(options.out))
            return 0
        work = work_of(options)
        torch.set_num_threads(work.threads)
    except (ValueError, OSError) as error:
        return complain(error)
    return max(tried(command, work, options.out) for command in ([options.command] if options.command else COMMANDS))


if __name__ == "__main__":
    sys.exit(main())
