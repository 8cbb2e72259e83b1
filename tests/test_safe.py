"""Nothing is unpickled, no code that lies beside a model is run, and nothing looks for a network."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from decisionheads import DecisionModel, InputError, tiny
from decisionheads.cli import main

HOUSE = Path(__file__).parent.parent / "decisionheads"
WORDS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CALLS = {"eval", "exec", "compile", "__import__"}


def unsafe(tree: ast.AST) -> list[str]:
    """What could run code from a file: names of modules, calls and arguments."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in WORDS]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module for _ in range(1) if node.module and node.module.split(".")[0] in WORDS]
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            found += [name] if name in CALLS else []
            if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                of, name = node.func.value.id, node.func.attr
                found += [f"{of}.{name}"] if (of, name) in {("torch", "load"), ("torch", "save"), ("pd", "read_pickle")} else []
            found += ["to_pickle"] if isinstance(node.func, ast.Attribute) and node.func.attr == "to_pickle" else []
            for k in node.keywords:
                true = not (isinstance(k.value, ast.Constant) and k.value.value is False)
                found += [k.arg] if k.arg in ("allow_pickle", "trust_remote_code") and true else []
                found += [k.arg] if k.arg == "weights_only" and not (isinstance(k.value, ast.Constant) and k.value.value is True) else []
    return found


def test_nothing_in_the_house_could_run_code_from_a_file():
    assert {str(p.relative_to(HOUSE)): found for p in HOUSE.rglob("*.py") if (found := unsafe(ast.parse(p.read_text())))} == {}


@pytest.mark.parametrize("code", ["import pickle", "from pickle import loads", "torch.load(f)", "torch.load(f, weights_only=False)", "np.load(f, allow_pickle=True)", "f(trust_remote_code=True)", "f(trust_remote_code=asked)", "eval(x)", "exec(x)",
                                  "pd.read_pickle(f)", "table.to_pickle(f)", "joblib.load(f)\nimport joblib"])
def test_what_could_is_seen(code):
    assert unsafe(ast.parse(code))


def loads() -> list[tuple[str, ast.Call]]:
    """Every call of `from_pretrained` on a class of transformers."""
    return [(p.name, node) for p in HOUSE.rglob("*.py") for node in ast.walk(ast.parse(p.read_text())) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            and node.func.attr == "from_pretrained" and isinstance(node.func.value, ast.Name) and node.func.value.id.startswith("Auto")]


def test_every_model_of_a_user_is_loaded_without_remote_code_and_from_safetensors(monkeypatch):
    """Not said, transformers asks on the terminal whether to run the code, and takes weights that are pickles."""
    found = [(name, node) for name, node in loads() if name not in ("retokenize.py", "train.py", "build.py")]  # those load the embedded models
    assert len(found) >= 5
    for name, node in found:
        said = {k.arg for k in node.keywords}
        assert "trust_remote_code" in said or None in said, name  # None: `**extra`, which says it
        assert node.func.value.id != "AutoModelForCausalLM" or "use_safetensors" in said, name
    from decisionheads import _sources

    monkeypatch.setattr(_sources, "hub_commit", lambda name: "0" * 40)
    assert all(_sources.locate(where)[1]["trust_remote_code"] is False for where in (tiny.path("llama"), "owner/name"))


@pytest.mark.parametrize("known", [True, False], ids=["a known architecture", "an unknown one"])
def test_code_beside_a_model_is_not_run(known, tmp_path, capsys, monkeypatch):
    """A model folder that brings its own code: loaded without it, or refused, and nobody is asked."""
    folder = Path(shutil.copytree(tiny.path("llama"), tmp_path / "model"))
    marker = tmp_path / "ran"
    (folder / "evil.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).write_text('x')\nfrom transformers import LlamaConfig as Config, LlamaForCausalLM as Model, PreTrainedTokenizerFast as Tokenizer\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    config |= {} if known else {"model_type": "evil", "architectures": ["Evil"]}
    (folder / "config.json").write_text(json.dumps(config))
    tokens = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens | {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}}))
    monkeypatch.setattr("builtins.input", lambda *a: pytest.fail("somebody was asked"))
    assert main(["verify", "--model", str(folder)]) == (0 if known else 2)
    said = capsys.readouterr()
    assert not marker.exists() and (known or said.err.count("\n") == 1 and said.out == "")


def test_weights_that_are_pickles_are_refused(tmp_path):
    import torch
    from safetensors.torch import load_file

    folder = Path(shutil.copytree(tiny.path("llama"), tmp_path / "model"))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="no causal language model could be loaded"):
        DecisionModel.from_pretrained(folder)


CUT_OFF = """
import socket

def refuse(*args, **options):
    with open({log!r}, "a") as log:
        log.write(repr(args)[:200] + "\\n")
    raise OSError("there is no network")

for name in ("connect", "connect_ex", "sendto", "sendmsg"):
    setattr(socket.socket, name, refuse)
for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "gethostbyaddr", "create_connection"):
    setattr(socket, name, refuse)
"""
LEFT_OUT = ("HF_", "TRANSFORMERS_", "WANDB", "DO_NOT_TRACK", "ACCELERATE", "PYTHONPATH")


def cut_off(folder: Path, arguments: list[str]) -> tuple[subprocess.CompletedProcess, list[str]]:
    """Run Python where any use of a network fails and is written down; nothing in the environment says that there is none."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(CUT_OFF.format(log=str(folder / "attempts")))
    env = {k: v for k, v in os.environ.items() if not k.startswith(LEFT_OUT)} | {"PYTHONPATH": f"{folder / 'site'}{os.pathsep}{HOUSE.parent}", "HOME": str(folder)}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, cwd=folder, timeout=900)
    return done, (folder / "attempts").read_text().splitlines() if (folder / "attempts").exists() else []


def test_the_demo_makes_no_attempt_at_a_network(tmp_path):
    """All of a run, model and report included, with the hub not declared offline."""
    done, attempts = cut_off(tmp_path, ["-m", "decisionheads", "demo", "--texts", "12", "--out", "run"])
    assert done.returncode == 0 and (tmp_path / "run" / "report.html").is_file() and attempts == [], (done.stderr[-500:], attempts)


def test_an_attempt_at_a_network_is_seen(tmp_path):
    _, attempts = cut_off(tmp_path, ["-c", "import urllib.request\nurllib.request.urlopen('http://localhost:1')"])
    assert attempts


def test_a_folder_is_never_looked_up_on_a_hub(tmp_path):
    """A model folder without some of the usual files: what is not there is not searched for elsewhere."""
    folder = Path(shutil.copytree(tiny.path("gpt2"), tmp_path / "model"))
    (folder / "generation_config.json").unlink()
    done, attempts = cut_off(tmp_path, ["-m", "decisionheads", "verify", "--model", str(folder)])
    assert done.returncode == 0 and attempts == [], (done.stderr[-500:], attempts)
