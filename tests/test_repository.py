"The tree as a whole: modules, notebooks, what imports what"
import ast
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(path.stem for path in (ROOT / "minigpt").glob("*.py") if not path.stem.startswith("_"))
NOTEBOOKS = sorted((ROOT / "nbs").glob("*.ipynb"))
RUN_AS_FILE = {"pretrainer", "finetune"}  # torchrun minigpt/X.py
EXPORT, DEFAULT_EXP = re.compile(r"^\s*#\s*\|\s*export", re.M), re.compile(r"^\s*#\s*\|\s*default_exp\s+(\S+)", re.M)


def cells(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def source(cell):
    return "".join(cell["source"])


# ---- imports


IN_A_CHILD = """
import builtins, dis, importlib, os, random, sys, types
import numpy as np, torch
HEAVY = {"matplotlib", "transformers", "deepspeed", "accelerate", "datasets", "IPython"}

def codes(code):
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType): yield from codes(const)

def state():
    return (random.getstate(), str(np.random.get_state()), torch.initial_seed(), torch.get_rng_state().tolist(), torch.get_num_threads(),
            torch.get_default_dtype(), torch.is_grad_enabled(), dict(os.environ), os.getcwd(), list(sys.argv))

def check(name):
    before = state()
    module = importlib.import_module(f"minigpt.{name}")
    assert state() == before, "importing it changes seeds, threads, environment or folder"
    assert not HEAVY & set(sys.modules), f"importing it loads {HEAVY & set(sys.modules)}"
    trainer = getattr(sys.modules.get("minigpt.pretrainer_single"), "Trainer", None)
    assert trainer is None or "_plain_seams" not in vars(trainer), "importing it patches the trainer"
    assert not torch.distributed.is_initialized()
    with open(module.__file__, encoding="utf-8") as f: whole = compile(f.read(), module.__file__, "exec")
    used = {i.argval for code in codes(whole) for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    missing = {n for n in used if not hasattr(module, n) and not hasattr(builtins, n)}
    assert missing <= {"__file__"}, f"names that are nowhere defined: {missing}"

for name in sys.argv[1:]:
    if (pid := os.fork()) == 0:
        try:
            check(name)
        except BaseException as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True); os._exit(1)
        os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_b10_each_module_imports_alone_without_side_effects_and_misses_no_name():
    "In a process of its own, so that a name imported by another chapter can't help"
    done = subprocess.run([sys.executable, "-c", IN_A_CHILD, *MODULES], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-2000:]


# ---- what imports what


ALLOWED = {  # the table of DESIGN; what it does not name may import all
    "tokenizer": set(), "transformer": set(), "pretrainer_single": set(), "checkpoint": {"pretrainer_single"}, "speed": set(), "collectives": set(),
    "pretrain_dataset": {"tokenizer"}, "runlog": {"pretrainer_single"}, "memory": {"transformer"},
    "data_parallel": {"collectives"}, "failure_lab": {"collectives", "pretrain_dataset", "pretrainer"}, "ddp": {"pretrainer_single", "collectives"},
    "fsdp": {"pretrainer_single", "collectives"}, "model_parallel": {"transformer", "collectives"},
    "deepspeed_trainer": {"pretrainer_single"}, "accelerate_trainer": {"pretrainer_single"},
}  # fmt: skip


def imports_of(name):
    "Modules of ours that a module imports, anywhere in it"
    found = set()
    for node in ast.walk(ast.parse((ROOT / "minigpt" / f"{name}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("minigpt.")}
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "minigpt"):
            inside = (node.module or "").removeprefix("minigpt").strip(".")
            found |= {inside.split(".")[0]} if inside else {alias.name for alias in node.names}
    return found & set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_what_the_design_allows(name):
    assert imports_of(name) <= ALLOWED.get(name, set(MODULES))


def test_imports_have_no_cycle():
    graph, done = {name: imports_of(name) for name in MODULES}, set()
    while graph:
        free = {name for name, needs in graph.items() if needs <= done}
        assert free, f"a cycle among {sorted(graph)}"
        done |= free
        graph = {name: needs for name, needs in graph.items() if name not in free}


def test_no_module_bears_the_name_of_another_package():
    "Running minigpt/pretrainer.py puts its folder first on sys.path: a `types.py` there would shadow Python's own"
    others = {top for top, dists in packages_distributions().items() if "minigpt" not in dists}
    assert not set(MODULES) & (set(sys.stdlib_module_names) | others)


@pytest.mark.parametrize("name", sorted(RUN_AS_FILE & set(MODULES)))
def test_b01_what_runs_as_a_file_has_no_relative_import(name):
    tree = ast.parse((ROOT / "minigpt" / f"{name}.py").read_text(encoding="utf-8"))
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]


# ---- notebooks


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    "The tree copied, its modules deleted, exported and cleaned anew"
    copy = tmp_path_factory.mktemp("copy")
    for name in ("settings.ini", "setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "nbs", copy / "nbs", ignore=shutil.ignore_patterns("data", "runs", ".*", "figures"))
    shutil.copytree(ROOT / "minigpt", copy / "minigpt", ignore=shutil.ignore_patterns("__pycache__"))
    for name in MODULES:
        (copy / "minigpt" / f"{name}.py").unlink()
    env = {k: v for k, v in os.environ.items() if k != "IN_TEST"} | dict(PYTHONPATH=str(copy))
    code = "from nbdev.doclinks import nbdev_export; from nbdev.clean import nbdev_clean; nbdev_export(); nbdev_clean()"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return copy


def test_exported_modules_equal_the_notebooks(exported):
    for name in [*MODULES, "_modidx"]:
        ours, fresh = (folder / "minigpt" / f"{name}.py" for folder in (ROOT, exported))
        assert fresh.exists(), f"B05: minigpt/{name}.py has no notebook"
        assert ours.read_text(encoding="utf-8") == fresh.read_text(encoding="utf-8"), f"{name}.py: run nbdev_export"
    assert sorted(p.name for p in (exported / "minigpt").glob("*.py")) == sorted(p.name for p in (ROOT / "minigpt").glob("*.py"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_clean(exported, path):
    assert path.read_bytes() == (exported / "nbs" / path.name).read_bytes(), "run nbdev_clean"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_keep_no_error_and_nothing_of_one_machine(path):
    for cell in cells(path):
        for output in cell.get("outputs", []):
            assert output["output_type"] != "error", f"{cell['id']}: {output.get('evalue')}"
            text = "".join(output.get("text", [])) + "".join(output.get("data", {}).get("text/plain", []))
            assert not re.search(r"0x[0-9a-f]{8,}|(?<![\w.])/(home|work|root|tmp|Users)/\w|\r", text), f"{cell['id']}: {text[:200]}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_b02_b03_b09_export_cells_are_sound(path):
    "Lint that names the notebook and the cell"
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    exports = [cell for cell in code if EXPORT.search(source(cell))]
    assert not exports or [cell for cell in code if DEFAULT_EXP.search(source(cell))], f"{path.name}: exports without a default_exp"
    for cell in code:
        assert not re.search(r"^\s*from \.", source(cell), re.M), f"{path.name}, {cell['id']}: a relative import fails in a notebook"
        guards = re.findall(r"^if __name__ == .*$", source(cell), re.M)
        assert all("__file__" in guard for guard in guards), f"{path.name}, {cell['id']}: this guard is true in a kernel too"
    ids = [cell["id"] for cell in cells(path)]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[a-z0-9-]+", i) for i in ids), f"{path.name}: cell ids are unique words"


def test_one_notebook_one_module():
    names = [match[1] for path in NOTEBOOKS for cell in cells(path) if (match := DEFAULT_EXP.search(source(cell)))]
    assert sorted(names) == MODULES


# ---- what a contributor meets


def test_a_package_is_built_from_its_own_source_archive(tmp_path):
    "setup.py reads settings.ini and README.md, so both travel"
    for name in ("settings.ini", "setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "minigpt", tmp_path / "minigpt", ignore=shutil.ignore_patterns("__pycache__"))
    build = lambda folder, *words: subprocess.run([sys.executable, "setup.py", "-q", *words], cwd=folder, capture_output=True, text=True, timeout=120)
    assert build(tmp_path, "sdist").returncode == 0
    archive, = (tmp_path / "dist").iterdir()
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    done = build(next((tmp_path / "unpacked").iterdir()), "build")
    assert done.returncode == 0, done.stderr[-2000:]


def test_ci_sees_a_module_that_was_never_added():
    assert "git status --porcelain -- minigpt nbs" in (ROOT / ".ci" / "run").read_text()


def test_b11_data_lie_in_the_same_place_from_any_folder(tmp_path, monkeypatch):
    "B11"
    from minigpt.pretrain_dataset import data_dir

    monkeypatch.delenv("MINIGPT_DATA", raising=False)
    places = set()
    for folder in (ROOT, ROOT / "nbs", tmp_path):
        monkeypatch.chdir(folder)
        places.add(data_dir())
    assert len(places) == 1


def test_b14_no_order_of_chapters_leaks_a_patch():
    "B14: each chapter runs in a kernel of its own, and strategies put the class back"
    assert 'for chapter in nbs/*.ipynb' in (ROOT / ".ci" / "run").read_text() and "jupyter execute" in (ROOT / ".ci" / "run").read_text()
    from minigpt.ddp import patch_ddp
    from minigpt.pretrainer_single import STRATEGY_SEAMS, Trainer, unpatch

    unpatch(Trainer)
    plain = {name: getattr(Trainer, name) for name in STRATEGY_SEAMS}
    for strategies in ([patch_ddp], [patch_ddp, patch_ddp]):
        for strategy in strategies:
            strategy(Trainer)
        assert Trainer.wrap_model.__module__ == "minigpt.ddp"
        unpatch(Trainer)
        assert {name: getattr(Trainer, name) for name in STRATEGY_SEAMS} == plain


def test_b18_what_other_editors_leave_in_a_notebook_is_cleaned(tmp_path):
    "B17, B18: metadata of VS Code and execution counts go, outputs stay; CI names the command that mends it"
    nb = json.loads(NOTEBOOKS[0].read_text(encoding="utf-8"))
    clean = json.dumps(nb, sort_keys=True)
    shown = next(cell for cell in nb["cells"] if cell.get("outputs"))
    shown["execution_count"], shown["metadata"] = 7, {"vscode": {"languageId": "python"}, "collapsed": False}
    nb["metadata"]["vscode"] = {"interpreter": {"hash": "0"}}
    (tmp_path / "nb.ipynb").write_text(json.dumps(nb), encoding="utf-8")
    subprocess.run([Path(sys.executable).with_name("nbdev_clean"), "--fname", tmp_path / "nb.ipynb"], check=True, cwd=ROOT, timeout=60)
    assert json.dumps(json.loads((tmp_path / "nb.ipynb").read_text(encoding="utf-8")), sort_keys=True) == clean
    assert "run nbdev_export and nbdev_clean" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_b19_no_cell_is_skipped_where_there_is_no_gpu(path):
    "B19: every cell runs on a CPU, so nothing has to be flagged"
    assert not [cell["id"] for cell in cells(path) if re.search(r"^#\s*\|\s*(eval\s*:\s*false|notest)", source(cell), re.M)]


def test_b04_b16_b20_the_guides_tell_the_way():
    "B04: what a missing package means; B16: merge conflicts; B20: uv and pip; the commands they name are installed"
    readme, guide = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md"))
    assert "No module named minigpt" in readme and "pip install -e ." in readme
    assert "uv pip install -e" in guide
    for command in ("nbdev_export", "nbdev_clean", "nbdev_install_hooks", "nbdev_fix"):
        assert command in guide and Path(sys.executable).with_name(command).exists()


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md", "CONTRIBUTING.md"])
def test_every_local_link_leads_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert all((ROOT / link).exists() for link in links) and (links or name == "CONTRIBUTING.md")
