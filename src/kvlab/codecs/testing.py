"""What holds for every codec, as checks that a package which brings one runs on it in its own tests.

    from kvlab.codecs.testing import conformance
    def test_sign(): conformance("sign", bits=1)

Each check raises `NotConformant`, in one line that says what was expected; kvlab's own codecs pass the same ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvlab.codecs.base import Codec, Encoded, Site, StreamCalibration
from kvlab.codecs.recipes import stream_recipe
from kvlab.codecs.registry import build, class_of
from kvlab.codecs.shared import components
from kvlab.codecs.shared.whitening import fit
from kvlab.codecs.stream.bitstream import frame_bytes, read_frame
from kvlab.core.errors import CodecNotActive, Fault, KvlabError, NonFinite, StreamError
from kvlab.core.recipe import Recipe, StreamRecipe, canonical

SITE = Site(window=0, layer=1, stream="k")
BLOCK = 32
SHAPES = ((2, 1, 64), (1, BLOCK, 64), (2, BLOCK + 1, 63), (8, 2 * BLOCK + 3, 64), (1, 5, 6))
STORABLE = {
    torch.uint8, torch.int8, torch.uint16, torch.int32, torch.float16, torch.bfloat16, torch.float32,
}  # fmt: skip


class NotConformant(Fault):
    """A codec does not do what every codec does; the message names the check."""

    code = "not-conformant"


@dataclass(frozen=True)
class TestedCodec:
    """A codec under test.

    Parameters
    ----------
    recipe : StreamRecipe
        Its settings.
    """

    recipe: StreamRecipe

    def codec(self, heads: int = 2, dim: int = 64) -> Codec:
        """The codec, newly built, with a calibration of the planted stream."""
        return build(self.recipe, planted_calibration(heads, dim))

    def coded(self, x: Tensor) -> tuple[Codec, Encoded, Tensor]:
        """A new codec, what it makes of x [heads, tokens, head_dim], and what it reads back from that."""
        codec = self.codec(x.shape[0], x.shape[2])
        encoded = codec.encode(x, SITE)
        return codec, encoded, codec.decode(encoded)


def conformance(name: str, **settings) -> None:
    """Run all `CHECKS` on a codec of this name with these settings, and with those of its blocks made short.

    Raises
    ------
    NotConformant
        A check failed.
    UserError
        The codec cannot be had: no such name, a broken package, settings that it does not know.
    """
    subject = TestedCodec(stream_recipe(name, **settings))
    if hasattr(subject.recipe, "block_size") and "block_size" not in settings:
        subject = TestedCodec(stream_recipe(name, **settings, block_size=BLOCK))
    for check in CHECKS:
        check(subject)


# ------------------------------------------------------------------------------------------ the checks


def comes_back_as_a_recipe(subject: TestedCodec) -> None:
    """The recipe is JSON and back, and has one identity."""
    both = Recipe(k=subject.recipe, v=subject.recipe)
    again = Recipe.model_validate_json(canonical(both))
    need(again == both and again.recipe_id == both.recipe_id, comes_back_as_a_recipe, "its recipe changes when read")
    need(isinstance(class_of(again.k).per_token, bool), comes_back_as_a_recipe, "`per_token` is no bool")


def codes_any_shape_and_dtype(subject: TestedCodec) -> None:
    """[heads, tokens, head_dim] of any size comes back in its shape, from arrays that can be stored."""
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            _, encoded, decoded = subject.coded(planted(*shape).to(dtype))
            what = f"a tensor {list(shape)} of {dtype}"
            need(
                (encoded.shape, encoded.layer, encoded.stream) == (shape, SITE.layer, SITE.stream),
                codes_any_shape_and_dtype,
                f"{what} is coded as one of {encoded.shape} at layer {encoded.layer} {encoded.stream}",
            )
            need(
                decoded.shape == shape and decoded.dtype == torch.float32 and bool(torch.isfinite(decoded).all()),
                codes_any_shape_and_dtype,
                f"{what} comes back as {list(decoded.shape)} of {decoded.dtype}, or not finite",
            )
            for array in arrays_of(encoded):
                need(
                    array.is_contiguous() and array.dtype in STORABLE,
                    codes_any_shape_and_dtype,
                    f"an array of {array.dtype} cannot be stored; allowed: contiguous, {sorted(map(str, STORABLE))}",
                )


def is_better_than_nothing(subject: TestedCodec) -> None:
    """The error is smaller than that of storing nothing and reading zeros."""
    x = planted(tokens=8 * BLOCK)
    error = (subject.coded(x)[2] - x).square().sum() / x.square().sum()
    need(bool(error < 1), is_better_than_nothing, f"its squared error is {float(error):.3g} of that of zeros")


def stands_every_kind_of_rows(subject: TestedCodec) -> None:
    """Calibrated on rows like them, it codes some without structure, with heavy tails, with a first token far out.

    Their squared error is below twice their square: one that is small in an ill-conditioned metric may be so large.
    """
    for what, rows in unlike(tokens=512 + 4 * BLOCK).items():
        codec, x = build(subject.recipe, calibration_of(rows[:, :512])), rows[:, 512:].clone()
        x[:, 0] = rows[:, 0]
        error = (codec.decode(codec.encode(x, SITE)) - x).square().sum() / x.square().sum()
        need(bool(error < 2), stands_every_kind_of_rows, f"on {what} its squared error is {float(error):.3g} of theirs")


def codes_the_same_every_time(subject: TestedCodec) -> None:
    """Twice the same tensor is twice the same arrays, whatever came in between, in a codec built anew too."""
    first, second = planted(draw=1), 3 * planted(draw=2)
    codec = subject.codec()
    before = codec.encode(first, SITE)
    between = codec.encode(second, SITE)
    need(same(before, codec.encode(first, SITE)), codes_the_same_every_time, "a tensor is coded in two ways")
    need(same(before, subject.codec().encode(first, SITE)), codes_the_same_every_time, "two codecs differ")
    need(not same(before, between), codes_the_same_every_time, "two tensors are coded alike")
    kept = codec.decode(between)
    second.zero_()
    need(torch.equal(codec.decode(between), kept), codes_the_same_every_time, "what is stored changes with its source")


def is_stored_and_read_back(subject: TestedCodec) -> None:
    """The bitstream gives back the arrays, and these alone decode to the same values, block by block too."""
    x = planted(tokens=3 * BLOCK + 1)
    codec, encoded, decoded = subject.coded(x)
    data = frame_bytes(encoded)
    read = read_frame(data)
    need(same(read, encoded), is_stored_and_read_back, "the arrays are others after they were stored")
    fresh = subject.codec().decode(read)
    need(torch.equal(fresh, decoded), is_stored_and_read_back, "a new codec decodes the stored arrays to other values")
    seen = torch.zeros_like(x)
    for index in range(len(encoded.blocks)):
        place, values = codec.decode_block(read_frame(data, only=index), index)
        need(torch.equal(values, decoded[place]), is_stored_and_read_back, f"block {index} alone is other values")
        seen[place] += 1
    need(torch.equal(seen, torch.ones_like(x)), is_stored_and_read_back, "blocks overlap, or leave a value out")


def refuses_what_it_cannot_code(subject: TestedCodec) -> None:
    """NaN, infinity and no tokens are refused, by layer and window."""
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = planted()
        x[1, 3, 5] = bad
        refused(refuses_what_it_cannot_code, f"{bad}", NonFinite, subject.codec().encode, x, SITE)
    empty = planted()[:, :0]
    refused(refuses_what_it_cannot_code, "no tokens", CodecNotActive, subject.codec().encode, empty, SITE)


def refuses_forged_arrays(subject: TestedCodec) -> None:
    """Arrays that the recipe cannot have stored are a `StreamError`, not values and not a crash."""
    codec, encoded, _ = subject.coded(planted(tokens=BLOCK + 7))
    for what, forged in forgeries(encoded):
        refused(refuses_forged_arrays, what, StreamError, codec.decode, forged)


def tells_whether_tokens_depend_on_each_other(subject: TestedCodec) -> None:
    """A codec with `per_token` gives the same values however the tokens are cut into calls."""
    x = planted(tokens=3 * BLOCK)
    codec, _, decoded = subject.coded(x)
    if codec.per_token:
        for cuts in ([1] * 3 * BLOCK, [5, 40, 1, 50], [95, 1]):
            apart = torch.cat([codec.decode(codec.encode(part, SITE)) for part in x.split(cuts, dim=1)], dim=1)
            need(
                torch.equal(apart, decoded),
                tells_whether_tokens_depend_on_each_other,
                "`per_token` is True, and a token's values depend on those beside it",
            )


CHECKS: tuple[Callable[[TestedCodec], None], ...] = (
    comes_back_as_a_recipe,
    codes_any_shape_and_dtype,
    is_better_than_nothing,
    stands_every_kind_of_rows,
    codes_the_same_every_time,
    is_stored_and_read_back,
    refuses_what_it_cannot_code,
    refuses_forged_arrays,
    tells_whether_tokens_depend_on_each_other,
)


# ------------------------------------------------------------------------------------- what they use


def planted(heads: int = 2, tokens: int = 70, dim: int = 64, draw: int = 0) -> Tensor:
    """Gaussian rows of one planted distribution per head: a mean, a decaying spectrum, some loud channels.

    Float32 [heads, tokens, dim]; `draw` chooses the rows, not the distribution.
    """
    plan = torch.Generator().manual_seed(1000 * heads + dim)
    turn = torch.linalg.qr(torch.randn(heads, dim, dim, generator=plan)).Q
    mean = torch.randn(heads, 1, dim, generator=plan)
    loud = 1 + 9 * (torch.rand(heads, 1, dim, generator=plan) > 0.95)
    white = torch.randn(heads, tokens, dim, generator=torch.Generator().manual_seed(draw))
    return ((white * torch.logspace(0, -1, dim)) @ turn + mean) * loud


def unlike(heads: int = 2, tokens: int = 70, dim: int = 64) -> dict[str, Tensor]:
    """Rows of other distributions than the planted one, float32 [heads, tokens, dim], by what they are."""
    source = torch.Generator().manual_seed(heads * dim)
    white, sizes = torch.randn(heads, tokens, dim, generator=source), torch.randn(heads, tokens, 1, generator=source)
    sink = planted(heads, tokens, dim)
    sink[:, 0] = 50 * white[:, 0]
    return {
        "rows without structure": white,
        "rows of sizes with heavy tails": white * sizes.exp(),
        "values with heavy tails": white * torch.randn(heads, tokens, dim, generator=source).mul(0.7).exp(),
        "rows with a first token far from all": sink,
    }


@lru_cache(maxsize=32)
def planted_calibration(heads: int, dim: int) -> StreamCalibration:
    """A whitener and components of the planted stream at `SITE`'s layer, from rows that no check codes."""
    return calibration_of(planted(heads, 1024, dim, draw=99))


