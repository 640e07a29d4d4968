"""Mutate the inputs of every command, for small models of every format, and count how the commands end.

A case copies a model with its data, statistics, plan, rule file and manifest to a new folder, mutates one of the files,
and runs a command of the command line in this process. Worker processes with limits on time and memory run the cases::

    python benchmarks/mutated_inputs.py [--cases 50000] [--folder DIR]
    python benchmarks/mutated_inputs.py --only 1234

The results are lines of JSON in the folder, and the same command continues an interrupted run. It prints the endings of
each command, and each problem: a traceback, a crash, a case beyond a limit, a changed source, a file that a failed
command wrote, and a quantized model that its runtime does not load although it loads the source. The exit code is 1 if
there is any. `--only` runs a single case, keeps its folder, and prints the command and its output.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import importlib
import io
import json
import os
import pkgutil
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from file_mutations import mutate_file
from mutated_inputs_models import MODEL_WEIGHTS, PLAN, ROOT, STATS, Command, build_models, commands, format_of

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMORY = 8 << 30
"""Bytes of address space of a worker; TensorFlow alone takes a quarter of it."""

CPU_SECONDS, SECONDS = 60, 600
"""Longest times of a case, of the processor and in total. The usual one is some hundredths of a second."""

CASES_OF_WORKER = 1000
"""Number of cases after which a worker is replaced."""

# -- cases -----------------------------------------------------------------------------------------


def choose_case(index: int) -> tuple[random.Random, str, str, Command]:
    """Return the generator, the model, the command's name, and the command of a case."""
    rng = random.Random(f"case {index}")  # noqa: S311  # not a secret
    name = rng.choices(list(MODEL_WEIGHTS), list(MODEL_WEIGHTS.values()))[0]
    table = commands(rng, name)
    command = rng.choices(list(table), [weight for weight, _ in table.values()])[0]
    return rng, name, command, table[command][1]


def run_case(index: int, corpus: Path, folder: Path, *, verbose: bool = False) -> dict[str, Any]:
    """Run one case in a new folder and return its record."""
    from support.cli import invoke_cli

    rng, name, command, (arguments, files) = choose_case(index)
    shutil.copytree(corpus / name, folder)
    (folder / "done").unlink()
    for file in (STATS, PLAN):
        if (folder / file).exists():
            shutil.copy(folder / file, folder / f"other{Path(file).suffix}")
    os.chdir(folder)
    file = rng.choice([file for file in files if file in arguments] or files)
    mutation = mutate_file(rng, folder / file)
    before = file_digests(folder)
    if verbose:
        print(f"{name}: {mutation} ({file})\ngraphquant {' '.join(arguments)}")
    start = time.monotonic()
    result = invoke_cli(*arguments)
    seconds = time.monotonic() - start
    ending, details = ending_of(result)
    if verbose:
        print(result.output, ending, details, f"{seconds:.2f} s", sep="\n")
    problems = [details] if details else []
    after = file_digests(folder)
    problems += [f"changed {path}" for path in before if after.get(path) != before[path]]
    new_files = sorted(after.keys() - before.keys())
    kind = arguments[0]
    # A missed bound and a float model that cannot be run are exit code 1 with a result; so are findings of the commands
    # that print.
    has_result = kind in {"diff", "check", "compare", "data"} or "search" in command or command == "insert --data"
    may_write = ending == "exit 1" and has_result
    if ending != "exit 0" and new_files and not may_write and kind != "batch":
        problems.append(f"{ending} wrote {new_files}")
    problems += [f"temporary file {path}" for path in new_files if path.endswith((".part", ".tmp"))]
    if ending == "exit 0" and kind == "insert" and (folder / arguments[3]).exists():
        reason = load_failure(folder / arguments[1], folder / arguments[3])
        problems += [f"the result does not load: {reason}"] if reason else []
    return {
        "case": index, "command": command, "model": name, "mutation": mutation, "ending": ending,
        "seconds": round(seconds, 3), "problems": problems,
    }  # fmt: skip


def file_digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def ending_of(result: Any) -> tuple[str, str]:
    """Return the ending of a command, and details if it is a problem."""
    from graphquant.errors import InternalError

    error = result.exception
    if error is not None and not isinstance(error, SystemExit):
        return "traceback", "".join(traceback.format_exception(error))[-3000:]
    cause = error
    while cause is not None:
        if isinstance(cause, MemoryError):
            return "memory", ""
        if isinstance(cause, InternalError):
            return "internal error", "".join(traceback.format_exception(cause))[-3000:]
        cause = cause.__cause__ or cause.__context__
    if "Traceback" in result.output:
        return "traceback", result.output[-3000:]
    return f"exit {result.exit_code}", ""


