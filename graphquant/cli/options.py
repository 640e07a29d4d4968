"""Options that are generated from the options models, value types of options, and the group of all commands."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from graphquant.errors import FindingsError, GraphQuantError, InternalError, UsageError, escape_unprintable
from graphquant.utils.options import OptionField, Options, command_line_words, option_fields, resolve_options

CommandFunction = TypeVar("CommandFunction", bound=Callable[..., Any])
OptionsClass = TypeVar("OptionsClass", bound=Options)

WRITTEN_OUTPUTS = "graphquant.written_outputs"  # key of the paths that a command wrote, in the context of click
INTERRUPTED = 130  # exit code after Ctrl-C, as shells use it
LONGEST_LINE = 2_000  # maximum number of characters of an error line, because a name in a model may have millions
PATH = click.Path(path_type=Path)
OUTPUT = click.option("-o", "--output", type=PATH, help="Write to this file instead of stdout.")
HTML = click.option("--html", type=PATH, metavar="FILE", help="Draw the result as an HTML page.")
FORCE = click.option("--force", is_flag=True, help="Replace existing files.")


OPTION_GROUPS = {
    "Input": ("signature", "tags", "allow_links", "pairs", "allow_code", "schema"),
    "Data": (
        *("data", "samples", "stats", "ranges", "ranges_map", "keep_ranges", "everything", "max_memory", "shard_text"),
        "merging",
    ),
    "What to quantize": (
        *("rules", "include", "exclude", "family", "range_source", "method", "requantize", "algorithms"),
        *("no_algorithms", "plan", "float_weights"),
    ),
    "Goals": (
        *("validate", "sites", "metric", "sensitivity", "min_sqnr", "min_agreement", "max_accuracy_drop"),
        *("max_metric_drop", "min_quantized", "max_size", "size_budget", "optimize", "search_time", "strict"),
        *("allow_empty", "check", "compare", "fail_on", "sqnr_step"),
    ),
    "Workers and cache": (
        *("scheduler", "jobs", "timeout", "retries", "shard", "merge", "resume", "no_cache", "cache_dir"),
        *("prune_cache", "verify"),
    ),
    "Output": (
        *("output", "io", "kv_cache", "dry_run", "verbose", "quiet", "form", "top", "report", "reports"),
        *("export_ranges", "html", "attest", "force"),
    ),
}
"""Headings of the help of a command with many options, and the options below each in their order."""


class GroupedCommand(click.Command):
    """Command whose help lists its options by group."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups that the command has options of."""
        records = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        groups = {
            heading: [record for name in names if (record := records.pop(name, None)) is not None]
            for heading, names in OPTION_GROUPS.items()
        }
        groups["Output"] += filter(None, records.values())  # --help, whose name depends on the version of click
        for heading, rows in groups.items():
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def example_lines(*commands: str) -> str:
    """Return examples for the end of a command's help, which click does not wrap."""
    # A line has 80 columns with the backslash at its end.
    wrapper = textwrap.TextWrapper(74, initial_indent="  ", subsequent_indent="      ", break_long_words=False)
    wrapper.break_on_hyphens = False
    lines = [" \\\n".join(wrapper.wrap(f"graphquant {command}")) for command in commands]
    return "\n".join(["\b", "Examples:", *lines])


def format_option(*formats: str) -> Callable[[CommandFunction], CommandFunction]:
    """Return the option that selects the output format; text is the default."""
    return click.option("--format", "form", type=click.Choice(["text", *formats]), default="text", show_default=True)


def options_of(
    options_class: type[Any], *, exclude: tuple[str, ...] = (), unset: bool = False
) -> Callable[[CommandFunction], CommandFunction]:
    """Return a decorator that adds the command-line options of an options model to a command.

    The command receives their values as keyword arguments, which `collect_options` turns into the model again.

    Args:
        options_class: The options model.
        exclude: Fields that the command does not have.
        unset: If True, an option that is not used is None, so that it does not override a manifest, and paths are text,
            because they may contain placeholders.
    """

    def decorate(command: CommandFunction) -> CommandFunction:
        for field in reversed(option_fields(options_class)):
            if field.form.python_only or field.name in exclude:
                continue
            for option in reversed(_click_options(field, unset=unset)):
                command = option(command)
        return command

    return decorate


def collect_options(options_class: type[OptionsClass], values: dict[str, Any], **others: Any) -> OptionsClass:
    """Remove the values of an options model from the keyword arguments of a command, and return the model."""
    if disabled := values.pop("no_algorithms", ()):
        values["algorithms"] = (*values["algorithms"], *(f"not {name}" for name in disabled))
    settings = {field.name: values.pop(field.name) for field in option_fields(options_class) if field.name in values}
    return resolve_options(options_class, None, {**settings, **others})