def calibration_of(rows: Tensor) -> StreamCalibration:
    """The same of rows [heads, tokens, head_dim], the first of which is the first of a text."""
    heads, _, dim = rows.shape
    white = torch.randn(heads, 4 * dim, dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    queries = white * torch.logspace(1, -1, dim, dtype=torch.float64)
    whitener = fit(queries.mT @ queries / queries.shape[1], ridge=1e-3)
    metric = whitener.chol.double() @ whitener.chol.double().mT
    fitted = dataclasses.replace(components.fit(rows[:, None, 1:], metric), sink=rows[:, 0].contiguous())
    return StreamCalibration(
        whiteners={SITE.layer: whitener},
        components={SITE.layer: fitted},
        stream="k",
        spectra={(stream, SITE.layer): fitted.variance for stream in ("k", "v")},
    )


def forgeries(encoded: Encoded) -> Iterator[tuple[str, Encoded]]:
    """The coded tensor with one thing in it that cannot be, and what that is."""
    first, *others = encoded.blocks
    blocks = [("no blocks", ()), ("a block less", tuple(others)), ("a block more", (first, *encoded.blocks))]
    blocks += [("an array less", (first[:-1], *others)), ("an array more", ((*first, first[0]), *others))]
    for number, array in enumerate(first):
        dtype = torch.int32 if array.dtype != torch.int32 else torch.uint8
        for what, wrong in (
            ("another dtype", array.to(dtype)),
            ("a dimension more", array[None]),
            ("a longer array", torch.cat((array, array[:1]))),
            ("a wider array", torch.cat((array, array), dim=-1)),
            ("a shorter array", array[:-1]),
        ):
            blocks.append((f"{what} in place {number}", ((*first[:number], wrong, *first[number + 1 :]), *others)))
    for what, forged in blocks:
        yield what, dataclasses.replace(encoded, blocks=forged)
    if not encoded.shared:
        yield "an array for all blocks", dataclasses.replace(encoded, shared=(first[0],))


def arrays_of(encoded: Encoded) -> list[Tensor]:
    """Every stored array."""
    return [*encoded.shared, *(array for block in encoded.blocks for array in block)]


def same(one: Encoded, other: Encoded) -> bool:
    """Two codings with equal arrays, bit by bit."""
    ours, theirs = arrays_of(one), arrays_of(other)
    return len(ours) == len(theirs) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))
        for a, b in zip(ours, theirs, strict=True)
    )


def raw(array: Tensor) -> Tensor:
    """The bytes of an array."""
    return array.contiguous().flatten().view(torch.uint8)


def need(holds: bool, check: Callable, otherwise: str) -> None:
    """`NotConformant` unless something holds."""
    if not holds:
        raise NotConformant(f"{check.__name__}: {otherwise}")


def refused(check: Callable, what: str, error: type[KvlabError], act: Callable, *given) -> None:
    """`NotConformant` unless an act is refused with this error."""
    try:
        act(*given)
    except error:
        return
    except Exception as other:  # a codec may raise anything, and that is what is looked for
        raise NotConformant(
            f"{check.__name__}: {what} raises {type(other).__name__} instead of {error.__name__}: {other}"
        ) from other
    raise NotConformant(f"{check.__name__}: {what} is taken; {error.__name__} is due")
