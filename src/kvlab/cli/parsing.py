"""Typer as this command line uses it: several words after one flag, and refusals of one line with the nearest name."""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import typer
from typer.core import TyperCommand, TyperGroup

from kvlab.cli.commands import Verbs, in_flags
from kvlab.core import parent_watch
from kvlab.core.errors import KvlabError, suggestion
from kvlab.core.extras import missing_extra

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
PLAIN = {"add_completion": False, "rich_markup_mode": None, "context_settings": SETTINGS}


class Verb(TyperCommand):
    """A verb: its help is the docstring as it is written, and its errors are one line."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Read the words; where some are missing, all of them are named."""
        words = spread(ctx, args)
        try:
            return super().parse_args(ctx, [*words])  # which empties the list
        except typer.BadParameter as error:
            if error.message:
                raise
            flags, others = words[: words.index("--")], words[words.index("--") + 1 :]
            places = [one for one in self.params if not shown(one).startswith("-")][: len(others)]
            missing = [shown(one) for one in self.params if one.required and one not in places]
            ctx.fail(f"the following arguments are required: {', '.join(one for one in missing if one not in flags)}")

    def format_help_text(self, ctx: typer.Context, formatter) -> None:
        """Typer would fill paragraphs anew, examples too."""
        formatter.write(f"\n{self.help}\n")

    def invoke(self, ctx: typer.Context) -> object:
        """Run; an error that says what is wrong ends it with a line for each mistake, and its exit code."""
        asked = ctx.command_path
        try:
            parent_watch.follow_run()
            return super().invoke(ctx)
        except KvlabError as error:
            fail([f"{asked}: {line}" for line in getattr(error, "lines", (error,))], error.exit_code)
        except ModuleNotFoundError as error:
            if (said := missing_extra(error)) is None:
                raise
            fail([f"{asked}: {said}"], said.exit_code)
        except BrokenPipeError:  # `kvlab params | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OSError as error:
            from kvlab.core.records import storage_error

            where = error.filename or ctx.params.get("out") or "."
            fail([f"{asked}: {storage_error(Path(where), error)}"], 2)


class Group(TyperGroup):
    """Verbs of a group, each of which is declared when it is asked for."""

    verbs: Verbs

    def get_command(self, ctx: typer.Context, cmd_name: str):
        """A verb, or None."""
        if cmd_name in self.verbs and cmd_name not in self.commands:
            self.commands[cmd_name] = command(cmd_name, self.verbs[cmd_name])
        return self.commands.get(cmd_name)

    def list_commands(self, ctx: typer.Context) -> list[str]:
        """Their names."""
        return [*self.verbs]

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Read the words before the verb."""
        words = spread(ctx, args)
        alone = words[-1:] == ["--"]
        rest = super().parse_args(ctx, words)
        if alone:
            ctx.fail("the following arguments are required: VERB")
        return rest

    def resolve_command(self, ctx: typer.Context, args: list[str]):
        """Find the verb, or say which it may have been."""
        if args[0] not in self.verbs and not ctx.resilient_parsing:
            ctx.fail(f"verb {unknown(args[0], self.verbs)}")
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: typer.Context, formatter) -> None:
        """What the group is, and the first line of each verb's help."""
        told = {name: (one.about if isinstance(one, Verbs) else one.__doc__) for name, one in self.verbs.items()}
        width = max(map(len, told))
        lines = [f"  {name:<{width}}  {text.partition(chr(10))[0].removesuffix('.')}" for name, text in told.items()]
        self.format_usage(ctx, formatter)
        formatter.write("\n".join([self.verbs.about, "", *lines, self.verbs.ends, ""]))


