"""`DecisionModel`: a language model whose decisions can be read and changed.

The only file that imports transformer_lens. Loading runs the self-test and refuses, in one sentence,
what cannot be done exactly.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from ._cache import Prefix
from ._classic import Classic
from ._hooked import Hooked
from ._self_test import SelfTest, self_test
from ._sources import first_line, locate, quiet
from .decisions import DecisionEvent, Events
from .errors import InputError
from .events import find_events
from .labels import LabelSpace
from .prefixes import Prefixes
from .transcripts import Encoded, Transcript, encode
from .views import Viewed

if TYPE_CHECKING:
    from .ablation import Ablation, ReferenceMeans
    from .attribution import Attribution
    from .decisions import Kind
    from .heads import HeadSet
    from .knock_in import KnockedIn
    from .read_blocking import Blocked
    from .spans import Sinks

DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class Reading(Viewed):
    """A transcript that the model has read: its tokens, its events, and its prefix.

    Attributes:
        transcript: the text.
        encoded: its tokens.
        events: its decision events, in order of position.
        prefix: keys and values, with reference logits at the events' positions.
    """

    transcript: Transcript
    encoded: Encoded
    events: tuple[DecisionEvent, ...]
    prefix: Prefix

    def __repr__(self) -> str:
        return f"Reading({self.transcript.id!r}: {len(self.encoded)} tokens, {len(self.events)} events)"

    def clean(self, event: DecisionEvent) -> Float[Tensor, " vocabulary"]:
        """The clean logits at an event, from the plain model's prefill."""
        return self.prefix.logits[self.prefix.positions.index(event.position)]


