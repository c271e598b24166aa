"""What may surround a Cache: each case runs a model with a cache and returns its tokens; the table says how it ends.

PYTHONPATH=src:tests python tests/cache/surroundings.py     writes docs/transformers.md from the table
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, TextIteratorStreamer

from kvlab import Cache, recipe
from kvlab.codecs.base import StreamCalibration
from kvlab.codecs.klt import KltStream
from kvlab.codecs.shared import components
from kvlab.core.errors import UserError
from kvlab.core.recipe import Recipe

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
BEGIN, END = "<!-- surroundings:begin -->", "<!-- surroundings:end -->"
LAYERS, HEADS, HEAD_DIM, NEW = 2, 2, 16, 6
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
WINDOW = 4096  # bytes that are also held decoded: some of the tokens, so that both ways are taken
IDS = torch.randint(4, 64, (1, 20), generator=torch.Generator().manual_seed(1))
OTHER = torch.randint(4, 64, (1, 13), generator=torch.Generator().manual_seed(2))
MASK = torch.ones_like(IDS)
PADDED = {"attention_mask": torch.cat([MASK, torch.tensor([[0] * 7 + [1] * 13])])}
BATCH = torch.cat([IDS, torch.nn.functional.pad(OTHER, (7, 0))])

Make = Callable[[nn.Module], object]


def model(seed: int = 11, **changes) -> LlamaForCausalLM:
    """A random model that tells its tokens apart well enough for 8 bits, and not for two (`test_surroundings`)."""
    made = LlamaForCausalLM(LlamaConfig(**SHAPE | changes))
    source = torch.Generator().manual_seed(seed)
    for weight in made.parameters():
        if weight.dim() == 2:
            weight.data = torch.randn(weight.shape, generator=source) * 0.15
    for layer in made.model.layers:
        layer.self_attn.o_proj.weight.data *= 0.35
    return made.eval()


def generated(own: nn.Module, cache: object, ids: Tensor = IDS, **options) -> Tensor:
    """Greedy tokens, the same number in every case; those of beams, of samples and so on by `options`."""
    torch.manual_seed(5)
    options = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(ids)} | options
    return own.generate(ids, past_key_values=cache, **options)


def prompted(own: nn.Module, cache: object) -> object:
    """The cache with all of the prompt but its last six tokens."""
    with torch.no_grad():
        own(IDS[:, :14], past_key_values=cache)
    return cache


# --- cases -----------------------------------------------------------------------------------------------------------


def plain(make: Make) -> Tensor:
    own = model()
    return generated(own, make(own))


def ways(**options) -> Callable[[Make], Tensor]:
    """A way of generating."""

    def run(make: Make) -> Tensor:
        own = model()
        return generated(own, make(own), **options)

    return run


def assisted(make: Make) -> Tensor:
    own = model()
    return generated(own, make(own), assistant_model=model())


def under(*contexts: Callable, made: bool = True, used: bool = True) -> Callable[[Make], Tensor]:
    """Contexts in which the cache is made, or used, or both."""

    def run(make: Make) -> Tensor:
        own = model()
        with contextlib.ExitStack() as stack:
            for context in contexts if made else ():
                stack.enter_context(context())
            cache = make(own)
        with contextlib.ExitStack() as stack:
            for context in contexts if used else ():
                stack.enter_context(context())
            return generated(own, cache).clone()

    return run


def between(first: Callable, then: Callable) -> Callable[[Make], Tensor]:
    """A prompt in one context, the rest in another."""

    def run(make: Make) -> Tensor:
        own = model()
        cache = make(own)
        with first():
            own(IDS[:, :14], past_key_values=cache)
        with then():
            return generated(own, cache).clone()

    return run


autocast = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def nothing():
    yield


@functools.cache
def compiling() -> tuple[nn.Module, Callable]:
    """A model, and itself compiled; once for all codecs, since it takes seconds."""
    own = model()
    return own, torch.compile(own, backend="eager")


def compiled(make: Make) -> Tensor:
    own, fast = compiling()
    cache, out, tokens = make(own), IDS, IDS
    fast = own if isinstance(cache, DynamicCache) else fast  # the same tokens, and sooner
    with torch.no_grad():
        for _ in range(4):
            tokens = fast(tokens, past_key_values=cache).logits[:, -1:].argmax(-1)
            out = torch.cat([out, tokens], dim=1)
    return out


def threads(*texts: Tensor) -> Callable[[Make], Tensor]:
    """As many threads as texts on one model, each with its cache, for several rounds; the tokens of all."""

    def run(make: Make) -> Tensor:
        own, found, failed = model(), {}, []

        def work(number: int) -> None:
            try:
                for turn in range(3):
                    found[number, turn] = generated(own, make(own), texts[number]).flatten()
            except BaseException as error:
                failed.append(error)

        started = [threading.Thread(target=work, args=(number,)) for number in range(len(texts))]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)  # turns so short that a mix-up would show
        try:
            for thread in started:
                thread.start()
            for thread in started:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        for error in failed:
            raise error
        return torch.cat([found[key] for key in sorted(found)])

    return run


class Numbers:
    """A tokenizer that writes tokens as numbers."""

    def decode(self, ids, **_) -> str:
        return "".join(f"{int(i)} " for i in ids)


def streamed(make: Make) -> Tensor:
    own = model()
    streamer = TextIteratorStreamer(Numbers(), timeout=60)
    thread = threading.Thread(target=generated, args=(own, make(own)), kwargs={"streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    return torch.tensor([int(number) for number in text.split()])


def in_turns(make: Make) -> Tensor:
    pair = [model(), model(seed=5)]
    caches = [prompted(own, make(own)) for own in pair]
    return torch.cat([generated(own, cache) for own, cache in zip(pair, caches, strict=True)])


def another_model(make: Make) -> Tensor:
    return generated(model(), make(model(seed=5)))


def copied(copy_of: Callable) -> Callable[[Make], Tensor]:
    """A prompt that goes on in two ways."""

    def run(make: Make) -> Tensor:
        own = model()
        cache = prompted(own, make(own))
        twin = copy.deepcopy(cache) if isinstance(cache, DynamicCache) else copy_of(cache)
        return torch.cat(
            [generated(own, twin, torch.cat([IDS, OTHER[:, :3]], dim=1))[:, 14:], generated(own, cache)], dim=1
        )

    return run


def pickled(make: Make) -> Tensor:
    own = model()
    return generated(own, pickle.loads(pickle.dumps(prompted(own, make(own)))))


def saved(make: Make) -> Tensor:
    own, file = model(), io.BytesIO()
    torch.save(prompted(own, make(own)), file)
    file.seek(0)
    return generated(own, torch.load(file, weights_only=False))


def model_copied(make: Make) -> Tensor:
    """The model goes on, and so does its copy with a cache of its own."""
    own = model()
    cache = prompted(own, make(own))
    twin = copy.deepcopy(own)
    return torch.cat([generated(own, cache), generated(twin, make(twin))])


def model_saved(make: Make) -> Tensor:
    own, file = model(), io.BytesIO()
    cache = prompted(own, make(own))
    torch.save(own, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    return torch.cat([generated(own, cache), generated(twin, make(twin))])


def with_a_copy(make: Make) -> Tensor:
    own = model()
    return generated(copy.deepcopy(own), make(own))


def cast_before(make: Make) -> Tensor:
    own = model()
    cache = make(own)
    return generated(own.to(torch.bfloat16), cache)


def cast_within(make: Make) -> Tensor:
    own = model()
    cache = prompted(own, make(own))
    return generated(own.to(torch.bfloat16), cache)


def cast_and_back(make: Make) -> Tensor:
    own = model()
    cache = prompted(own, make(own))
    return generated(own.to(torch.bfloat16).to(torch.float32), cache)


def to_meta(make: Make) -> Tensor:
    own = model()
    cache = make(own)
    with torch.no_grad():
        return own.to("meta")(IDS.to("meta"), past_key_values=cache).logits


def made_on_meta(make: Make) -> Tensor:
    with torch.device("meta"):
        own = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    with torch.no_grad():
        return own(IDS.to("meta"), past_key_values=make(own)).logits


def with_gradients(make: Make) -> Tensor:
    own = model()
    return own(IDS, past_key_values=make(own)).logits


def frozen_but_for_queries(make: Make) -> Tensor:
    """The gradient of the last layer's queries, the only weights that learn; by tokens so few that they are not cut."""
    own = model().requires_grad_(False)
    cache = prompted(own, make(own))
    weight = own.model.layers[-1].self_attn.q_proj.weight.requires_grad_(True)
    own(IDS[:, 14:], past_key_values=cache).logits.square().mean().backward()
    return weight.grad.abs().flatten().argsort(descending=True)[:1]


