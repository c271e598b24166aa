"""All of params.yaml: what the studies share and the section of each, one checked `Settings` for each model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Set
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, create_model

from kvlab.core.errors import ModelError, ParamsError, suggestion
from kvlab.core.folders import holding
from kvlab.core.limits import shown, unfit
from kvlab.core.model import layer_count
from kvlab.core.paramfile import held_to, overlay, read_yaml, unknown_key
from kvlab.core.params import CodecSection, FilePath, Model, ModelEntry, Params, Section, Undeclared, as_far
from kvlab.core.strictyaml import from_json
from kvlab_pipeline.jobs.plan import STUDIES, STUDY_FOLDERS
from kvlab_pipeline.studies.cells import params as cells_params
from kvlab_pipeline.studies.cells.params import CELLS, CellSettings
from kvlab_pipeline.studies.cells.plan import repeated
from kvlab_pipeline.studies.kvstore_params import KVStore

NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")
CellName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


def _study(name: str) -> str:
    if name not in STUDIES:
        raise ValueError(
            f"{name!r} is no study of the report; allowed: {', '.join(STUDIES)}{suggestion(name, STUDIES)}"
        )
    return name


Study = Annotated[str, AfterValidator(_study), Field(json_schema_extra={"enum": list(STUDIES)})]


class Listed(ModelEntry):
    """An entry of `models`: a model, and how much of what is asked for is measured of it."""

    path: FilePath = Field(min_length=1, description=ModelEntry.model_fields["path"].description)
    studies: tuple[str, ...] | None = Field(
        default=None,
        description="of a further model: those of `studies` that are measured of it, all or none of such as share a"
        " process, and the gate judges none of its codecs; null: all",
    )


def sections() -> dict[str, type[Section]]:
    """The sections that studies bring, by key: each is declared in the ``params.py`` of its study's folder."""
    found = {}
    for study in holding(STUDY_FOLDERS, "params"):
        file = import_module(f"{STUDY_FOLDERS}.{study}.params")
        own = (value for value in vars(file).values() if isinstance(value, type) and value.__module__ == file.__name__)
        found |= {value.key: value for value in own if issubclass(value, Section) and value.key}
    return found


Sections: type[Params] = create_model(
    "Sections", __base__=Params, **{key: (section, section()) for key, section in sections().items()}
)


class Settings(Sections):
    """All parameters of one model's chain."""

    studies: tuple[Study, ...] | None = Field(
        default=None, description="studies of the report beside the engine baseline and the factorial; null: all"
    )
    cells: dict[CellName, CellSettings] = Field(default={})
    kvstore: KVStore = KVStore()

    @classmethod
    def examined(cls, data: dict) -> tuple[Settings, list[str]]:
        """As of `Params`; `cells` names changes of the default entries, and null takes one out.

        A default entry that is not named, and is not possible with these parameters, is left out.
        """
        named = data.get("cells", {})
        if not isinstance(named, dict):
            return super().examined(data)
        odd = {name: entry for name, entry in named.items() if not isinstance(entry, dict | None)}
        changes = overlay(CELLS, named | {name: {} for name in odd})  # as if they changed nothing, for what names them
        entries = {name: entry for name, entry in changes.items() if entry is not None}
        found, problems = super().examined(data | {"cells": entries})
        problems += [
            f"cells.{name} is {shown(entry)}; allowed: a mapping of what it changes, or null to take the entry out"
            for name, entry in odd.items()
        ]
        if "cells" in found.__dict__:
            try:
                found = found._without_impossible(CELLS.keys() - named.keys())
            except Undeclared:
                return found, problems
            problems += as_far(found._cell_problems())
        problems += [
            f"cells.{name} is null, which takes an entry out, and there is none{suggestion(name, CELLS)}"
            for name, entry in named.items()
            if entry is None and name not in CELLS
        ]
        return found, problems

    def _fitted(self, name: str) -> Any:
        if name == "cells":
            return {label: entry.fitted(self) for label, entry in self.cells.items()}
        return super()._fitted(name)

    def _cell_problems(self) -> Iterator[str]:
        for label, entry in self.cells.items():
            yield from cells_params.problems(self, label, entry, self.cells)

    def _without_impossible(self, unasked: Set[str]) -> Settings:
        """Without those of the `unasked` entries that cannot be measured, or are the same cell as another."""
        kept = dict(self.cells)
        while wrong := [n for n in unasked & kept.keys() if any(cells_params.problems(self, n, kept[n], kept))]:
            kept = {name: entry for name, entry in kept.items() if name not in wrong}
        found = self.model_copy(update={"cells": kept})
        unsure = unasked & kept.keys()
        wrong = repeated(found, unsure) if unsure and not any(found._cell_problems()) else []
        if not wrong:
            return found
        others = {name: entry for name, entry in kept.items() if name not in wrong}
        return found.model_copy(update={"cells": others})._without_impossible(unasked)


def left_out(settings: Settings, data: dict) -> list[str]:
    """The default cells that these parameters do not allow, and that `data` does not name."""
    named = data.get("cells", {})
    return [name for name in CELLS if name not in settings.cells and name not in named]


