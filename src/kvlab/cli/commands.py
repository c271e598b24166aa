"""What other packages add to the command line, and how `kvlab` finds it.

A package names its `Commands` as an entry point in the group ``kvlab.commands``:

    [project.entry-points."kvlab.commands"]
    mechanisms = "kvlab_mechanisms.cli.commands:COMMANDS"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvlab.cli.flags import Verbs
from kvlab.cli.packages import found

GROUP = "kvlab.commands"
MORE = "{more}"
"""Where the description of a group of verbs takes the lines of other packages."""


@dataclass(frozen=True)
class Commands:
    """Verbs of one package.

    Parameters
    ----------
    about : str
        A line for each verb, as `kvlab --help` prints it.
    verbs : mapping of callable to list of Flag
        Functions named VERB_verb, each with its flags.
    groups : mapping of str to (str, mapping)
        Verbs that are followed by a verb, by name: what lists them, and what they are. To a group that there is
        already the verbs are added, and the lines where its description has `MORE`.
    """

    about: str
    verbs: Verbs = field(default_factory=dict)
    groups: Mapping[str, tuple[str, Verbs]] = field(default_factory=dict)


def installed() -> list[Commands]:
    """What the installed packages add."""
    return [point.load() for point in sorted(found(GROUP), key=lambda point: point.name)]
