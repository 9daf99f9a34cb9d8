"""How `--help` shows a command: with the names that the documents use, and no types of Python's."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class PlainCommand(TyperCommand):
    """A command whose usage reads `spotguard up [OPTIONS] SCRIPT [-- ARGS...]`."""

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
