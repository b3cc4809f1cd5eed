"""Draw the map strip of each chapter, `map-NN.svg`: all chapters in order, the current one lit. Run it after adding a chapter."""
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

CHAPTERS = {
    "01": "tokenizer", "02": "dataset", "03": "transformer", "04": "trainer",
    "05": "run log", "06": "checkpoint", "07": "speed", "08": "collectives", "09": "data parallel", "10": "DDP", "11": "launch",
    "12": "failure lab",
}  # fmt: skip


def draw(current: str, path: Path):
    "The strip with one chapter lit"
    fig, ax = plt.subplots(figsize=(0.95 * len(CHAPTERS), 0.62))
    ax.axis("off")
    for i, (number, name) in enumerate(CHAPTERS.items()):
        lit = number == current
        style = dict(boxstyle="round,pad=0.35", fc="#1f77b4" if lit else "#eef2f6", ec="none")
        ax.text(i, 0, f"{number}\n{name}", ha="center", va="center", fontsize=8, color="white" if lit else "#555", bbox=style)
        if i:
            ax.annotate("", (i - 0.45, 0), (i - 0.55, 0), arrowprops=dict(arrowstyle="->", color="#999"))
    ax.set(xlim=(-0.5, len(CHAPTERS) - 0.5), ylim=(-1, 1))
    fig.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(fig)


if __name__ == "__main__":
    # fixed ids and text kept as text: the same picture gives the same file
    plt.rcParams.update({"svg.hashsalt": "minigpt", "svg.fonttype": "none", "font.family": "sans-serif"})
    for number in CHAPTERS:
        draw(number, Path(__file__).with_name(f"map-{number}.svg"))
