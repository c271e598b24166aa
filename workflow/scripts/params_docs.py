"""Write the table of all parameters and the JSON schema of params.yaml, from the models of its sections.

    python workflow/scripts/params_docs.py           writes config/PARAMS.md and workflow/schemas/config.schema.json
    python workflow/scripts/params_docs.py --check   says which of them is out of date

The schema is for editors, and for the workflow catalog, which looks for it by that name. It says what a person
writes: a list `models` where `Settings` holds the one model of a job, and changes of the default `cells`. What one key
asks of another it cannot say; `kvlab params` checks that.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

import yaml  # noqa: E402
from pydantic.json_schema import GenerateJsonSchema  # noqa: E402

from kvlab.core.paramfile import read_yaml  # noqa: E402
from kvlab.output.format import table  # noqa: E402
from kvlab_pipeline.studies.cells.params import CELLS  # noqa: E402
from kvlab_pipeline.studies.settings import Listed, Settings, resolved  # noqa: E402

TABLE = Path("config/PARAMS.md")
SCHEMA = Path("workflow/schemas/config.schema.json")

HEAD = """\
# All parameters

<!-- Written by `make params-docs` from the models of src/kvlab/core/params.py and of src/kvlab_pipeline/studies,
params.yaml and dvc.yaml; edit those. -->

*Value* is what holds in this repository: the default, or what `params.yaml` says; for an entry of `models` or `cells`,
what holds where the entry does not say it. What a study takes of others (windows, needles, protocols, captured engines)
is cut to what there is, unless params.yaml says it.

`dvc exp run -S '++KEY=VALUE'` works for every row: `++` sets what params.yaml says, and adds what it does not. For what
it says, `-S KEY=VALUE` is enough. `N` counts models from 0, `NAME` is the name of an entry: `++models.0.revision=main`,
`++cells.my-cell.bits=4`, `++cells.k-only=null` (takes it out).

