"""How commands are read, and how `--help` shows them: by names of the documents, not Python's."""

from __future__ import annotations

import inspect
import math
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class PlainCommand(TyperCommand):
    """A command whose usage reads `spotguard up [OPTIONS] SCRIPT [-- ARGS...]`."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.help = _unbroken(self.help)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read what was typed, and refuse numbers without end, or that are none.

        Where a range is open they are in it, and in click's ranges `nan` always is.
        """
        rest = super().parse_args(ctx, args)
        for parameter in self.get_params(ctx):
            value = ctx.params.get(parameter.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise typer.BadParameter(f"given {value}; allowed: a number", ctx, parameter)
        return rest

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, also `--help` itself."""
        return _without_types(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage after the command's name: brackets around what may be left out."""
        arguments = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]
        return ["[OPTIONS]", *map(_piece, arguments)]


class PlainGroup(TyperGroup):
    """A group of such commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, also `--help` itself."""
        return _without_types(super().get_params(ctx))


def _unbroken(words: str | None) -> str | None:
    """Return a help text whose paragraphs are a line each: the terminal breaks them where it ends.

    They come from docstrings, which are broken where the source's lines end.
    """
    if words is None:
        return None
    paragraphs = inspect.cleandoc(words).split("\n\n")
    return "\n\n".join(part if "\n " in part else part.replace("\n", " ") for part in paragraphs)


def _without_types(parameters: list[Any]) -> list[Any]:
    """Let each parameter show its metavar alone, a switch nothing, and an argument its name."""
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = _nothing
        elif parameter.is_flag:
            parameter.metavar = ""
    return parameters


def _nothing(ctx: object) -> None:
    """Stand in for what typer shows beside an argument, such as `<str>`."""


def _piece(argument: Any) -> str:
    name = argument.metavar + ("..." if argument.nargs != 1 else "")
    return str(name) if argument.required else f"[{name}]"