def _click_options(field: OptionField, *, unset: bool) -> list[Callable[[CommandFunction], CommandFunction]]:
    """Return the click options of one field. Two options set the algorithms: one enables, the other disables."""
    form = field.form
    text, flag, default = form.help or field.description, field.flag, field.default
    names = NameType(form.names, files="FILE" in form.metavar)
    text += f" Names: {', '.join(form.names)}." if form.names and form.names[-1] not in text else ""
    if isinstance(default, bool):
        initial = None if unset else default
        return [click.option(flag, field.name, is_flag=True, flag_value=not default, default=initial, help=text)]
    if field.name == "algorithms":
        off = "Disable an optimization algorithm of the rules."
        return [
            click.option(flag, field.name, multiple=True, type=names, metavar=form.metavar, help=text),
            click.option("--no-algorithm", "no_algorithms", multiple=True, type=names, metavar=form.metavar, help=off),
        ]
    if default == ():
        return [click.option(flag, field.name, multiple=True, type=names, metavar=form.metavar, help=text)]
    kind: Any = click.Choice(form.choices) if form.choices else FieldType(field)
    if form.path:
        kind = str if unset else PATH
    details = {"type": kind, "default": None if unset else default, "help": text}
    details["metavar"] = None if form.choices else form.metavar
    return [click.option(*flag.split(), field.name, show_default=default is not None and not unset, **details)]


class NameType(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has no type argument
    """Text that completion suggests: known names, and files if `files` is True. Other text is valid too."""

    name = "text"

    def __init__(self, names: tuple[str, ...] = (), *, files: bool = False) -> None:
        self._names, self._files = names, files

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the known names that continue `incomplete`, and have the shell complete files."""
        del ctx, param
        # bash forgets the names before a request for files, so the request is first.
        files = [CompletionItem(incomplete, type="file")] if self._files else []
        return [*files, *(CompletionItem(name) for name in self._names if name.startswith(incomplete))]


class FieldType(NameType):
    """Parameter type that validates a value as the options model does, so that the message names the option."""

    def __init__(self, field: OptionField) -> None:
        super().__init__(field.form.names, files=field.form.metavar in {"SPEC", "FILE"})
        self.name = field.form.metavar or field.name
        self._field = field

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the validated value."""
        try:
            return self._field.parse(value)
        except UsageError as error:
            self.fail(str(error).partition(" is invalid: ")[2], param, ctx)


def parse_shard(text: str | None) -> tuple[int, int]:
    """Return the part of --shard, counted from 1, and the number of parts."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text or "1/1")
    position, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= position <= count:
        raise UsageError(f"--shard {text} is invalid. Use I/N, such as 2/8 for the second of eight parts.")
    return position, count


class ErrorHandlingGroup(click.Group):
    """Command group that reports each error as a message and an exit code instead of a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            if ctx.obj is not None:  # while click parses arguments, it turns Ctrl-C into "Aborted!" and exit code 1
                signal.pthread_sigmask(signal.SIG_SETMASK, ctx.obj)
            with command_line_words():
                return super().invoke(ctx)
        except click.UsageError as error:
            # click prints the error later, and would write "Error:".
            setattr(error, "show", partial(_show_usage_error, error))  # noqa: B010  # a method, for mypy
            raise
        except GraphQuantError as error:
            _print_error(error, [] if isinstance(error, FindingsError) else ctx.meta.get(WRITTEN_OUTPUTS, []))
            raise click.exceptions.Exit(error.exit_code) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader closed the pipe; click exits silently
                raise
            raise _report_os_error(error, ctx.meta.get(WRITTEN_OUTPUTS, [])) from error
        except KeyboardInterrupt as error:
            click.echo("Interrupted.", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from error
        except MemoryError as error:
            click.echo("error: There is not enough memory for this model. Use a machine with more memory.", err=True)
            raise click.exceptions.Exit(InternalError.exit_code) from error


def _show_usage_error(error: click.UsageError, file: Any = None) -> None:
    """Print an error of click with the prefix of all other errors."""
    if error.ctx is not None:
        usage, path = error.ctx.get_usage(), error.ctx.command_path
        click.echo(f"{usage}\nTry '{path} --help' for help.\n", file=file, err=True)
    click.echo(f"error: {error.format_message()}", file=file, err=True)


def _report_os_error(error: OSError, written: Sequence[Path]) -> click.exceptions.Exit:
    """Report an error of the operating system that no reader or writer handled, such as a full standard output."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    own_modules = [name for name in modules if name.startswith("graphquant.")]
    # Only commands print. An error in another package comes from a file or a service whose name it lacks.
    is_output = not error.filename and own_modules[-1].startswith("graphquant.cli.")
    name = f"{error.filename or 'A file or a service'} cannot be used"
    name = "The result cannot be written to standard output" if is_output else name
    message = f"{name}: {error.strerror or error}. Use another path, or free some space."
    _print_error(UsageError(message), written)
    if is_output and sys.stdout is sys.__stdout__:
        # Buffered output would fail again when the interpreter flushes it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return click.exceptions.Exit(UsageError.exit_code)


def _print_error(error: GraphQuantError, written: Sequence[Path]) -> None:
    """Print the message with escaped control characters and shortened lines, and the outputs written before."""
    lines = [escape_unprintable(line) for line in f"error: {error}".split("\n")]
    lines += [escape_unprintable(f"note: {path} was written.") for path in written]
    for line in lines:
        omitted = f" ... ({len(line) - LONGEST_LINE} more characters)" if len(line) > LONGEST_LINE else ""
        click.echo(line[:LONGEST_LINE] + omitted, err=True)
