"""What can be wrong with a row, a registry, a configuration or evidence: each thing has a code of its own."""

from __future__ import annotations

from pydantic import model_validator

from kvlab.core.settings import Frozen

# One line each: what the code means.
ROW_REASONS: dict[str, str] = {
    "tier_missing": "a judged row does not say which tier it claims",
    "variants_uneven": "the row names more mechanisms than variants, or fewer",
    "baseline_combined": "the baseline is combined with another mechanism",
    "baseline_variant": "the baseline has a variant, so it is none",
    "variant_unregistered": "the pair of mechanism and variant is not registered",
    "eval_unregistered": "the row names an eval that is not registered",
    "method_other": "the compression method is not the registered one",
    "scope_other": "the compression scope is not the registered one",
    "compression_undeclared": "the row has fields of a compression and declares none",
    "draft_undeclared": "the row has fields of speculative decoding and declares none",
    "draft_missing": "speculative decoding without its draft model",
    "acceptance_missing": "speculative decoding without its acceptance rate",
    "embedded_overstates": "the row's own record says registered of what is not",
    "umbrella_unnamed": "the variant is a class, and nothing says which implementation it was",
    "mechanism_deprecated": "the registered entry is deprecated",
    "undeclared_dtype": "the cache holds a coded dtype and no compression is declared",
    "undeclared_codec": "a codec ran and no compression is declared",
    "undeclared_fires": "calls of a codec were counted and no codec is named",
    "undeclared_cache": "the cache is of a class that rounds or drops, and no compression is declared",
    "undeclared_bytes": "the cache is smaller than its dtype allows, and no compression is declared",
    "undeclared_speculation": "the engine speculated and no speculative decoding is declared",
    "observed_dtype_other": "the cache holds a dtype that the declared mechanism does not store",
    "observed_codec_other": "a codec ran that is not the declared mechanism's",
    "backend_other": "coded pages are declared, and another backend computed attention",
    "codec_absent": "a compression is declared, and the cache was left as it is",
    "codec_idle": "the declared codec never ran",
    "part_absent": "several compressions are declared, and one of them was not seen to run",
    "fires_other": "the codec ran more or less often than it should have",
    "speculation_idle": "speculative decoding is declared, and the engine did not speculate",
    "speculation_other": "the engine speculated in another way than the declared one",
    "undeclared_pattern": "something read or kept less than there is, and nothing of the kind is declared",
    "pattern_absent": "reading or keeping less is declared, and all was kept and read",
    "pattern_other": "another pattern ran than the declared one",
    "pattern_unobserved": "nobody recorded by which pattern was read, or what was kept",
    "read_missing": "a mechanism that acts on reading does not say what a step reads",
    "read_as_stored": "the bytes that a step reads are counted as those that are stored",
    "nothing_spared": "a step reads no fewer bytes than the uncompressed cache has",
    "bits_other": "bits per value do not follow from the bytes and values counted",
    "ratio_other": "the compression ratio does not follow from the bits per value",
    "page_other": "fewer bytes are counted than the engine's own pages take",
    "capacity_other": "the tokens that fit are not those of the engine's own blocks, or these exceed its memory",
    "band_other": "the context is not as long as the band that the claim is for",
    "quantity_other": "a number of the row is not the one that follows from its evidence",
    "quantity_unvouched": "a number of the row follows from none of its evidence",
    "baseline_recipe": "a baseline names the recipe of a codec",
    "baseline_unshown": "a baseline states numbers and has no evidence of them",
    "evidence_apart": "the evidence of one run does not agree on what ran",
    "observation_missing": "nobody recorded what the engine's cache holds",
    "pages_unobserved": "coded pages are declared, and nobody asked the engine for its backend or its pages",
    "fires_missing": "a codec ran and its calls were not counted",
    "speculation_unobserved": "nobody recorded how the engine speculated",
    "nothing_saved": "the compressed cache is no smaller than the uncompressed one",
    "status_overstated": "the declared status says more than the evidence",
    "quality_beyond": "the loss is above its margin",
    "quality_open": "the interval of the loss reaches across its margin",
    "quality_family": "the loss is inside its margin, but not beyond the luck of testing so many rows",
    "eval_never_decodes": "speculative decoding rests on an eval that decodes nothing",
    "lossless_unproven": "a lossless mechanism was not shown to be so",
    "waiver_expired": "a waiver covered this until a day that has gone by",
}
CONFIG_REASONS: dict[str, str] = {
    "field_unknown": "a row, configuration or environment names a field that the catalogue does not have",
    "field_twice": "one field is given twice: a key repeated, in two spellings, or under two names",
    "value_kind": "the value is of another kind than its column",
    "value_not_a_number": "a text that should be a number is none",
    "value_not_whole": "a fraction stands where only a whole number makes sense",
    "value_not_finite": "NaN or an infinity, or a number too large to be told from one",
    "value_out_of_range": "the number is outside its column's bounds",
    "value_unknown_word": "the word is not in its column's vocabulary, as it is written",
    "value_control_character": "the text holds a control character or a mark that hides how it reads",
    "value_outer_space": "the text begins or ends with a space",
    "value_too_long": "the text is longer than any field needs",
    "row_not_object": "what should be a row or a configuration is no object of fields",
    "file_not_json": "the file is no JSON",
    "file_not_yaml": "the file is no YAML",
}
REGISTRY_REASONS: dict[str, str] = {
    "registry_unreadable": "a registry file is missing or may not be read",
    "registry_shape": "a registry file, its list or an entry is not of the shape that it must have",
    "registry_version": "a registry file is of another schema version",
    "unknown_registry_key": "a registry file or an entry has a key that does not exist",
    "missing_registry_key": "an entry lacks a key that it must have",
    "bad_registry_value": "a value of an entry is of the wrong type or not among those allowed",
    "duplicate_mechanism": "a pair of mechanism and variant is registered twice",
    "duplicate_eval": "an eval id is registered twice",
    "no_baseline_entry": "mechanisms are registered, but not the baseline",
    "unknown_mechanism": "an entry is of a mechanism that no row may name",
    "kind_conflict": "a mechanism is registered as a kind that it is not",
    "method_scope_conflict": "method and scope do not fit the mechanism, or one another",
    "umbrella_conflict": "a variant is an umbrella by its name and not by its entry, or the other way round",
    "draft_conflict": "a speculative mechanism needs no draft, or another one does",
    "unknown_codec": "an entry names a codec that does not exist or cannot be stored",
    "unknown_kv_cache_dtype": "an entry names no KV cache dtype, or one that engines do not store",
    "lossless_conflict": "an entry is lossless, yet allows what loses; or is the baseline and is not",
    "lossless_pattern": "an entry is lossless, yet reads or keeps less than there is",
    "dangling_eval": "a mechanism relies on an eval that is not registered",
    "bad_source": "a source is no arXiv number and no URL",
    "eval_without_metrics": "an eval has no metric",
    "metric_duplicate": "an eval has two metrics of the same key",
    "bad_direction": "a metric is better neither higher nor lower",
    "bad_margin": "a margin or floor is missing its number, not finite, or the margin not above 0",
    "bad_band": "a context band is no pair of whole numbers in ascending order",
    "task_conflict": "an eval of another harness names no task, or one of this project's names one",
    "shows_nothing": "a lossy compression does not name what it must show",
    "bad_range": "what a metric can be is not in order, or its floor or its untouched value lies outside of it",
    "baseline_conflict": "an eval needs no baseline, yet one of its metrics has no floor to be judged by",
}
EVIDENCE_REASONS: dict[str, str] = {
    "evidence_missing": "no evidence is attached, or the row names no eval that it could be of",
    "evidence_malformed": "the evidence does not have the fields of its schema",
    "evidence_not_finite": "a number in the evidence is NaN or infinite",
    "evidence_tampered": "the content is not the one that its id was computed of",
    "evidence_unregistered_eval": "the evidence is of an eval that is not registered",
    "evidence_other_eval": "no attached evidence is of the eval that the row names",
    "evidence_unsuited_eval": "evidence of this eval cannot carry a claim of the mechanism",
    "evidence_withheld": "the run scored an eval of which no evidence is attached",
    "evidence_incomplete": "no evidence is of a scope of evals that the mechanism must show",
    "evidence_other_family": "the evidence of one run says different numbers of variants that it tested",
    "evidence_other_version": "the eval was run in another version than the registered one",
    "evidence_other_model": "the evidence was measured on another model",
    "evidence_other_engine": "the evidence was measured on another engine",
    "evidence_other_recipe": "the evidence was measured with another recipe",
    "evidence_other_context": "the evidence was measured at another context length",
    "evidence_other_dtype": "the evidence was measured in another dtype",
    "evidence_other_protocol": "the evidence was measured under another protocol",
    "evidence_other_device": "the evidence was measured on another device",
    "evidence_other_calibration": "the evidence was measured with another calibration than the row names",
    "evidence_stale_model": "the model's weights are not those that the evidence was measured on",
    "evidence_stale_corpus": "the text is not the one that the evidence was measured on",
    "evidence_stale_code": "the code is not the one that the evidence was measured with",
    "evidence_stale_unknown": "nothing says what is current for the evidence's model",
    "evidence_no_baseline": "the eval needs a baseline and the evidence has none",
    "evidence_other_baseline": "the baseline is lossy, or differs from the variant in more than its recipe",
    "evidence_metric_missing": "a registered metric of the eval was not measured",
    "evidence_metric_unknown": "the evidence has a metric that its eval does not",
    "evidence_range": "a value is outside of what its metric can be",
    "evidence_interval": "an interval is not the one that its items give, or there are fewer than two of them",
    "evidence_ends": "the ends at stricter levels are not those of the interval, or more than its items carry",
    "evidence_unpaired": "variant, baseline and their difference are not of the same items, or do not add up",
    "evidence_outside_band": "the eval does not speak for this context length",
    "evidence_codec_idle": "the mechanism's codec did not run, or not as often as it should have",
    "evidence_imported": "the evidence is of another harness, which saw no cache: it may show a loss, and nothing else",
    "evidence_canary": "the logits do not hang on what is stored, or a codec ran and nobody looked",
    "evidence_other_backend": "another attention backend ran than the one that reads the mechanism's pages",
    "evidence_other_served": "the engine says that its pages are coded by another recipe or calibration",
    "evidence_pages": "the mechanism is of an engine's own pages, and nobody asked the engine for them",
    "evidence_other_codec": "another codec ran than those that the row's mechanism names",
    "evidence_other_pattern": "the evidence was measured under another pattern, or with other settings of it",
    "evidence_contradicts_row": "the row shows something else than its evidence",
}
REASONS = ROW_REASONS | CONFIG_REASONS | REGISTRY_REASONS | EVIDENCE_REASONS


class Reason(Frozen):
    """One thing that is wrong: its code, the field that it is about, and what was found there."""

    code: str
    field: str
    said: str

    @model_validator(mode="after")
    def _known(self) -> Reason:
        if self.code not in REASONS:
            raise ValueError(f"{self.code!r} is no code of a reason")
        return self

    def __str__(self) -> str:
        return f"{self.code}: {self.field} {self.said}"