def training(make: Make) -> Tensor:
    own = model(attention_dropout=0.3).train()
    return generated(own, make(own))


def checkpointing(make: Make) -> Tensor:
    own = model().train()
    own.gradient_checkpointing_enable()
    return own(IDS, past_key_values=make(own)).logits


class Stopped(Exception):
    """What goes wrong in the middle of a forward."""


def stopped(own: nn.Module, cache: object) -> None:
    """A forward that ends in its second layer's attention."""

    def stop(*_):
        raise Stopped

    handle = own.model.layers[1].self_attn.register_forward_pre_hook(stop)
    with contextlib.suppress(Stopped), torch.no_grad():
        own(IDS, past_key_values=cache)
    handle.remove()


def after_a_stop(make: Make) -> Tensor:
    own = model()
    cache = make(own)
    stopped(own, cache)
    return generated(own, cache)


def after_a_reset(make: Make) -> Tensor:
    own = model()
    cache = make(own)
    stopped(own, cache)
    if isinstance(cache, DynamicCache):
        cache = make(own)  # its reset keeps the tokens' places
    else:
        cache.reset()
    return generated(own, cache)


def wrapped(make: Make) -> Tensor:
    """Every module's forward replaced, as accelerate does it, after the cache was made."""
    own = model()
    cache = make(own)
    for module in own.modules():

        @functools.wraps(module.forward)
        def forward(*args, _before=module.forward, **kwargs):
            return _before(*args, **kwargs)

        module.forward = forward
    return generated(own, cache)


