"""A registry read from two data files, strictly, and checked as a whole.

Adding a method or a benchmark is one entry in a file. Everything that is wrong with the files is said at once, each
thing with a code of its own. A registry that was given empty stays empty: nothing is registered in it, so nothing that
is claimed against it can be earned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import ValidationError

from kvlab.core.errors import StorageError, UserError, suggestion
from kvlab.gate.catalogue.strict import read_yaml
from kvlab.gate.catalogue.values import RowError, shown
from kvlab.gate.reasons import Reason
from kvlab.gate.registry.contents import Registry
from kvlab.gate.registry.entries import Eval, Mechanism, Metric, RegistryEntry
from kvlab.gate.registry.faults import eval_faults, mechanism_faults

SHIPPED = Path(__file__).parent
SCHEMA_VERSION = 3


class RegistryError(UserError):
    """A registry file cannot be used; `reasons` says everything that is wrong with it."""

    code = "registry"

    def __init__(self, reasons: Iterable[Reason]):
        self.reasons = tuple(reasons)
        super().__init__("the registry cannot be used: " + "; ".join(map(str, self.reasons)))


# ---------------------------------------------------------------------------------------- reading


def load(mechanisms: Path | None = None, evals: Path | None = None) -> Registry:
    """The registry of two YAML files.

    Parameters
    ----------
    mechanisms, evals : Path, optional
        None for the shipped file. A file that lists nothing gives a registry that holds nothing.

    Raises
    ------
    RegistryError
        A file cannot be read, or something in it is wrong; every problem of both files is named.
    """
    paths = (
        SHIPPED / "mechanisms.yaml" if mechanisms is None else Path(mechanisms),
        SHIPPED / "evals.yaml" if evals is None else Path(evals),
    )
    unreadable: list[Reason] = []
    data = [_read(path, unreadable) for path in paths]
    if unreadable:
        raise RegistryError(unreadable)
    return parse(*data)


def parse(mechanisms: dict, evals: dict) -> Registry:
    """The registry of the two files' contents.

    Raises
    ------
    RegistryError
        With every reason that `problems` finds.
    """
    checked = _Checked(mechanisms, evals)
    if checked.reasons:
        raise RegistryError(checked.reasons)
    return Registry(
        mechanisms={(entry.mechanism, entry.variant): entry for _, entry in checked.mechanisms},
        evals={entry.quality_eval_id: entry for _, entry in checked.evals},
    )


def problems(mechanisms: dict, evals: dict) -> list[Reason]:
    """Everything that is wrong with the contents of the two files; what an entry lacks does not hide the others."""
    return list(_Checked(mechanisms, evals).reasons)


def _read(path: Path, unreadable: list[Reason]) -> object:
    try:
        return read_yaml(path)
    except RowError as error:  # no YAML, or a key given twice
        unreadable.extend(error.reasons)
    except StorageError as error:
        unreadable.append(Reason(code="registry_unreadable", field=path.name, said=str(error)))
    return None


# --------------------------------------------------------------------------------------- checking


class _Checked:
    """Both files' entries, as far as they are well formed, each with where it stands, and what is wrong."""

    def __init__(self, mechanisms: object, evals: object):
        self.reasons: list[Reason] = []
        raw_mechanisms = self._list(mechanisms, "mechanisms")
        raw_evals = self._list(evals, "evals")
        self.mechanisms = list(self._entries(raw_mechanisms, "mechanisms", Mechanism))
        self.evals = list(self._entries(raw_evals, "evals", Eval))
        self._repeated(raw_mechanisms, ("mechanism", "variant"), "duplicate_mechanism")
        self._repeated(raw_evals, ("quality_eval_id",), "duplicate_eval")
        self._baseline(raw_mechanisms)
        known_evals = [str(entry.get("quality_eval_id")) for entry in raw_evals if isinstance(entry, dict)]
        known_scopes = [str(entry.get("scope")) for entry in raw_evals if isinstance(entry, dict)]
        for place, entry in self.mechanisms:
            self._say(place, mechanism_faults(entry, known_evals, known_scopes))
        for place, entry in self.evals:
            self._say(place, eval_faults(entry))

    def _say(self, place: str, faults: Iterable[tuple[str, str, str]]) -> None:
        """Note faults as (code, key of the entry, what is wrong)."""
        for code, key, said in faults:
            self.reasons.append(Reason(code=code, field=f"{place}.{key}" if key else place, said=said))

    def _list(self, data: object, kind: str) -> list:
        """The entries of one file, as written."""
        if not isinstance(data, dict):
            self._say(kind, [("registry_shape", "", f"must be a mapping with a list {kind!r}, not {_kind(data)}")])
            return []
        allowed = ("schema_version", kind)
        self._say(kind, [_unknown(key, allowed) for key in data if key not in allowed])
        if data and (type(data.get("schema_version")) is not int or data["schema_version"] != SCHEMA_VERSION):
            said = f"is {data.get('schema_version')!r}; this version reads {SCHEMA_VERSION}"
            self._say(kind, [("registry_version", "schema_version", said)])
        entries = data.get(kind, [])
        if not isinstance(entries, list):
            self._say(kind, [("registry_shape", "", f"must be a list of entries, not {_kind(entries)}")])
            return []
        return entries

    def _entries(self, raw: list, kind: str, model: type[RegistryEntry]) -> Iterator[tuple[str, RegistryEntry]]:
        for number, data in enumerate(raw):
            place = f"{kind}[{number}]"
            if not isinstance(data, dict):
                self._say(place, [("registry_shape", "", f"must be a mapping, not {_kind(data)}")])
                continue
            try:
                yield place, model.model_validate(data)
            except ValidationError as error:
                for problem in error.errors():
                    # a list that is too short because its entries are refused: those are named already
                    if problem["type"] != "too_short" or not problem["input"]:
                        self._say(place, [_translated(problem, model)])

    def _repeated(self, raw: list, keys: tuple[str, ...], code: str) -> None:
        first: dict[tuple[str, ...], int] = {}
        for number, data in enumerate(raw):
            if not (isinstance(data, dict) and all(isinstance(data.get(key), str) for key in keys)):
                continue
            name = tuple(data[key] for key in keys)
            if name in first:
                kind = "mechanisms" if code == "duplicate_mechanism" else "evals"
                said = f"{'/'.join(name)!r} stands in entry {first[name]} already"
                self._say(f"{kind}[{number}]", [(code, keys[-1], said)])
            first.setdefault(name, number)

    def _baseline(self, raw: list) -> None:
        pairs = [(data.get("mechanism"), data.get("variant")) for data in raw if isinstance(data, dict)]
        if raw and ("baseline", "none") not in pairs:
            said = "lacks the entry 'baseline/none', which everything else is compared with"
            self._say("mechanisms", [("no_baseline_entry", "", said)])


