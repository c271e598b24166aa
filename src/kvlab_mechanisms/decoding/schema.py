"""Texts of a JSON schema and no others while a model writes: xgrammar's masks, behind a check of what it keeps.

XGrammar (Dong et al. 2024, 2411.15100) compiles a schema to a pushdown automaton and fills a mask of the vocabulary at
each step. Version 0.2.8 passes over words that it does not keep (``not``, ``uniqueItems``, an `if`), and over what
stands beside an ``anyOf`` or a ``$ref``. A schema of which it would promise more than it keeps is refused here, so that
every text that can be ended is valid. What is left is of bytes: inside of strings version 0.2.8 also allows those of a
surrogate, and in patterns overlong ones, which are no UTF-8.

A text has no white space and its properties in their declared order, and no others; a number has the one spelling that
xgrammar gives it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from jsonschema import Draft202012Validator, SchemaError
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from kvlab.core.errors import CapabilityError, ParamsError, suggestion

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, TokenizerInfo

NOTES = {"title", "description", "default", "examples", "$schema", "$id", "$defs", "definitions", "$comment"}
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
READ: dict[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern"},
    "integer": BOUNDS,
    "number": BOUNDS,
    "boolean": set(),
    "null": set(),
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
"""Words that xgrammar keeps, by the type that has them."""
WHOLE = {"enum", "const", "anyOf", "$ref"}  # each says all of a value: what stands beside it is passed over
MOST_REPEATS = 128  # of a part of a pattern; more of them break xgrammar 0.2.8 (mlc-ai/xgrammar#863)
PATTERN = re.compile(
    r"""\^?(?: \\[dws] | \\[^\w\s"\\]                          # a kind of characters, one that means itself
      | \[(?!\^)(?: \\[dws] | \\[^\w\s] | [^\\\]\x00-\x1f] )+\]  # one of these
      | \[\^(?: \\[nrt] | \\[^\w\s] | [^\\\]\x00-\x1f] )+\]      # any but these
      | \((?!\?) | \(\?: | \{\d+(?:,\d*)?\}                      # a group; how often
      | [^\\"^$\[({\x00-\x1f]
    )*\$?""",
    re.VERBOSE,
)
"""Patterns that mean the same to xgrammar, which finds them in the whole string, as to whoever reads the text.

Quotes, backslashes and control characters would stand in the text unescaped; anchors amid a pattern and looking ahead
are passed over; ``\\W`` and its like are of ASCII alone.
"""
CONTROL = re.compile(rb"[\x00-\x1f]")


def constrained(schema: Mapping | bool, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> LogitsProcessor:
    """A logits processor of transformers that allows texts of a schema alone; one for each call of `generate`.

    Parameters
    ----------
    schema : mapping or bool
        JSON Schema 2020-12, of the words in `READ` and `WHOLE`.
    vocabulary : int
        Of the model's logits, which may be more than the tokenizer's.

    Raises
    ------
    ParamsError
        The schema is not read; the message names the place and the word.
    CapabilityError
        It allows no text at all, or xgrammar is not installed.
    """
    found = compiled(schema, tokens_of(tokenizer, vocabulary))
    from xgrammar.contrib.hf import LogitsProcessor as Processor

    return Processor(found)


def tokens_of(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> TokenizerInfo:
    """A tokenizer's vocabulary, as `tokens` makes it; special tokens are no text, and its ends end one."""
    xgrammar = _library()
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary)
    special = {*info.special_token_ids, *info.stop_token_ids, *tokenizer.all_special_ids}
    texts = [None if token in special else text for token, text in enumerate(info.decoded_vocab)]
    return tokens(texts, info.stop_token_ids)


def tokens(texts: list[bytes | None], ends: list[int]) -> TokenizerInfo:
    """A vocabulary of these texts.

    A token that holds a control character is no text either: without white space JSON has none, and xgrammar 0.2.8
    lets them into strings whose length is bounded, which `json.loads` then refuses.

    Parameters
    ----------
    texts : list of bytes or None
        Of each token; None for one that is no text.
    ends : list of int
        Tokens that are allowed exactly where a text may end.

    Raises
    ------
    ParamsError
        An end is not of the vocabulary.
    """
    if not ends or any(not 0 <= end < len(texts) for end in ends):
        raise ParamsError(
            f"tokens {ends} are to end texts; allowed: from 0 to {len(texts) - 1}, at least one",
            code="params.end-tokens",
        )
    plain = [b"" if text is None or CONTROL.search(text) else text for text in texts]
    return _library().TokenizerInfo(plain, vocab_size=len(texts), stop_token_ids=ends)


def compiled(schema: Mapping | bool, info: TokenizerInfo) -> CompiledGrammar:
    """The grammar of a schema over a vocabulary; raises as `constrained` does."""
    xgrammar = _library()
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        types = f"; allowed: {', '.join(READ)}" if list(error.path)[-1:] == ["type"] else ""
        raise ParamsError(
            f"{error.json_path.replace('$', '#', 1)} is no schema: {error.message}{types}", code="params.no-schema"
        ) from None
    refuse_unread(schema)
    try:
        found = xgrammar.GrammarCompiler(info).compile_json_schema(
            json.dumps(schema), any_whitespace=False, separators=(",", ":")
        )
    except RuntimeError as error:
        said = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", " ".join(str(error).split()))
        raise ParamsError(f"xgrammar does not read the schema: {said}", code="params.grammar") from None
    Steps(found).mask()
    return found


class Steps:
    """A text as it is written, a token at a time.

    Parameters
    ----------
    grammar : CompiledGrammar
        As `compiled` makes it; many texts may be written by one.
    """

    def __init__(self, grammar: CompiledGrammar):
        xgrammar = _library()
        self._apply, self.size = xgrammar.apply_token_bitmask_inplace, grammar.tokenizer_info.vocab_size
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._bits = xgrammar.allocate_token_bitmask(1, self.size)
        self._words = self._bits.numpy()  # the same memory

    @property
    def ended(self) -> bool:
        """Whether a token has ended the text; nothing may follow."""
        return self._matcher.is_terminated()

    def mask(self) -> Tensor:
        """The tokens that may follow as bits, int32 [ceil(vocabulary / 32)], the lowest bit first; none after the end.

        The next call writes into the same tensor.

        Raises
        ------
        CapabilityError
            None may and the text has no end here: the schema allows none, or the vocabulary lacks single bytes.
        """
        self._fill()
        return self._bits[0]

    def constrain(self, logits: Tensor) -> Tensor:
        """Logits [vocabulary] in which what is not allowed became minus infinity, in place; raises as `mask` does.

        A row may be longer than the vocabulary, as models pad it; nothing beyond it is allowed.
        """
        self._fill()
        self._apply(logits[None], self._bits.to(logits.device), vocab_size=min(len(logits), self.size))
        if len(logits) > self.size:
            logits[self.size :] = -torch.inf
        return logits

    def _fill(self) -> None:
        if self.ended:
            self._bits.zero_()
            return
        self._matcher.fill_next_token_bitmask(self._bits)
        if not self._words.any():
            raise CapabilityError(
                "no token may follow: the schema allows no text, or the vocabulary lacks its bytes",
                code="capability.no-token",
            )

    def advance(self, token: int) -> None:
        """Write a token; `ParamsError`, and nothing is written, for one that leaves the schema."""
        if not 0 <= token < self.size or self.ended or not self._matcher.accept_token(token):
            raise ParamsError(
                f"token {token} is not allowed here; allowed: those whose bit `mask` sets",
                code="params.token-not-allowed",
            )

    def back(self, count: int = 1) -> None:
        """Take back the tokens that were written last, as a verifier of drafts does."""
        self._matcher.rollback(count)

    def forced(self) -> str:
        """The text that must come next whatever is written: it needs no forward (jump-forward)."""
        return "" if self.ended else self._matcher.find_jump_forward_string()


def _library():
    """The package xgrammar."""
    try:
        import xgrammar
    except ModuleNotFoundError:
        raise CapabilityError(
            "this needs the package xgrammar; install it with: pip install 'kvlab[mechanisms]'",
            code="capability.missing-package",
        ) from None
    return xgrammar


# ------------------------------------------------------------------------- what is read


def refuse_unread(schema: Mapping | bool, place: str = "#") -> None:
    """`ParamsError` for the first part of a schema of the dialect that xgrammar would not keep."""
    if isinstance(schema, bool):
        return
    said = schema.keys() - NOTES - {"type"}
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if whole := sorted(said & WHOLE):
        if len(said) > 1 or (types and not said <= {"enum", "const"}):
            together = ", ".join(sorted(schema.keys() - NOTES))
            raise ParamsError(
                f"{place} has {together} together; allowed: {whole[0]} alone", code="params.words-together"
            )
        ref = schema.get("$ref", "#")
        if ref != "#" and not ref.startswith(("#/$defs/", "#/definitions/")):  # all else would be looked at by nobody
            raise ParamsError(
                f"{place} refers to {ref!r}; allowed: #, #/$defs/NAME, #/definitions/NAME", code="params.reference"
            )
        _refuse_listed(schema, types, place)
    else:
        known = set().union(*(READ[one] for one in types))
        for word in sorted(said - known):
            raise ParamsError(
                f"{place} has {word!r}, which is not kept; allowed with type {' or '.join(types) or 'none'}:"
                f" {', '.join(sorted(known)) or 'nothing'}{suggestion(word, known)}",
                code="params.unread-word",
            )
        _refuse_string(schema, place)
        _refuse_object(schema, place)
    for where, one in _inner(schema, place):
        refuse_unread(one, where)


def _refuse_listed(schema: Mapping, types: list[str], place: str) -> None:
    """A listed value is allowed whatever type stands beside the list."""
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]
    for value in values if types else ():
        if not Draft202012Validator({"type": types}).is_valid(value):
            raise ParamsError(
                f"{place} lists {value!r}; allowed: values of type {' or '.join(types)}", code="params.listed-value"
            )


