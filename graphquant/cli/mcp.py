"""The command `mcp`: a server of the Model Context Protocol with tools for agents.

Each tool runs a command of the command line in a process of its own, so that a crash of a runtime, or text that it
prints, does not end the connection.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from graphquant.errors import GraphQuantError, MissingDependencyError, UsageError

INSTALL = "pip install 'graphquant[mcp]'"
MAX_CHARACTERS = 20_000  # of the text that a tool returns, because the context of an agent is limited
INSTRUCTIONS = """
Quantize trained ONNX and TensorFlow models to int8. Start with `plan`, then `insert` with calibration data and a bound,
and judge the result with `compare` on other samples and with `check`. `explain` gives the reason of one tensor.
exit_code 0 is success, 1 a finding or a missed bound, 2 a wrong argument, rule or data, 3 an unreadable model, 4 a
missing package. The last sentence of an error says what to do.
""".strip()


def run_tool(*arguments: str | tuple[str, Any], data: str | None = None, allow_code: bool = False) -> dict[str, Any]:
    """Run a command and return its exit code, its output and its messages.

    An argument (option, value) is passed once for each element of a list, without value if it is True, and not at all
    if it is None, False or empty. `data` that names Python code is refused unless `allow_code` is True.
    """
    if data is not None and not allow_code and (refusal := _refuse_code(data)):
        return {"exit_code": UsageError.exit_code, "output": "", "messages": f"error: {refusal}"}
    command = [sys.executable, "-P", "-m", "graphquant"]  # -P: modules in the current folder replace no others
    for argument in arguments:
        if isinstance(argument, str):
            command.append(argument)
            continue
        option, value = argument
        for element in value if isinstance(value, list) else [value]:
            if element is True:
                command.append(option)
            elif element is not None and element is not False and element != "":  # 0 is a value
                command += [f"{option}={element}"]
    if any("\0" in part for part in command):
        messages = "error: An argument has a null character. Remove it."
        return {"exit_code": UsageError.exit_code, "output": "", "messages": messages}
    import subprocess  # imported when needed, because the help of all commands imports this module

    process = subprocess.run(  # noqa: S603  # this program, without a shell
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, errors="replace"
    )
    return {"exit_code": process.returncode, "output": _shorten(process.stdout), "messages": _shorten(process.stderr)}


def _refuse_code(data: str) -> str:
    """Return the error if a data spec names Python code or no data, else ""."""
    from graphquant.calibration.data import parse_data_sources

    try:
        sources = parse_data_sources(data)
    except GraphQuantError as error:
        return str(error)
    if all(source.kind != "function" for source in sources):
        return ""
    return (
        f"The data {data} is Python code, which this server does not execute. Use files, or start it with graphquant"
        " mcp --allow-code."
    )


def _shorten(text: str) -> str:
    """Return the text without its middle if it is too long for an agent; its end has the summary."""
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} more characters)\n{text[-half:]}"


def make_server(*, allow_code: bool) -> Any:
    """Return the server with its tools.

    Raises a MissingDependencyError if the package mcp is not installed.
    """
    try:
        from mcp.server.mcpserver import MCPServer
    except ImportError as error:
        raise MissingDependencyError(f"The server needs the package mcp 2. Install it: {INSTALL}") from error
    server = MCPServer("graphquant", instructions=INSTRUCTIONS)

    @server.tool()
    def plan(
        model: str,
        rules: list[str] | None = None,
        include: list[str] | None = None,
        exclude: list[str] | None = None,
        as_json: bool = False,
    ) -> dict[str, Any]:
        """Show the tensors of a model that would be quantized, by which rule, without running or changing it.

        `rules` are names of targets (onnxruntime, tflite, tensorrt, qnn, openvino, ...) or TOML files, the first match
        wins. `include` and `exclude` are globs of tensors and ops.
        """
        form = "json" if as_json else "text"
        options = (("--rules", rules), ("--include", include), ("--exclude", exclude), ("--format", form))
        return run_tool("plan", *options, "--", model)

    @server.tool()
    def insert(
        model: str,
        output: str,
        data: str | None = None,
        rules: list[str] | None = None,
        exclude: list[str] | None = None,
        method: str | None = None,
        algorithms: list[str] | None = None,
        min_sqnr: float | None = None,
        max_accuracy_drop: str | None = None,
        optimize: str | None = None,
        force: bool = False,
        verbose: bool = False,
    ) -> dict[str, Any]:
        """Quantize a model and write it to `output`, with validation on held-out samples.

        `data` is a data spec: calibration.npz, a folder of images with a preset (photos,preset=imagenet), random:8 for
        tests. `min_sqnr` in dB or `max_accuracy_drop` such as 0.5% make insert search for the cheapest plan that meets
        the bound. `optimize` is macs, size or latency. `force` replaces an existing output.
        """
        options = (
            *(("--output", output), ("--data", data), ("--rules", rules), ("--exclude", exclude)),
            *(("--method", method), ("--algorithm", algorithms), ("--min-sqnr", min_sqnr)),
            *(("--max-accuracy-drop", max_accuracy_drop), ("--optimize", optimize)),
            *(("--force", force), ("--verbose", verbose)),
        )
        return run_tool("insert", *options, "--", model, data=data, allow_code=allow_code)

    @server.tool()
    def explain(
        model: str,
        name: str,
        rules: list[str] | None = None,
        data: str | None = None,
        backend: str | None = None,
        as_json: bool = False,
    ) -> dict[str, Any]:
        """Explain why a tensor, or the tensors around an op, are quantized or stay float, and where a scale is from."""
        form = "json" if as_json else "text"
        options = (("--rules", rules), ("--data", data), ("--for", backend), ("--format", form))
        return run_tool("explain", *options, "--", model, name, data=data, allow_code=allow_code)

    @server.tool()
    def compare(
        float_model: str,
        quantized_model: str,
        data: str,
        sensitivity: bool = False,
        min_sqnr: float | None = None,
        min_agreement: str | None = None,
        as_json: bool = False,
    ) -> dict[str, Any]:
        """Measure the error of a quantized model against its float model: each output and each quantized tensor.

        `sensitivity` also measures the effect of each quantized tensor alone on the outputs, the worst first.
        """
        options = (
            *(("--data", data), ("--sensitivity", sensitivity), ("--min-sqnr", min_sqnr)),
            *(("--min-agreement", min_agreement), ("--format", "json" if as_json else "text")),
        )
        return run_tool("compare", *options, "--", float_model, quantized_model, data=data, allow_code=allow_code)

    @server.tool()
    def check(model: str, backend: str | None = None, as_json: bool = False) -> dict[str, Any]:
        """Find probable mistakes in a quantized model, and which ops a backend runs in int8 or in float, and why."""
        return run_tool("check", ("--for", backend), ("--format", "json" if as_json else "text"), "--", model)

    return server


@click.command("mcp")
@click.option("--allow-code", is_flag=True, help="Execute the Python code that a tool names as data.")
def mcp_command(allow_code: bool) -> None:
    """Serve the commands to agents over stdio, as an MCP server.

    The protocol is the Model Context Protocol; docs/agents.md has the configuration of clients.
    """
    make_server(allow_code=allow_code).run("stdio")