def past_the_hooks(make: Make) -> Tensor:
    own = model()
    with torch.no_grad():
        return own.model.forward(IDS, past_key_values=make(own)).last_hidden_state


def two_threads_one_cache(make: Make) -> Tensor:
    """Another thread begins a forward with the cache while one runs; what that one meets is what the case is."""
    own = model()
    cache, met = make(own), []

    def other() -> None:
        try:
            with torch.no_grad():
                own(OTHER, past_key_values=cache)
        except BaseException as error:
            met.append(error)

    def meanwhile(*_):
        handle.remove()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    handle = own.model.layers[1].self_attn.register_forward_pre_hook(meanwhile)
    out = generated(own, cache)
    for error in met:
        raise error
    return out


# --- the table -------------------------------------------------------------------------------------------------------

SAME = "same tokens"
META = "the model is on the meta device, where it has no numbers; load its weights first"
NOT_OURS = (
    "K and V came to the cache from no forward of the model that it was made for: from another model (a copy is one),"
    " or past the hooks, by .forward(); make a Cache for the model that runs, and call that"
)
SAVED = (
    "a Cache cannot be pickled or saved: it watches its model in this process; copy it with copy.deepcopy, or keep a"
    " text's K and V in a file with `kvlab snapshot save`"
)
UNFINISHED = (
    "a forward with this cache ended before its last layer, or still runs in another thread, so that its layers hold"
    " different tokens; call reset() and give the text again, and each thread a cache of its own"
)
MOVED = (
    "the cache holds K in torch.float32 on cpu, and this call has torch.bfloat16 on cpu: the model was moved, or"
    " autocast begun or ended, in the middle of a text; call reset() and give the text again"
)
TURNED = (
    "the model's rotary frequencies are others than those that turned the tokens in the cache, as after model.to() to"
    " another dtype and back; call reset() and give the text again"
)
GRADIENTS = "gradients do not pass through a coded cache; run the model under torch.no_grad()"
DROPPED = (
    "the model was given this cache and handed it no K and V, as in training mode with gradient checkpointing; call"
    " model.eval(), or give the cache to the model whose attention uses it"
)