def load_failure(source: Path, quantized: Path) -> str:
    """Return why the runtime does not load the quantized model; "" if it loads it, or not the source either."""
    load = load_onnx if format_of(source.name) == "onnx" else load_tensorflow
    try:
        load(source)
    except Exception:  # noqa: BLE001  # the runtimes' errors have no common class
        return ""
    try:
        load(quantized)
    except Exception as error:  # noqa: BLE001  # the same
        return str(error)[:1000]
    return ""


def load_onnx(path: Path) -> None:
    """Load a model in onnxruntime."""
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    content: Any = str(path)
    if path.suffix != ".onnx":
        texts = {".json": "json", ".onnxtxt": "onnxtxt", ".textproto": "textproto"}
        content = onnx.load(str(path), format=texts[path.suffix]).SerializeToString()
    onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def load_tensorflow(path: Path) -> None:
    """Import a graph into TensorFlow, or a file into TFLite. A Keras file counts as loaded."""
    import tensorflow as tf
    from google.protobuf import text_format

    v1 = tf.compat.v1
    with v1.Graph().as_default() as graph:
        if path.is_dir():
            with v1.Session(graph=graph) as session:
                v1.saved_model.load(session, ["serve"], str(path))
        elif path.suffix == ".tflite":
            tf.lite.Interpreter(str(path)).allocate_tensors()
        elif path.suffix == ".meta":
            v1.train.import_meta_graph(str(path))
        elif path.suffix in {".pb", ".pbtxt"}:
            message = v1.GraphDef()
            if path.suffix == ".pbtxt":
                text_format.Parse(path.read_text(), message)
            else:
                message.ParseFromString(path.read_bytes())
            v1.import_graph_def(message, name="")


# -- workers ---------------------------------------------------------------------------------------


def import_modules() -> None:
    """Import before workers are forked, so that each starts at once, and edits of the code do not reach a run."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]
    import graphquant

    for module in pkgutil.walk_packages(graphquant.__path__, "graphquant."):
        with suppress(ImportError):
            importlib.import_module(module.name)
    for name in ("support.cli", "test_fuzz", "opsets", "keras", "tensorflow", "onnxruntime"):
        importlib.import_module(name)
    importlib.import_module("onnxruntime").set_default_logger_severity(4)


def work(cases: list[int], corpus: Path, folder: Path, writer: int) -> None:
    """Run cases in a worker process; write the number of each case and then its record to the pipe."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with (folder / "crash.txt").open("w") as log, os.fdopen(writer, "w") as pipe:
        faulthandler.enable(log)
        for descriptor in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        # Workers of a batch are new processes, which would import this file again.
        del sys.modules["__main__"].__file__
        for index in cases:
            target = folder / f"case{index}"
            try:
                record = run_case(index, corpus, target)
            except BaseException:  # noqa: BLE001  # a defect of this script must not end the run
                record = {"case": index, "command": "?", "model": "?", "mutation": "?", "ending": "not run",
                          "seconds": 0, "problems": [traceback.format_exc()[-3000:]]}  # fmt: skip
            os.chdir(folder)
            shutil.rmtree(target, ignore_errors=True)
            pipe.write(json.dumps(record) + "\n")
            pipe.flush()


def cpu_seconds(process: int) -> float:
    """Return the processor time of a process, which does not depend on the load of the machine."""
    times = psutil.Process(process).cpu_times()
    return times.user + times.system


