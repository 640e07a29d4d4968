"""The server for agents: its tools, called by a client over stdio, and its errors."""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from graphquant.cli import mcp as mcp_server
from graphquant.errors import MissingDependencyError

SAMPLES = Path(__file__).parents[2] / "sample_models"
MODEL, DATA = str(SAMPLES / "digits_cnn.onnx"), str(SAMPLES / "digits_cnn_calib.npz")


def call_tools(*calls: tuple[str, dict[str, Any]]) -> tuple[set[str], list[Any]]:
    """Start the server, and return the names of its tools and the results of the calls."""
    mcp = pytest.importorskip("mcp")
    from mcp.client.stdio import stdio_client

    async def run() -> tuple[set[str], list[Any]]:
        server = mcp.StdioServerParameters(command=sys.executable, args=["-m", "graphquant", "mcp"])
        async with stdio_client(server) as streams, mcp.ClientSession(*streams) as session:
            await session.initialize()
            names = {tool.name for tool in (await session.list_tools()).tools}
            return names, [await session.call_tool(name, arguments) for name, arguments in calls]

    with ThreadPoolExecutor(1) as pool:  # browser tests before this one may have left an event loop in this thread
        return pool.submit(lambda: asyncio.run(run())).result()


def content(result: Any) -> dict[str, Any]:
    """Return the result of a tool that succeeded."""
    assert not result.is_error, result.content
    return json.loads(result.content[0].text)


@pytest.mark.slow
def test_tools(tmp_path: Path) -> None:
    """Each tool returns the exit code and the output of its command, errors included, and code is not executed."""
    output = str(tmp_path / "out.onnx")
    names, results = call_tools(
        ("plan", {"model": MODEL, "rules": ["tensorrt"], "as_json": True}),
        ("insert", {"model": MODEL, "output": output, "data": DATA, "min_sqnr": 25.0}),
        ("insert", {"model": MODEL, "output": output, "data": DATA}),
        ("explain", {"model": MODEL, "name": "max_pool:0"}),
        ("compare", {"float_model": MODEL, "quantized_model": output, "data": DATA, "as_json": True}),
        ("check", {"model": output, "backend": "onnxruntime"}),
        ("check", {"model": str(tmp_path / "missing.onnx")}),
        ("compare", {"float_model": MODEL, "quantized_model": output, "data": "evil:run"}),
    )
    assert names == {"plan", "insert", "explain", "compare", "check"}
    plan, inserted, again, explained, compared, _, missing, code = map(content, results)
    assert json.loads(plan["output"])["sites"]
    assert (inserted["exit_code"], Path(output).is_file()) == (0, True)
    assert (again["exit_code"], "--force" in again["messages"]) == (2, True)
    assert (explained["exit_code"], "max_pool:0" in explained["output"]) == (0, True)
    assert json.loads(compared["output"])["outputs"][0]["sqnr"] > 25
    assert (missing["exit_code"], "missing.onnx" in missing["messages"]) == (3, True)
    assert (code["exit_code"], "--allow-code" in code["messages"]) == (2, True)


def test_long_text_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The middle of a long output is left out."""
    monkeypatch.setattr(mcp_server, "MAX_CHARACTERS", 10)
    result = mcp_server.run_tool("rules", "show", "generic")
    assert result["exit_code"] == 0
    assert result["output"].startswith(
        SAMPLES.parent.joinpath("rules", "generic.toml").read_text("utf-8")[:5] + "\n..."
    )


def test_data_of_signatures(tmp_path: Path) -> None:
    """Code is refused as the data of one of several signatures too, and files are accepted."""
    (tmp_path / "a.npz").touch()
    data = f"x={tmp_path / 'a.npz'}"
    assert mcp_server.run_tool("rules", "list", data=data)["exit_code"] == 0
    refused = mcp_server.run_tool("rules", "list", data=f"{data},y=evil:run")
    assert (refused["exit_code"], "--allow-code" in refused["messages"]) == (2, True)


def test_zero_is_an_argument() -> None:
    """Zero is passed, and an option that is None, False or empty is not."""
    arguments = (("--optimize", None), ("--force", False), ("--method", ""), ("--samples", 0))
    result = mcp_server.run_tool("insert", *arguments, "--", MODEL)
    assert (result["exit_code"], "--samples" in result["messages"]) == (2, True)


def test_null_character() -> None:
    """An argument that no process can receive is a wrong argument."""
    assert mcp_server.run_tool("plan", ("--rules", ["a\0b"]), "--", MODEL)["exit_code"] == 2


def test_missing_package(monkeypatch: pytest.MonkeyPatch, cli: Any) -> None:
    """Without the package, the exit code is 4 and the message has the command that installs it."""
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    with pytest.raises(MissingDependencyError, match=r"graphquant\[mcp\]"):
        mcp_server.make_server(allow_code=False)
    assert "pip install" in cli("mcp", code=4).stderr