@dataclass(frozen=True)
class Case:
    """One surrounding.

    Parameters
    ----------
    run : callable
        Given what makes a cache for a model, the tokens.
    end : str
        `SAME`, or the line that says why not.
    identity : str or None
        The same for the codec `identity`, where it ends otherwise: it turns nothing back.
    """

    run: Callable[[Make], Tensor]
    end: str = SAME
    identity: str | None = None

    def ends(self, codec: str) -> str:
        return self.identity if self.identity and codec == "identity" else self.end


CASES = {
    "`generate`, greedy": Case(plain),
    "beam search": Case(ways(num_beams=3)),
    "left padding, beam search": Case(ways(num_beams=2, ids=BATCH, **PADDED)),
    "sampling": Case(ways(do_sample=True, temperature=2.0)),
    "prompt lookup": Case(ways(prompt_lookup_num_tokens=3)),
    "an assistant model": Case(assisted),
    "a streamer in a thread": Case(streamed),
    "`torch.inference_mode`": Case(under(torch.inference_mode)),
    "the cache made in inference mode, used outside": Case(under(torch.inference_mode, used=False)),
    "a prompt in inference mode, the rest under `no_grad`": Case(between(torch.inference_mode, torch.no_grad)),
    "a prompt under `no_grad`, the rest in inference mode": Case(between(torch.no_grad, torch.inference_mode)),
    "autocast": Case(under(autocast)),
    "the cache made under autocast, used outside": Case(under(autocast, used=False)),
    "the cache made outside of autocast, used under it": Case(under(autocast, made=False)),
    "autocast from the middle of a text on": Case(between(torch.no_grad, autocast)),
    "autocast up to the middle of a text": Case(between(lambda: under_both(autocast, torch.no_grad), torch.no_grad)),
    "`torch.set_default_dtype(torch.float64)`": Case(under(lambda: default_dtype(torch.float64))),
    "`torch.set_default_dtype(torch.bfloat16)`": Case(under(lambda: default_dtype(torch.bfloat16))),
    'the cache made under `torch.device("meta")`': Case(under(lambda: torch.device("meta"), used=False)),
    "`torch.use_deterministic_algorithms(True)`": Case(under(deterministic)),
    "`torch.compile(model)`, graphs broken at the cache": Case(compiled),
    "threads on one model, texts of one length": Case(threads(IDS, IDS.flip(1))),
    "threads on one model, texts of different lengths": Case(threads(IDS, OTHER, IDS.flip(1))),
    "threads with one cache": Case(two_threads_one_cache, UNFINISHED),
    "two models in turns, a cache each": Case(in_turns),
    "a model that the cache was not made for": Case(another_model, NOT_OURS),
    "`model.model.forward(...)`, past the hooks": Case(past_the_hooks, NOT_OURS),
    "`copy.deepcopy(cache)`": Case(copied(copy.deepcopy)),
    "`copy.copy(cache)`": Case(copied(copy.copy)),
    "`pickle.dumps(cache)`": Case(pickled, SAVED),
    "`torch.save(cache)`": Case(saved, SAVED),
    "`copy.deepcopy(model)` while it has a cache": Case(model_copied),
    "`torch.save(model)` while it has a cache": Case(model_saved),
    "the cache of a model with that model's copy": Case(with_a_copy, NOT_OURS),
    "`model.to(dtype)` before the cache is used": Case(cast_before),
    "`model.to(dtype)` in the middle of a text": Case(cast_within, MOVED),
    "`model.to(dtype)` and back in the middle of a text": Case(cast_and_back, TURNED, identity=SAME),
    '`model.to("meta")` after the cache was made': Case(to_meta, META),
    "a model on the meta device": Case(made_on_meta, META),
    "modules whose `forward` is replaced afterwards": Case(wrapped),
    "training mode with dropout": Case(training),
    "gradients": Case(with_gradients, GRADIENTS),
    "gradients of the last layer's queries alone": Case(frozen_but_for_queries),
    "gradient checkpointing in training mode": Case(checkpointing, DROPPED),
    "an error in the middle of a forward, then the cache again": Case(after_a_stop, UNFINISHED),
    "an error in the middle of a forward, then `reset()`": Case(after_a_reset),
}