*Stages* are those that run again when the value changes, because their `params` in `dvc.yaml` name it; the stages after
them follow as far as a file that they read has changed. The same for editors is in
[config.schema.json](../workflow/schemas/config.schema.json); [README.md](README.md) says how values are changed.
"""


class PlainSchema(GenerateJsonSchema):
    """Without the titles that pydantic makes of field names."""

    def field_title_should_be_set(self, schema):
        return False


def params_schema():
    """JSON schema of params.yaml: every section written out where it stands."""
    generated = Settings.model_json_schema(schema_generator=PlainSchema)
    entry = Listed.model_json_schema(schema_generator=PlainSchema)
    sections = generated["$defs"] | {"Listed": entry}
    keys = {key: written_out(part, sections) for key, part in generated["properties"].items() if key != "model"}
    models = {
        "type": "array",
        "minItems": 1,
        "description": "Models that are measured; each goes through every stage, and the first leads the report.",
        "items": written_out({"$ref": "Listed"}, sections),
    }
    keys = {"models": models, **keys}
    open_cells(keys)
    return {
        "$schema": GenerateJsonSchema.schema_dialect,
        "title": "params.yaml of kvlab",
        "description": "Written by `make params-docs`; `kvlab params` also checks what one key asks of another.",
        "type": "object",
        "additionalProperties": False,
        "properties": keys,
        "required": ["models"],
    }


def written_out(node, sections):
    """`node` with every reference to a section replaced by the section, without the name of its class."""
    if isinstance(node, list):
        return [written_out(item, sections) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        section = dict(sections[node["$ref"].rpartition("/")[2]])
        del section["title"]
        node = section | {key: value for key, value in node.items() if key not in ("$ref", "default")}
    node = {key: written_out(value, sections) for key, value in node.items()}
    if isinstance(node.get("description"), str):
        node["description"] = " ".join(node["description"].replace("``", "`").split())
    return node


def open_cells(keys):
    """Entries of `cells` have checked names, are taken out by null, and of `codec` they change only what it has."""
    cells = keys["cells"]
    cells |= {"description": "Changes of the default cells: a new entry adds one, null takes one out."}
    cells |= {"additionalProperties": False}
    cells.pop("default")
    ((pattern, entry),) = cells["patternProperties"].items()
    entry["properties"]["codec"] |= {"additionalProperties": False, "properties": keys["codec"]["properties"]}
    cells["patternProperties"] = {pattern: {"anyOf": [entry, {"type": "null"}]}}


def params_table():
    """The table as Markdown: a part for the keys at the top, and one for each section."""
    schema, values, stages = params_schema(), resolved(read_yaml(Path("params.yaml"))), stage_params()
    parts = {"At the top": ("", [])}
    for key, part in schema["properties"].items():
        if entries(part):
            rows = [row(name, leaf, value, stages) for name, leaf, value in leaves(key, part, values[key])]
            words = part.get("description") or entries(part)["description"]
            parts[code(key)] = (f"{words}\n\n{default_cells()}" if key == "cells" else words, rows)
        else:
            parts["At the top"][1].append(row(key, part, values[key], stages))
    return "\n\n".join([HEAD.rstrip(), *(section(name, words, rows) for name, (words, rows) in parts.items())]) + "\n"


def default_cells():
    """The default cells, and what each changes."""
    return table(("default cell", "what it changes"), [(name, code(flow(changes))) for name, changes in CELLS.items()])


def section(name, words, rows):
    """A heading and its table; stages that all rows share are said once, before it."""
    headers = ("parameter", "allowed", "value", "meaning", "stages")
    shared = {stages for *_, stages in rows}
    if len(shared) == 1:
        words, headers, rows = f"{words}\n\nStages: {shared.pop()}.", headers[:-1], [row[:-1] for row in rows]
    return "\n\n".join(filter(None, (f"## {name}", words, table(headers, rows))))


def entries(part):
    """The schema of what a section holds: its keys, or those of an entry; None for a value."""
    if "patternProperties" in part:
        return next(iter(part["patternProperties"].values()))["anyOf"][0]
    if "properties" in part.get("items", {}):
        return part["items"]
    return part if "properties" in part else None


def leaves(name, part, value):
    """(dotted key, schema, value in params.yaml) of each leaf of a section; in entries the value is the default."""
    inner = entries(part)
    if inner is not part:
        name, value = f"{name}.{'NAME' if 'patternProperties' in part else 'N'}", None
    for key, leaf in inner["properties"].items():
        if value is None:
            yield f"{name}.{key}", leaf, leaf.get("default", ...)
        elif "properties" in leaf:
            yield from leaves(f"{name}.{key}", leaf, value[key])
        else:
            yield f"{name}.{key}", leaf, value[key]


def row(name, part, value, stages):
    """A row of the table."""
    shown = "must be given" if value is ... else code(flow(value))
    return (code(name), allowed(part), shown, part.get("description", ""), naming(name, stages))


def allowed(part):
    """What a schema allows, in words."""
    if "anyOf" in part:
        return " or ".join(map(allowed, part["anyOf"]))
    if "enum" in part or "const" in part:
        return ", ".join(map(code, part.get("enum", [part.get("const")])))
    if part["type"] == "array":
        return f"list{count(part)} of {allowed(part['items'] if 'items' in part else part['prefixItems'][0])}"
    words = {"boolean": "`true`, `false`", "null": "`null`", "string": "text", "object": "mapping"}
    return words.get(part["type"]) or " ".join([part["type"], " and ".join(bounds(part))]).strip()


def bounds(part):
    """The limits of a number."""
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return [f"{sign} {part[name]:g}" for name, sign in signs.items() if name in part]


def count(part):
    """How many items a list may have."""
    least, most = part.get("minItems"), part.get("maxItems")
    if least is None:
        return ""
    return f" ({least})" if least == most else f" ({least} to {most})" if most else f" (at least {least})"


def flow(value):
    """A value as one line of YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=sys.maxsize).removesuffix("...\n").strip()


def code(text):
    """Text as it is typed."""
    return f"`{text}`"


def stage_params():
    """Stage -> the parameters that dvc.yaml says it reads."""
    return {name: entry.get("params", []) for name, entry in read_yaml(Path("dvc.yaml"))["stages"].items()}


def naming(name, stages):
    """The stages that read a parameter: those that name it, its section or a leaf of it."""
    found = [stage for stage, keys in stages.items() if any(overlap(key, name) for key in keys)]
    others = [stage for stage in stages if stage not in found]
    if not others:
        return "all"
    return f"all but {', '.join(others)}" if len(others) < len(found) else ", ".join(found)


def overlap(one, other):
    """Whether one dotted key is the other, or above it."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--check", action="store_true", help="change nothing; exit 1 if a file is out of date")
    check = arguments.parse_args().check
    texts = {TABLE: params_table(), SCHEMA: json.dumps(params_schema(), indent=2) + "\n"}
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    if check and stale:
        sys.exit(f"error: older than the parameters: {', '.join(map(str, stale))}; run make params-docs")
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(texts[path])
    print("\n".join(map(str, stale)) or f"{TABLE} and {SCHEMA} agree with the parameters")


if __name__ == "__main__":
    main()