def _refuse_string(schema: Mapping, place: str) -> None:
    """Patterns that xgrammar reads otherwise than others do, and a length beside one, which it passes over."""
    source = schema.get("pattern")
    if source is None:
        return
    if schema.keys() & {"minLength", "maxLength"}:
        raise ParamsError(
            f"{place} has a pattern and a length; write the length into the pattern", code="params.pattern-and-length"
        )
    if not PATTERN.fullmatch(source):
        raise ParamsError(
            f"{place} has the pattern {source!r}; allowed: no quotes, backslashes or control characters, anchors at the"
            " two ends alone, groups, classes, and \\d \\w \\s outside of what is excluded",
            code="params.pattern",
        )
    counts = [int(n) for pair in re.findall(r"\{(\d+)(?:,(\d*))?\}", source) for n in pair if n]
    if max(counts, default=0) > MOST_REPEATS:
        raise ParamsError(
            f"{place} has the pattern {source!r}; allowed: at most {MOST_REPEATS} times", code="params.pattern-repeats"
        )


def _refuse_object(schema: Mapping, place: str) -> None:
    """What xgrammar does not require, and names that it may write twice, once with an escape in it."""
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in properties:
            raise ParamsError(
                f"{place} requires {name!r}, which is no property of it{suggestion(name, properties)}",
                code="params.required-property",
            )
    if properties and schema.get("additionalProperties", False) is not False:
        raise ParamsError(
            f"{place} may have any properties beside its own; allowed: additionalProperties false",
            code="params.other-properties",
        )


def _inner(schema: Mapping, place: str) -> Iterator[tuple[str, object]]:
    """The schemas inside a schema, each with its place."""
    for word in schema.keys() & {"items", "additionalProperties"}:
        yield f"{place}/{word}", schema[word]
    yield from ((f"{place}/anyOf/{number}", one) for number, one in enumerate(schema.get("anyOf", ())))
    for word in schema.keys() & {"properties", "$defs", "definitions"}:
        yield from ((f"{place}/{word}/{name}", one) for name, one in schema[word].items())