@contextlib.contextmanager
def under_both(*contexts: Callable):
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


@functools.cache
def fitted() -> StreamCalibration:
    """Components of the model's K and V, from one text of random tokens."""
    own, rows = model(), {}
    for layer in range(LAYERS):
        for part in ("k", "v"):

            def keep(_module, _given, out, at=(layer, part)):
                rows[at] = out[0].unflatten(1, (HEADS, HEAD_DIM)).transpose(0, 1).clone()

            getattr(own.model.layers[layer].self_attn, f"{part}_proj").register_forward_hook(keep)
    with torch.no_grad():
        own(torch.randint(4, 64, (1, 128), generator=torch.Generator().manual_seed(9)))
    return {
        part: StreamCalibration(components={i: components.fit(rows[i, part][:, None], None) for i in range(LAYERS)})
        for part in ("k", "v")
    }


class Fitted:
    """A calibration of both streams."""

    def stream(self, _recipe, part: str, *_) -> StreamCalibration:
        return fitted()[part]


def cached(of: Recipe, calibration: Fitted | None = None) -> Make:
    return lambda own: Cache(own, of, calibration, window_bytes=WINDOW)


CODECS = {
    "identity": cached(recipe("identity")),
    "int": cached(recipe("int", bits=8)),
    "hadamard": cached(recipe("hadamard", bits=8)),
    "kivi": cached(recipe("kivi", bits=8, block_size=8)),
    "d4": cached(recipe("d4", bits=8)),
    "e8": cached(recipe("e8", bits=7)),
    "fp8": cached(recipe("fp8", block_size=8)),
    "klt": cached(Recipe(k=KltStream(bits=8, block_size=16), v=KltStream(bits=8, block_size=16)), Fitted()),
}


@functools.cache
def ordinary(name: str) -> Tensor:
    """What the case gives with transformers' own cache."""
    return CASES[name].run(lambda _model: DynamicCache())


def ended(name: str, codec: str) -> str:
    """How a case ends with a codec: `SAME`, other tokens, or the line of a refusal."""
    try:
        out = CASES[name].run(CODECS[codec])
    except UserError as error:
        return str(error)
    return SAME if torch.equal(out, ordinary(name)) else f"{out.tolist()} instead of {ordinary(name).tolist()}"


def table() -> str:
    """The table of docs/transformers.md, and what is said where a case is refused."""
    refusals = list(dict.fromkeys(case.end for case in CASES.values() if case.end != SAME))

    def cell(name: str, codec: str) -> str:
        end = CASES[name].ends(codec)
        return "same" if end == SAME else f"refused ({refusals.index(end) + 1})"

    head = ["surrounding", *CODECS]
    rows = [[name, *(cell(name, codec) for codec in CODECS)] for name in CASES]
    lines = [" | ".join(row) for row in (head, ["---"] * len(head), *rows)]
    said = "\n".join(f"{number}. {line}" for number, line in enumerate(refusals, 1))
    shown = "\n".join(f"| {line} |" for line in lines)
    return f"{shown}\n\nWhat is said where it is refused, a `CapabilityError` each:\n\n{said}\n"


def page() -> str:
    """docs/transformers.md with its table as it has to be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
