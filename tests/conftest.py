from __future__ import annotations

import os
from contextlib import contextmanager

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # two threads beside another test process would spin for the core that they wait for

import jaxtyping
import pytest
import torch

from .shapes import check_shapes

torch.set_num_threads(1)
check_shapes("decisionheads")

# The files that take longest begin, so that processes end together; the first makes the demo while the second does without it.
BEGIN = ["test_campaign", "test_discovery", "test_cli", "test_determinism", "test_malformed", "test_flip", "test_tiny", "test_elicitation", "test_knock_in", "test_verdicts", "test_explorer"]


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: BEGIN.index(item.path.stem) if item.path.stem in BEGIN else len(BEGIN))


def random_hf(family: str, seed: int = 0, **changes):
    """A small random Hugging Face model over the clinic's vocabulary, with weights large enough to matter."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    from decisionheads.tiny.clinic import TOKENS

    torch.manual_seed(seed)
    if family == "llama":
        options = dict(hidden_size=36, intermediate_size=48, num_hidden_layers=3, num_attention_heads=9, num_key_value_heads=3,
                       head_dim=8, max_position_embeddings=320) | changes
        hf = LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENS), **options))
    else:
        options = dict(n_embd=36, n_layer=3, n_head=6, n_positions=320, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0) | changes
        hf = GPT2LMHeadModel(GPT2Config(vocab_size=len(TOKENS), **options))
    with torch.no_grad():
        for name, p in hf.named_parameters():
            if p.ndim > 1:
                p.normal_(0, 0.6 if "embed" in name or "wte" in name else 0.25)
    return hf.eval()


def save_random(family: str, folder, **changes):
    """Save such a model with the clinic's tokenizer; returns the folder."""
    from decisionheads.tiny.clinic import clinic_tokenizer

    random_hf(family, **changes).save_pretrained(folder)
    clinic_tokenizer().save_pretrained(folder)
    return folder


def plain_hf(folder, dtype=torch.float32):
    """The model as any Hugging Face user would load it, in eager attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()


# for whole runs: the second family is left to `pytest -m whole`
FIRST_FAMILY = pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.whole)], indirect=True)


@pytest.fixture(scope="session", params=["llama", "gpt2"])
def family(request):
    return request.param


@pytest.fixture(scope="session")
def random_folder(family, tmp_path_factory):
    return save_random(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="session")
def random_model(random_folder):
    from decisionheads import DecisionModel

    return DecisionModel.from_pretrained(random_folder)


@pytest.fixture(scope="session")
def random_plain(random_folder):
    return plain_hf(random_folder)


@pytest.fixture(scope="session")
def model(family):
    """The embedded teacher of the family."""
    from decisionheads import DecisionModel, tiny

    return DecisionModel.from_pretrained(tiny.path(family))


@pytest.fixture(scope="session")
def plain(family):
    from decisionheads import tiny

    return plain_hf(tiny.path(family))


@pytest.fixture(scope="session")
def space():
    from decisionheads import tiny

    return tiny.labels()


@pytest.fixture(scope="session")
def readings(model, space):
    """Twelve right texts of the clinic, read by the embedded teacher."""
    from decisionheads import tiny

    texts = [tiny.transcript(f"t{i}", drawn) for i, drawn in enumerate(tiny.draw(12, seed=5))]
    return [model.read(t, model.find_events(t, space)) for t in texts]


@pytest.fixture(scope="session")
def means(model, readings):
    from decisionheads import reference_means

    with pytest.warns(UserWarning, match="are advised"):
        return reference_means(model, readings[:6], minimum=3)


@pytest.fixture(scope="module", params=["9 to 3", "8 to 2", "4 to 4", "gpt2"])
def built(request):
    """Small random models with several shapes of heads; see `cases.build`."""
    from .cases import build

    return build(request.param)


@contextmanager
def shapes_unchecked():
    """Whole runs call small functions a million times: their shapes are checked in the tests of those functions."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def demo(tmp_path_factory, worker_id):
    """The run folder of a demo of 40 texts, made once for all processes of a test run; not to be written to."""
    from filelock import FileLock

    from decisionheads.cli import main

    base = tmp_path_factory.getbasetemp()
    out = (base if worker_id == "master" else base.parent) / "demo-run"
    with FileLock(f"{out}.lock"):
        if not (out / "report.html").is_file():
            with shapes_unchecked():
                assert main(["demo", "--texts", "32", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="session")
def bpe_folder(tmp_path_factory):
    """A small random Llama over a byte-level BPE."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from .bpe import bpe

    torch.manual_seed(1)
    tokenizer, path = bpe(), tmp_path_factory.mktemp("bpe-llama")
    hf = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                      max_position_embeddings=600, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id))
    with torch.no_grad():
        for name, p in hf.named_parameters():
            if p.ndim > 1:
                p.normal_(0, 0.6 if "embed" in name else 0.3)
    hf.save_pretrained(path), tokenizer.save_pretrained(path)
    return path