def command(name: str, verb: Verbs | Callable, flags: Callable[[], None] = lambda: None):
    """A group or a verb as typer runs it; `flags` are those of a group itself."""
    if not isinstance(verb, Verbs):
        app = typer.Typer(**PLAIN)
        app.command(name, cls=Verb, context_settings=SETTINGS)(in_flags(verb))
        return typer.main.get_command(app)
    app = typer.Typer(name=name, cls=Group, subcommand_metavar="VERB ...", options_metavar="[-h]", **PLAIN)
    app.callback()(flags)
    group = typer.main.get_command(app)
    group.verbs = verb
    return group


def spread(ctx: typer.Context, words: Sequence[str]) -> list[str]:
    """The words as typer takes them, which gives a flag one word: `--codec a b` as `--codec a --codec b`.

    A flag whose metavar ends in `...` takes all words up to the next flag; one in brackets may be left without any, and
    is left out then. Flags come first, and what is none stands after `--`.
    """
    if ctx.resilient_parsing:  # a line that is being completed
        return [*words]
    options = {name: one for one in ctx.command.get_params(ctx) for name in one.opts if name.startswith("-")}
    flags, others, left, wrong = [], [], deque(words), []
    while left:
        word = left.popleft()
        if word == "--":
            others += left
            break
        if not is_flag(word):
            others.append(word)
            if isinstance(ctx.command, Group):  # what follows belongs to the verb
                return [*flags, *others, *left]
            continue
        name, sign, value = word.partition("=")
        if (option := options.get(name)) is None:
            ctx.fail(f"{name!r} is not known{suggestion(name, options)}")
        if option.is_flag:
            if sign:
                ctx.fail(f"argument {name}: takes no value, and {value!r} is given")
            flags.append(word)
            continue
        many, values = option.metavar.strip("[]").endswith("..."), [value] if sign else []
        while not sign and left and not is_flag(left[0]) and left[0] != "--" and (many or not values):
            values.append(left.popleft())
        if not values and not option.metavar.startswith("["):
            wrong.append(f"argument {name}: expected {'at least ' if many else ''}one argument")
        flags += [one for value in values for one in (name, value)]
    if wrong:  # told when no flag is unknown, which may be what was meant
        ctx.fail(wrong[0])
    places = [one for one in ctx.command.params if not one.opts[0].startswith("-")]
    if len(others) > len(places) and all(one.nargs == 1 for one in places):
        extra = others[len(places)]
        path, missing = Path(extra), [name for name, one in options.items() if one.required and name not in flags]
        # Other verbs take their model, or their file, without a flag.
        flag = "--model" if path.is_dir() else missing[0] if path.is_file() and len(missing) == 1 else None
        near = f"; it is named by a flag: {flag} {extra}" if flag in options else suggestion(extra, options)
        ctx.fail(f"{extra!r} is not known{near}")
    return [*flags, "--", *others]


def is_flag(word: str) -> bool:
    """Whether a word is a flag and no value; a negative number is a value, and so are words with a space."""
    name = word.partition("=")[0]
    return len(name) > 1 and name[0] == "-" and " " not in name and not re.fullmatch(r"-(\d+|\d*\.\d+)", name)


def unknown(given: str, names: Iterable[str]) -> str:
    """What is said of a word that is none of `names`."""
    return f"{given!r} is not known{suggestion(given, names) or ';'} allowed: {', '.join(names)}"


def shown(param) -> str:
    """A flag, or what an argument is called in the usage."""
    return param.opts[0] if param.opts[0].startswith("-") else param.metavar or param.name


def refusal(error: typer.TyperException) -> str:
    """What is wrong with the words, in a line."""
    ctx, param = getattr(error, "ctx", None), getattr(error, "param", None)
    path = ctx.command_path if ctx else "kvlab"
    said = f"argument {shown(param)}: {error.message}" if param else error.format_message()
    return f"{path}: {said} (see {path} --help)"


def fail(mistakes: Iterable[str], code: int) -> None:
    """Leave with a line for each mistake."""
    for mistake in mistakes:
        print(" ".join(mistake.split()), file=sys.stderr)
    sys.exit(code)