def run_worker(cases: list[int], corpus: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of cases that run in one worker, until it dies; the last one says how."""
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        try:
            os.close(reader)
            os.setpgid(0, 0)
            work(cases, corpus, folder, writer)
        finally:
            os._exit(0)
    os.close(writer)
    done, cpu_limit, deadline = 0, CPU_SECONDS, time.monotonic() + SECONDS
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        lines = io.BytesIO()
        while done < len(cases):
            ready = select.select([pipe], [], [], 2)[0]
            if not ready and cpu_seconds(process) < cpu_limit and time.monotonic() < deadline:
                continue
            content = os.read(pipe.fileno(), 1 << 20) if ready else b""
            if not content:
                break
            cpu_limit, deadline = cpu_seconds(process) + CPU_SECONDS, time.monotonic() + SECONDS
            pending = (lines.getvalue() + content).split(b"\n")
            lines = io.BytesIO()
            lines.write(pending.pop())
            for line in pending:
                done += 1
                yield json.loads(line)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    status = os.waitpid(process, 0)[1]
    if done < len(cases):
        ending = f"signal {os.WTERMSIG(status)}" if ready and os.WIFSIGNALED(status) else "timeout"
        log = (folder / "crash.txt").read_text()[-3000:]
        yield {**describe(cases[done]), "ending": ending, "seconds": 0, "problems": [f"{ending} {log}"]}


def describe(index: int) -> dict[str, Any]:
    """Return the start of the record of a case that did not end."""
    _, name, command, _ = choose_case(index)
    return {"case": index, "command": command, "model": name, "mutation": "?"}


def print_summary(records: list[dict[str, Any]]) -> int:
    """Print the endings of each command and the problems; return the number of problems."""
    endings = sorted({record["ending"] for record in records})
    print("| command | cases | " + " | ".join(endings) + " |\n" + "| --- " * (len(endings) + 2) + "|")
    names = sorted({record["command"] for record in records})
    for name in (*names, "all"):
        counts = Counter(record["ending"] for record in records if name in {record["command"], "all"})
        print(f"| {name} | {counts.total()} | " + " | ".join(str(counts[ending]) for ending in endings) + " |")
    formats = Counter(format_of(record["model"]) for record in records)
    seconds = sorted(record["seconds"] for record in records)
    print(f"\n{dict(formats)}; seconds: median {seconds[len(seconds) // 2]}, longest {seconds[-1]}\n")
    problems = [record for record in records if record["problems"]]
    for record in problems:
        last_line = record["problems"][0].strip().split("\n")[-1][:300]
        print(f"{record['case']}: {record['command']}, {record['model']}, {record['mutation']}: {last_line}")
    return len(problems)


def run_cases(cases: list[int], folder: Path, records: list[dict[str, Any]]) -> None:
    """Run cases in workers, append their records to the results, and print problems at once."""
    with (folder / "results.jsonl").open("a") as file:
        while cases:
            done = set()
            for record in run_worker(cases[:CASES_OF_WORKER], folder / "models", folder / "work"):
                records.append(record)
                done.add(record["case"])
                file.write(json.dumps(record) + "\n")
                file.flush()
                if record["problems"]:
                    last_line = record["problems"][0].strip().split("\n")[-1][:300]
                    print(f"{record['case']}: {record['command']}, {record['model']}: {last_line}", flush=True)
            for path in (folder / "work").iterdir():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
            cases = [index for index in cases if index not in done]


def prepare_models(folder: Path) -> None:
    """Build the models in a process of its own, because TensorFlow must not start threads in this one."""
    if (folder / "done").exists():
        return
    process = os.fork()
    if not process:
        status = 1
        try:
            build_models(folder)
            (folder / "done").touch()
            status = 0
        finally:
            os._exit(status)
    if os.waitpid(process, 0)[1]:
        sys.exit("The models cannot be built.")


def main() -> None:
    """Run the cases that have no result yet, and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=50_000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "graphquant-mutations")
    parser.add_argument("--only", type=int)
    parser.add_argument("--repeat", action="store_true", help="run the cases with problems again")
    parser.add_argument("--summary", action="store_true", help="print the summary of the results so far")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    results = folder / "results.jsonl"
    records = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    if arguments.summary:
        sys.exit(bool(print_summary(records)))
    (folder / "work").mkdir(parents=True, exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    import_modules()
    prepare_models(folder / "models")
    if arguments.only is not None:
        target = folder / "work" / f"only{arguments.only}"
        shutil.rmtree(target, ignore_errors=True)
        print(json.dumps(run_case(arguments.only, folder / "models", target, verbose=True), indent=1))
        return
    if arguments.repeat:
        records = [record for record in records if not record["problems"]]
        results.write_text("".join(json.dumps(record) + "\n" for record in records))
    finished = {record["case"] for record in records}
    run_cases([index for index in range(arguments.cases) if index not in finished], folder, records)
    sys.exit(bool(print_summary(records)))


if __name__ == "__main__":
    main()
