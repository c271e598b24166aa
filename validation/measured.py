"""Tables of docs that hold measured numbers: rendered from ``docs/measured/NAME.json``, which says what made them.

    python -m validation.measured

writes each block of docs anew; a test compares them. A file holds the numbers of one table, or the output of one
command, and where they come from. What no kept output vouches for says so under its table.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, model_validator

from kvlab.core.codec_settings import Frozen
from kvlab.core.errors import StorageError
from kvlab.core.records import read_json, write_text
from kvlab.output import format as fmt
from kvlab_pipeline.report.readme import marks, read, split

DOCS = Path(__file__).resolve().parents[1] / "docs"
FOLDER = "measured"
NO_TABLE = "storage.no-measured-table"
NAMED = re.compile(r"<!-- (measured/[\w-]+):begin -->")

Cell = str | int | float | tuple[float, float, float]
"""A word, a number, or a value with the ends of its 95 % interval."""


class Measured(Frozen):
    """One measured table, or one command's output, with its origin.

    Parameters
    ----------
    command : str
        What to type for it, in the root of a checkout; empty where nobody kept it, or the output holds it.
    commit : str
        kvlab's, of the code that ran; where that is not known, the one that put the numbers into the page.
    date : datetime.date
        The day of the run, or of that commit.
    model, text : str
        What was measured, and on which text.
    seconds : float, optional
        What the command took of the processor.
    untraced : str, optional
        Why no kept output of a run vouches for the numbers; None where one was read into this file.
    headers, rows : tuple
        The table.
    output : tuple of str
        In place of a table: what was typed, behind ``$``, and the lines that it printed.
    """

    command: str = ""
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{7,40}$")]
    date: datetime.date
    model: str
    text: str
    seconds: float | None = None
    untraced: str | None = None
    headers: tuple[str, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()
    output: tuple[str, ...] = ()

    @model_validator(mode="after")
    def whole(self) -> Measured:
        """A table or an output, and a command wherever the numbers are traced."""
        if bool(self.rows) == bool(self.output):
            raise ValueError("rows of a table, or lines of an output: one of the two")
        if not (self.command or self.untraced or "".join(self.output[:1]).startswith("$ ")):
            raise ValueError("numbers without a command are untraced; say why")
        return self


def files(docs: Path = DOCS) -> dict[str, Measured]:
    """Each file of ``docs/measured``, by the name that its block bears.

    Raises
    ------
    StorageError
        A file is none of these.
    """
    found = {}
    for path in sorted((docs / FOLDER).glob("*.json")):
        try:
            found[f"{FOLDER}/{path.stem}"] = Measured.model_validate(read_json(path))
        except ValidationError as error:
            raise StorageError(f"{path}: {error}", code=NO_TABLE) from None
    return found


def block(measured: Measured) -> str:
    """The Markdown between a table's two markers."""
    if measured.output:
        console = "\n".join(measured.output)
        return f"```console\n{console}\n```\n\n{origin(measured)}\n"
    table = fmt.table(measured.headers, [[cell(one) for one in row] for row in measured.rows])
    return f"{table}\n\n{origin(measured)}\n"


def cell(value: Cell) -> str:
    """A cell's text; an interval's width chooses its digits."""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return fmt.estimate(dict(zip(("value", "low", "high"), value, strict=True)))
    return fmt.number(value)


def origin(measured: Measured) -> str:
    """The lines under a table: which version made it, when, on what, by which command; or that nothing kept vouches."""
    version = f"kvlab {measured.commit}, {measured.date}"
    took = f", {measured.seconds:.0f} s of one core" if measured.seconds else ""
    intervals = any(isinstance(one, tuple) for row in measured.rows for one in row)
    brackets = "; brackets hold 95 % intervals" if intervals else ""
    said = f"*Measured with {version}{took}. {measured.model}; {measured.text}{brackets}.*"
    if measured.untraced:
        said = f"*Of an older version ({version}), not measured again since: {measured.untraced}. "
        said += f"{measured.model}; {measured.text}.*"
    shown = f"\n\n```sh\n{measured.command}\n```" if measured.command else ""
    return said + shown


def pages(docs: Path = DOCS) -> Iterator[tuple[Path, str, list[str]]]:
    """Each page that people write, with its text and the names of its blocks."""
    for page in sorted((*docs.glob("*.md"), *docs.glob("results/*.md"))):
        text = read(page)
        yield page, text, NAMED.findall(text)


def problems(docs: Path = DOCS) -> list[str]:
    """What in docs is not as ``docs/measured`` has it: a block, a file of no page, a block of no file."""
    known, seen, found = files(docs), [], []
    for page, text, names in pages(docs):
        seen += names
        for name in names:
            if name not in known:
                found.append(f"{page.name} has a block of {name}.json, which is not there")
            elif split(text, page, name)[1].strip() != block(known[name]).strip():
                found.append(f"{page.name}: {name} is not what its file renders; run python -m validation.measured")
    return found + [f"{name}.json stands on {seen.count(name)} pages" for name in known if seen.count(name) != 1]


def update(docs: Path = DOCS) -> None:
    """Write every block of docs anew.

    Raises
    ------
    StorageError
        A block's file is not there, or is none; the pages before it are written.
    """
    known = files(docs)
    for page, text, names in pages(docs):
        for name in names:
            if name not in known:
                raise StorageError(f"{page} has a block of {name}.json, which is not there", code=NO_TABLE)
            before, _, after = split(text, page, name)
            begin, end = marks(name)
            text = f"{before}{begin}\n{block(known[name])}{end}{after}"
        if names:
            write_text(page, text)


if __name__ == "__main__":
    update()