class DecisionModel:
    """A `TransformerBridge` with a tokenizer, tested, and ready for interventions.

    Args:
        hooked: a `TransformerBridge`, or a `HookedTransformer` of transformer-lens 3.9. It is left as it
            was found: no hook stays, no mode changes.
        tokenizer: a fast Hugging Face tokenizer; default: the bridge's own.
        plain: a weight-sharing copy of its Hugging Face model for prefills; made by `from_pretrained`.
        test: run the self-test, and refuse a model that fails it.

    Raises:
        InputError: for an object of another kind, no tokenizer or one that does not fit, or a model
            that cannot be handled exactly.
    """

    def __init__(self, hooked, tokenizer=None, *, plain=None, test: bool = True):
        from transformer_lens.model_bridge import TransformerBridge

        if not isinstance(hooked, (TransformerBridge, *_classic_class())):
            raise InputError(f"a {type(hooked).__name__} is not a TransformerBridge; boot one, or use DecisionModel.from_pretrained")
        self.tokenizer = tokenizer if tokenizer is not None else hooked.tokenizer
        if self.tokenizer is None or not getattr(self.tokenizer, "is_fast", False):
            raise InputError("the model has no fast tokenizer, and events need character offsets; pass tokenizer=")
        try:
            self.hooked = Hooked(hooked, plain) if isinstance(hooked, TransformerBridge) else _classic(hooked)
        except ValueError as error:
            raise InputError(str(error)) from None
        self.prefixes = Prefixes(self.hooked)
        largest = max(self.tokenizer.get_vocab().values(), default=-1)
        if largest >= self.hooked.vocabulary:
            raise InputError(f"the tokenizer has ids up to {largest} and the model a vocabulary of {self.hooked.vocabulary}; use the model's own tokenizer")
        self.tested: SelfTest | None = self_test(self.hooked, self.tokenizer) if test else None
        if self.tested is not None and self.tested.verdict == "refused":
            raise InputError(self.tested.reason)

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, *, dtype: str = "float32", device: str | None = None,
                        tokenizer=None, random_weights: bool = False, test: bool = True) -> DecisionModel:
        """Load a model folder, a `.gguf` file, or a hub name.

        Args:
            name_or_path: what to load; a path is never looked up on the hub. A hub name may end in
                `@revision` (a branch, tag or commit).
            dtype: float32 (default), float64, float16 or bfloat16.
            device: a torch device; default: cuda if there is one, else cpu.
            tokenizer: another tokenizer than the one that lies beside the model.
            random_weights: a sanity run: the same architecture, its weights drawn anew.
            test: see the class.
        """
        from transformers import AutoModelForCausalLM

        if dtype not in DTYPES:
            raise InputError(f"unknown dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        where, extra = locate(name_or_path)
        with quiet():
            tokenizer = tokenizer if tokenizer is not None else cls.load_tokenizer(name_or_path)
            try:
                model = AutoModelForCausalLM.from_pretrained(where, dtype=DTYPES[dtype], use_safetensors=True, **extra)  # other weights are pickles
            except Exception as error:
                raise InputError(f"{name_or_path}: no causal language model could be loaded ({first_line(error)}); give a folder with config.json and weights") from None
            if random_weights:
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(model.config, dtype=DTYPES[dtype])
            model = model.to(device).eval().requires_grad_(False)
            plain = _sharing_copy(model)
            bridge = _bridge(model)
        found = cls(bridge, tokenizer, plain=plain, test=test)
        if "gguf_file" in extra:  # transformers names it after the folder, which may hold several
            found.hooked.name = Path(name_or_path).stem
        return found

    @staticmethod
    def load_tokenizer(name_or_path: str | Path):
        """The tokenizer that lies beside a model, without the model."""
        from transformers import AutoTokenizer

        where, extra = locate(name_or_path)
        with quiet():
            try:
                tokenizer = AutoTokenizer.from_pretrained(where, **extra)
            except Exception as error:
                raise InputError(f"{name_or_path}: no tokenizer could be loaded ({first_line(error)}); put the tokenizer's files beside the model") from None
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True  # lengths are checked, and refused, where texts are used
        return tokenizer

    @staticmethod
    def load_context(name_or_path: str | Path) -> int | None:
        """The most tokens that a model can take, without loading the model; None where its config names no limit."""
        from transformers import AutoConfig

        where, extra = locate(name_or_path)
        with quiet():
            try:
                config = AutoConfig.from_pretrained(where, **extra)
            except Exception as error:
                raise InputError(f"{name_or_path}: no config could be loaded ({first_line(error)}); give a folder with config.json and weights") from None
        return getattr(config.get_text_config(), "max_position_embeddings", None)

    def __repr__(self) -> str:
        h = self.hooked
        return f"DecisionModel({self.name}: {h.n_layers} layers x {h.n_heads} heads, {str(h.dtype)[6:]}, {self.tested.verdict if self.tested else 'not tested'})"

    @property
    def name(self) -> str:
        return self.hooked.name

    @property
    def bridge(self):
        """The `TransformerBridge`, for everything that TransformerLens offers."""
        return self.hooked.bridge

    @property
    def n_layers(self) -> int:
        return self.hooked.n_layers

    @property
    def n_heads(self) -> int:
        return self.hooked.n_heads

    # -- reading -----------------------------------------------------------------------------

    def find_events(self, transcript: Transcript, labels: LabelSpace, **options) -> Events:
        """The decision events of a transcript in this model's tokens; see `events.find_events`."""
        return find_events(transcript, labels, self.tokenizer, **options)

    def read(self, transcript: Transcript, events: Iterable[DecisionEvent]) -> Reading:
        """Prefill a transcript once, for everything that is asked of its events afterwards.

        Raises:
            InputError: for events of another transcript, or of another tokenizer.
        """
        events = tuple(sorted(events, key=lambda e: (e.position, e.kind)))
        encoded = encode(transcript, self.tokenizer)
        for event in events:
            if event.transcript != transcript.id:
                raise InputError(f"event {event.name} is of transcript {event.transcript!r} and not of {transcript.id!r}; read each transcript with its own events")
            if not event.position + 1 < len(encoded) or encoded.ids[event.position + 1] != event.chosen:
                raise InputError(f"event {event.name} was found with another tokenizer than that of {self.name}; find events with this model: model.find_events")
        positions = tuple(dict.fromkeys(e.position for e in events))
        ids = torch.tensor(encoded.ids, dtype=torch.long, device=self.hooked.device)
        length = max(positions, default=len(ids) - 1) + 1
        return Reading(transcript, encoded, events, self.prefixes.read(ids[:length], positions))

    @torch.no_grad()
    def generate(self, prompt: str, longest: int) -> str:
        """What the model writes after a prompt, greedily, up to its end token (kept) or `longest` tokens."""
        encoded = encode(Transcript("prompt", prompt, "", ""), self.tokenizer)
        with quiet():
            return self.tokenizer.decode(self.hooked.generate(torch.tensor(encoded.ids, device=self.hooked.device), longest))

    # -- verbs: one line each over their modules -----------------------------------------------

    def mean_ablate(self, reading: Reading | Sequence[Reading], means: ReferenceMeans, **options) -> Ablation:
        """Exact mean-ablation effect of every head at every event; see `ablation.mean_ablate`."""
        from .ablation import mean_ablate

        return mean_ablate(self, reading, means, **options)

    def attribute(self, reading: Reading | Sequence[Reading], means: ReferenceMeans, **options) -> Attribution:
        """Gradient attribution and direct logit attribution; see `attribution.attribute`."""
        from .attribution import attribute

        return attribute(self, reading, means, **options)

    def knock_in(self, readings: Sequence[Reading], heads: HeadSet, kind: Kind, **options) -> KnockedIn:
        """Another text's decision put into each of these, with all controls; see `knock_in.knock_in`."""
        from .knock_in import knock_in

        return knock_in(self, readings, heads, kind, **options)

    def block_reads(self, readings: Sequence[Reading], heads: HeadSet, kind: Kind, span: str, means: ReferenceMeans, sinks: Sinks, **options) -> Blocked:
        """What blocking a span removes of the effect of heads, arms and controls; see `read_blocking.block_reads`."""
        from .read_blocking import block_reads

        return block_reads(self, readings, heads, kind, span, means, sinks, **options)


# -- loading ------------------------------------------------------------------------------------


def _sharing_copy(model):
    """A copy of a Hugging Face model on the same weights that runs sdpa attention.

    Booting a bridge wraps the modules of a model in place, so the copy is made before.
    """
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    plain = copy.deepcopy(model, shared)
    try:
        plain.set_attn_implementation("sdpa")
    except ValueError:  # soft caps and sinks have no sdpa: the copy stays eager
        plain.set_attn_implementation("eager")
    return plain


def _bridge(model):
    """A TransformerBridge around a loaded model, in eager attention, without touching a tokenizer."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    model.set_attn_implementation("eager")
    try:
        return build_bridge_from_module(model, type(model).__name__, hf_config=model.config)
    except (ValueError, KeyError, RuntimeError, AttributeError) as error:
        raise InputError(f"{type(model).__name__}: transformer-lens builds no bridge for this architecture ({first_line(error)})") from None


def _classic_class() -> list[type]:
    """`HookedTransformer` where there is one: it left transformer-lens with 4.0."""
    try:
        from transformer_lens import HookedTransformer
    except (ImportError, AttributeError):
        return []
    return [HookedTransformer]


def _classic(model) -> Classic:
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

    return Classic(model, TransformerLensKeyValueCache.init_cache)