def _kind(data: object) -> str:
    return "empty" if data is None else type(data).__name__


def _unknown(key: object, allowed: Iterable[str]) -> tuple[str, str, str]:
    allowed = sorted(allowed)
    said = f"is no key here; allowed: {', '.join(allowed)}{suggestion(str(key), allowed)}"
    return "unknown_registry_key", str(key), said


CODE_OF_FIELD = {
    "direction": "bad_direction",
    "margin": "bad_margin",
    "floor": "bad_margin",
    "band": "bad_band",
}


def _translated(problem: dict, model: type[RegistryEntry]) -> tuple[str, str, str]:
    """One complaint of pydantic as (code, key, what is wrong)."""
    path = [str(part) for part in problem["loc"]]
    key = ".".join(path)
    if problem["type"] == "extra_forbidden":
        inner = Metric if path[0] == "metrics" and len(path) > 1 else model
        code, _, said = _unknown(path[-1], inner.model_fields)
        return code, key, said
    if problem["type"] == "missing" and (path[0] != "band" or path == ["band"]):
        return "missing_registry_key", key, "is not given"
    if key == "metrics" and problem["type"] == "too_short":
        return "eval_without_metrics", key, "is empty; an eval that measures nothing carries no claim"
    code = next((CODE_OF_FIELD[part] for part in path if part in CODE_OF_FIELD), "bad_registry_value")
    return code, key, f"is {shown(problem['input'])}: {problem['msg'][0].lower()}{problem['msg'][1:]}"