def read_params(text_or_path: str | Path, slug: str | None = None) -> Settings:
    """Read ``params.yaml`` (one model of it) or a JSON object (only the keys a rule named, resolved).

    Raises
    ------
    ParamsError
        A line for each mistake: the key, the value, what is allowed, and the nearest known key.
    """
    text = str(text_or_path).strip()
    if text.startswith("{"):
        data = from_json(text, "--params")
        if problems := unfit(data):
            raise ParamsError(*problems)
        return Settings.partial(data)
    return one_of(by_model(read_yaml(Path(text))), slug)


def by_model(data: dict) -> dict[str, Settings]:
    """The parameters of each model of a params.yaml, by slug, in its order.

    Raises
    ------
    ParamsError
        A line for each mistake; one that only some of several models make says which.
    """
    if problems := unfit(data):
        raise ParamsError(*problems)
    keys = {"models", *Settings.model_fields} - {"model"}
    problems = [unknown_key(key, keys) for key in data if key not in keys]
    rest = {key: _numbers(value) for key, value in data.items() if key in keys and key != "models"}
    models, wrong = _models(data)
    problems += wrong
    asked = [rest if own is None else rest | {"studies": own} for _, own in models.values()]
    found = {
        slug: Settings.examined(keys | {"model": model})
        for (slug, (model, _)), keys in zip(models.items(), asked, strict=True)
    }
    told = [lines for _, lines in found.values()] or [Settings.examined(rest)[1][:-1]]  # the last: no model
    problems += _of_models(told, list(found))
    if problems:
        raise ParamsError(*problems)
    return {slug: settings for slug, (settings, _) in found.items()}


def _numbers(value: Any) -> Any:
    """A value with the numbers that are texts to YAML 1.1: ``1e-3``, where Snakemake has read params.yaml."""
    if isinstance(value, dict):
        return {key: _numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_numbers(entry) for entry in value]
    return float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value


def _of_models(told: list[list[str]], slugs: list[str]) -> Iterator[str]:
    """Each line once; one that is not true of every model says of which it is."""
    count = Counter(line for lines in told for line in lines)
    for number, lines in enumerate(told):
        for line in lines:
            if count[line] < len(told):
                yield f"{line} (for model {slugs[number]!r})"
            elif number == 0:
                yield line


def _models(data: dict) -> tuple[dict[str, tuple[Model, list[str] | None]], list[str]]:
    """The models that are listed and the studies of each that names its own, by slug; and a line for each mistake."""
    listed, found, problems = data.get("models"), {}, []
    if not (isinstance(listed, list) and listed):
        given = f"is {shown(listed)}" if "models" in data else "is missing"
        return {}, [f"parameter 'models' {given}; allowed: a list of models, each with `path`"]
    for number, given in enumerate(listed):
        try:
            entry = held_to(Listed, given, ("models", number))
            if entry.slug in found:
                raise ModelError(
                    f"models.{number}.slug is {entry.slug!r}, as of a model before it; give it another `slug`"
                )
            problems += _own_studies(number, entry, data.get("studies"))
            model = Model(**entry.model_dump(exclude={"studies"}), n_layers=layer_count(entry))
            found[entry.slug] = model, None if entry.studies is None else list(entry.studies)
        except (ParamsError, ModelError) as error:
            problems += error.lines
    return found, problems


def _own_studies(number: int, entry: Listed, asked: Any) -> Iterator[str]:
    """A line where the first model names studies of its own, and for each study that is not asked for."""
    if number == 0 and entry.studies is not None:
        yield "models.0.studies is said, and the first model leads: all of `studies` is measured of it; leave it out"
    for name in entry.studies or ():
        allowed = asked if isinstance(asked, list) else STUDIES
        if name not in allowed:
            yield (
                f"models.{number}.studies names {name!r}; allowed: {', '.join(allowed) or 'none'}, of `studies`"
                f"{suggestion(name, allowed)}"
            )


def judged(data: dict) -> list[str]:
    """The slugs of the models for which a params.yaml asks the gate's rows: all but those with studies of their own."""
    return [slug for slug, (_, own) in _models(data)[0].items() if own is None]


def one_of(models: dict[str, Settings], slug: str | None) -> Settings:
    """The parameters of one model: of the only one, or of the one that is named."""
    names = ", ".join(models)
    if slug is None and len(models) > 1:
        raise ParamsError(f"params.yaml lists {len(models)} models; name one with --model: {names}")
    if slug is not None and slug not in models:
        raise ParamsError(f"--model {slug!r} is not in params.yaml; allowed: {names}{suggestion(slug, models)}")
    return models[slug or next(iter(models))]


def resolved(data: dict) -> dict:
    """A checked params.yaml with every default written out; what it says itself stays as it is said."""
    models = by_model(data)
    first = next(iter(models.values()))
    whole = first.model_dump(mode="json", exclude={"model"})
    if all(settings.model.n_layers > 2 for settings in models.values()):
        whole["codec"]["boundary_layers"] = list(CodecSection().boundary_layers)
    elif any(settings.codec.boundary_layers != first.codec.boundary_layers for settings in models.values()):
        del whole["codec"]["boundary_layers"]  # no one list is the default of a small model and of a large one
    entries = [
        settings.model.model_dump(mode="json", exclude={"n_layers"}) | {"studies": given.get("studies")}
        for settings, given in zip(models.values(), data["models"], strict=True)
    ]
    return {"models": entries} | overlay(whole, {key: value for key, value in data.items() if key != "models"})
