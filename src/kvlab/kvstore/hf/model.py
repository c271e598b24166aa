"""A transformers model whose K and V may lie in a pager: what has to be true of it, and one forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import Cache

from kvlab.cache.hf.codec_tables import LayerShape
from kvlab.cache.hf.kv_cache import shape_of, windows_of
from kvlab.cache.hf.rope import CHANGING, find_rotary, turns_by_layer
from kvlab.cache.rope_turn import RopeTurn
from kvlab.core.decoder import FULL, SLIDING, rope_of, rope_types
from kvlab.core.errors import CapabilityError, ModelError, NonFinite, UserError
from kvlab.core.model import ModelInfo
from kvlab.engines import products
from kvlab.engines.capability import check
from kvlab.engines.hf.engine import HFEngine
from kvlab.engines.hf.rotary import Rotary
from kvlab.engines.hooks import attention_layers
from kvlab.kvstore.hf.queries import LastQueries
from kvlab.kvstore.paging.geometry import DTYPES, Geometry, named
from kvlab.kvstore.snapshot.identity import ContextIdentity, identity_of
from kvlab.kvstore.snapshot.numerics import PRODUCTS


class PagedModel:
    """A loaded model, fit to be paged.

    Parameters
    ----------
    model : PreTrainedModel
        In evaluation mode, with the weights of `info`. Layers of an adapter and quantised ones are refused. Weights
        that were changed in place, by an adapter that was merged into them, cannot be told from the files' own:
        they have to be named in the salt of whoever saves what they compute.
    info : ModelInfo

    Attributes
    ----------
    dtype : {"float32", "bfloat16", "float16"}
        Of K and V.
    device : str

    Raises
    ------
    CapabilityError
        The model would get it silently wrong, or compute by other weights than those of its files, see
        `fitness.refuse_unfit`.
    """

    def __init__(self, model: nn.Module, info: ModelInfo):
        self.model, self.info = model, info
        refuse_unfit(model, info)
        self.dtype = named(model.dtype)
        self.device = str(model.device)

    @classmethod
    def load(cls, info: ModelInfo, dtype: str = "float32", attention: str = "sdpa") -> PagedModel:
        """Load a model's files, on the GPU when there is one.

        Parameters
        ----------
        info : ModelInfo
        dtype : {"float32", "bfloat16"}
        attention : {"sdpa", "eager"}

        Raises
        ------
        UnknownName
            For another dtype or attention.
        ModelError
            When the files cannot be loaded.
        NonFinite
            When a weight is NaN or infinite.
        """
        check("hf", dtype, attention, info)
        return cls(HFEngine(info, dtype, attention, info.max_positions).model, info)

    @property
    def attention(self) -> str:
        """Which attention runs."""
        return self.model.config._attn_implementation

    @property
    def made(self) -> dict[str, str]:
        """What decides the last bits of K and V beside the weights: for the manifest of a snapshot."""
        if self.device.startswith("cuda"):
            where = {"device": torch.cuda.get_device_name(self.device)}
        else:
            capability = torch.backends.cpu.get_cpu_capability()
            where = {"device": f"{self.device} {capability}", "threads": str(torch.get_num_threads())}
        if products.are_chosen_in(self.model):
            where[PRODUCTS] = "in float32"
        return {"engine": "transformers", "attention": self.attention, **where}

    def geometry(self, chunk_tokens: int = 64) -> Geometry:
        """The cache of this model, cut into such chunks."""
        info = self.info
        return Geometry(info.n_layers, info.n_kv_heads, info.head_dim, self.dtype, chunk_tokens)

    def identity(self, chunk_tokens: int = 64, salt: str = "") -> ContextIdentity:
        """Whose K and V these are, with the rotary embedding that runs, whatever config.json says."""
        return self._identity.model_copy(update={"geometry": self.geometry(chunk_tokens), "salt": salt})

    @cached_property
    def _identity(self) -> ContextIdentity:
        """As the files were when it was first asked for."""
        return identity_of(self.info, self.dtype, rope=rope_of(self.model.config.to_dict()))

    @property
    def scaling(self) -> float:
        """What attention multiplies its scores by."""
        return attention_layers(self.model, self.info)[0].scaling

    @cached_property
    def rotary(self) -> Rotary:
        """The rotary embedding; `CapabilityError` when what it does to K cannot be said."""
        return find_rotary(self.model, self.info.head_dim)

    def turns(self, tokens: int) -> list[RopeTurn]:
        """By layer, the rotary embedding of positions 0 to `tokens`: for a codec that sees K before it."""
        like = torch.empty(0, dtype=DTYPES[self.dtype], device=self.device)
        found = turns_by_layer(self.rotary, torch.arange(tokens, device=self.device)[None], like)
        there = {id(rows): RopeTurn(rows[0].cos.cpu(), rows[0].sin.cpu()) for rows in found}  # payloads lie there
        return [there[id(rows)] for rows in found]

    @torch.no_grad()
    def forward(
        self,
        tokens: list[int],
        cache: Cache,
        columns: Tensor,
        start: int,
        keep: int,
        queries: LastQueries | None = None,
    ) -> Tensor:
        """One forward of one sequence.

        Parameters
        ----------
        tokens : list of int
        cache : Cache
            Takes their K and V, and gives attention what it reads.
        columns : Tensor
            int64 [rows], the position of each row that the cache will give.
        start : int
            Position of the first token.
        keep : int
            Logits are wanted of so many last tokens.
        queries : LastQueries, optional
            Notes those of the last token.

        Returns
        -------
        Tensor
            float32 [keep, vocab].

        Raises
        ------
        NonFinite
            When a logit is NaN or infinite.
        """
        places = torch.arange(start, start + len(tokens), device=self.device)
        with ExitStack() as stack:
            if queries is not None:
                stack.enter_context(queries.watching())
            output = self.model(
                torch.tensor([tokens], device=self.device),
                attention_mask=self._masks(places, columns),
                position_ids=places[None],
                past_key_values=cache,
                use_cache=False,  # that the model makes none of its own
                logits_to_keep=keep,
            )
        logits = output.logits[0].float()
        if not bool(torch.isfinite(logits).all()):
            raise NonFinite(
                f"a logit after tokens {start} to {start + len(tokens)} is NaN or infinite", code="non-finite.logit"
            )
        return logits

    def _masks(self, places: Tensor, columns: Tensor) -> Tensor | dict[str, Tensor]:
        """The mask of all layers, or of each kind where there are some with a window and some without."""
        dtype, windows = DTYPES[self.dtype], set(self.info.windows)
        if len(windows) == 1:
            return mask(places, columns, dtype, *windows)
        return {SLIDING if window else FULL: mask(places, columns, dtype, window) for window in windows}


def mask(places: Tensor, columns: Tensor, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """What is added to attention's scores [1, 1, queries, columns]: a query reads what stands at or before it.

    With a window, no further back than the window reaches, itself counted. By positions, for a column may hold any of
    them. The least number stands in for minus infinity, as in transformers itself: its exponential is 0 beside any
    score.
    """
    hidden = columns[None] > places[:, None]
    if window is not None:
        hidden |= columns[None] <= places[:, None] - window
    return torch.zeros(hidden.shape, dtype=dtype, device=places.device).masked_fill_(hidden, torch.finfo(dtype).min)[
        None, None
    ]


def refuse_tokens(model: PagedModel, tokens: Sequence[int], earlier: int = 0) -> None:
    """Refuse what a model cannot prefill after `earlier` other tokens.

    Raises
    ------
    UserError
        No tokens, or one that is none of the model's.
    ModelError
        They are more than the model has positions for.
    """
    if not len(tokens):
        raise UserError("no tokens were given; a forward takes at least one", code="user.no-tokens")
    if bad := [token for token in tokens if not 0 <= token < model.info.vocab_size]:
        raise UserError(f"token {bad[0]} is none of the model's {model.info.vocab_size}", code="user.no-such-token")
    refuse_length(model, earlier + len(tokens))


def refuse_length(model: PagedModel, length: int) -> None:
    """`ModelError` when a context would be longer than the model has positions for."""
    if length > model.info.max_positions:
        raise ModelError(
            f"{length} tokens are more than the model's {model.info.max_positions} positions", code="model.too-long"
        )


# Which loaded models may be paged, and their K and V saved as those of their files.

MASKABLE = ("eager", "sdpa")  # attention that is given a mask of its own for every query and column
OWN = ("torch.nn.", "transformers.")  # where the classes of a model's own layers are defined


def refuse_unfit(model: nn.Module, info: ModelInfo) -> None:
    """Refuse a model that would be paged wrongly, or whose K and V are not those of its files.

    Raises
    ------
    CapabilityError
        Another shape, window or class than `info` says, attention by a recurrent state, a rotary embedding that changes
        with the length, attention that takes no mask, dropout, quantised weights, layers of an adapter.
    """
    found, wanted = shape_of(model), LayerShape(info.n_layers, info.n_kv_heads, info.head_dim)
    if found != wanted or type(model).__name__ != info.architecture:
        raise CapabilityError(
            f"the loaded model is {type(model).__name__} with {found.layers} layers of {found.heads} KV heads of "
            f"{found.head_dim}, {info.path} is {info.architecture} with {wanted.layers} of {wanted.heads} of "
            f"{wanted.head_dim}; give the folder that it was loaded from",
            code="capability.other-model",
        )
    if (ran := tuple(windows_of(model))) != info.windows:
        raise CapabilityError(
            f"the layers of the loaded model see windows of {_told(ran)} tokens, those of {info.path} of"
            f" {_told(info.windows)}; give the folder that it was loaded from",
            code="capability.other-window",
        )
    attention, moving = model.config._attn_implementation, rope_types(rope_of(model.config.to_dict())) & set(CHANGING)
    if attention not in MASKABLE:
        raise CapabilityError(
            f"attention {attention!r} takes no mask of its own for every row, which a paged cache needs;"
            f" allowed: {', '.join(MASKABLE)}",
            code="capability.no-mask",
        )
    if moving:
        raise CapabilityError(
            f"rope type {min(moving)!r} changes its frequencies with the length, so that a stored K is no longer what"
            " the model would compute; it cannot be paged",
            code="capability.moving-rope",
        )
    if model.training:
        raise CapabilityError(
            "the model is in training mode, where dropout may change what it computes; call eval()",
            code="capability.training",
        )
    if named(model.dtype) not in DTYPES:
        raise CapabilityError(
            f"the model computes in {named(model.dtype)}; allowed: {', '.join(DTYPES)}", code="capability.dtype"
        )
    if found := next(_other_weights(model), None):
        code, sign = found
        raise CapabilityError(
            f"{sign}, so that what it computes is not what the files of {info.path} say; load the model as they are,"
            " and merge an adapter into files of its own",
            code=code,
        )


def _told(windows: Sequence[int | None]) -> str:
    return ", ".join(sorted({"all" if window is None else str(window) for window in windows}))


def _other_weights(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Signs that the model does not compute by the weights of its files, as they are: a code, and in words."""
    if getattr(model.config, "quantization_config", None) is not None:
        yield "capability.quantised", "the model is quantised, as its configuration says"
    for name, module in model.named_modules():
        if not f"{type(module).__module__}.".startswith(OWN) and type(module) is not products.Linear:
            sign = f"layer {name or 'the whole'} is a {type(module).__qualname__} of another library"
            yield "capability.other-layers", sign
    for name, weight in model.named_parameters():
        if not weight.is_floating_point():
            yield "capability.other-weights", f"the weight {name} is {named(weight.dtype)}"
