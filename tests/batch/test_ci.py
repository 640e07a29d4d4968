"""CI integrations run as on a CI system: the action, the hooks, the container and docs/ci.md."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.documents import code_blocks
from support.published_schemas import run_validator

from graphquant.batch.reports import REPORTS
from graphquant.batch.reports.text import BATCH_CODES
from graphquant.batch.types import read_report

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load(ROOT.joinpath("action.yml").read_text("utf-8"))
HOOKS = yaml.safe_load(ROOT.joinpath(".pre-commit-hooks.yaml").read_text("utf-8"))
PAGE = ROOT.joinpath("docs", "ci.md").read_text("utf-8")


@pytest.fixture
def tools(tmp_path):
    """Return a folder with this checkout's `graphquant`, and a `pip` and `python` that only record their arguments."""
    folder = tmp_path / "tools"
    folder.mkdir()
    pip = f'echo "$*" >> "{tmp_path}/installed"'
    for name, command in {
        "graphquant": f'PYTHONPATH="{ROOT}" exec "{sys.executable}" -m graphquant "$@"',
        "pip": pip,
        "python": pip,
    }.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{command}\n", "utf-8")
        path.chmod(0o755)
    return folder


@pytest.fixture
def repository_folder(tmp_path):
    """Return a repository folder with sample models and the page's manifest."""
    folder = tmp_path / "work"
    folder.joinpath("sample_models").mkdir(parents=True)
    for name in ("digits_cnn.onnx", "digits_rnn.onnx", "digits_cnn_calib.npz", "digits_rnn_calib.npz"):
        shutil.copy(ROOT / "sample_models" / name, folder / "sample_models")
    (manifest,) = code_blocks(PAGE, "toml")
    folder.joinpath("graphquant.toml").write_text(manifest, "utf-8")
    return folder


def run_bash(script, folder, tools, *options, **environment):
    """Run a script as a CI runner does."""
    path = os.pathsep.join([str(tools), os.environ.get("PATH", os.defpath)])
    variables = {"PATH": path, "HOME": str(folder.parent), **environment}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", *options, "-c", script]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)


def expand_expressions(text, inputs):
    """Replace the action's expressions by their values."""
    values = {f"inputs.{name}": value for name, value in inputs.items()} | {"github.action_path": str(ROOT)}
    return re.sub(r"\$\{\{ *(.*?) *\}\}", lambda match: values[match[1]], text)


def run_action(folder, tools, **values):
    """Run the action's scripts with some inputs. Return the results, the step summary and the step outputs."""
    inputs = {name: declaration["default"] for name, declaration in ACTION["inputs"].items()} | values
    files = {name: folder.parent / name for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
    for path in files.values():
        path.write_text("", "utf-8")
    results = []
    for step in ACTION["runs"]["steps"]:
        if "run" not in step:
            continue
        assert "${{" not in step["run"]
        environment = {name: expand_expressions(value, inputs) for name, value in step["env"].items()}
        environment |= {name: str(path) for name, path in files.items()} | {"GITHUB_ACTIONS": "true", "CI": "true"}
        results.append(run_bash(step["run"], folder, tools, **environment))
        if results[-1].returncode:
            break
    return results, *(path.read_text("utf-8") for path in files.values())


def test_published_schemas(tmp_path):
    """The action, the workflow of releases and the pipelines of docs/ci.md match the schemas of their services."""
    blocks = code_blocks(PAGE, "yaml")
    paths = [tmp_path / name for name in ("workflow.yaml", "gitlab.yaml", "pre-commit.yaml")]
    for path, block in zip(paths, blocks, strict=True):
        path.write_text(block, "utf-8")
    workflow, jobs, hooks = paths
    for schema, path in (
        ("github-actions", ROOT / "action.yml"),
        ("github-workflows", ROOT / ".github" / "workflows" / "release.yml"),
        ("github-workflows", workflow),
        ("gitlab-ci", jobs),
    ):
        result = run_validator("check_jsonschema", "--builtin-schema", f"vendor.{schema}", path)
        assert result.returncode == 0, result.stdout
    assert run_validator("pre_commit", "validate-config", hooks).returncode == 0
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(blocks[0].replace("runs-on:", "runs_on:"), "utf-8")
    assert run_validator("check_jsonschema", "--builtin-schema", "vendor.github-workflows", wrong).returncode == 1


@pytest.mark.slow
def test_action_quantizes_and_reports(repository_folder, tools, tmp_path):
    """The action installs, quantizes the manifest's models, writes the summary and reports, and sets its output."""
    results, summary, output = run_action(repository_folder, tools, extras="data")
    assert [result.returncode for result in results] == [0, 0], results[-1].stderr
    assert tmp_path.joinpath("installed").read_text("utf-8") == f"-m pip install {ROOT}[data]\n"
    assert "2 models&#58; 2 done;" in summary
    assert output == "report=graphquant-reports/report.json\n"
    report = read_report(repository_folder / "graphquant-reports" / "report.json")
    assert [outcome.status for outcome in report.outcomes] == ["done", "done"]
    assert {path.suffix for path in repository_folder.joinpath("graphquant-reports").iterdir() if path.is_file()} == {
        *REPORTS
    }
    assert repository_folder.joinpath("build", "digits_cnn.quant.onnx").is_file()

    shutil.rmtree(repository_folder / "build")  # as in the next checkout, with the cache of this one
    results, summary, _ = run_action(repository_folder, tools)
    assert [result.returncode for result in results] == [0, 0]
    assert "2 models&#58; 2 unchanged;" in summary
    assert repository_folder.joinpath("build", "digits_cnn.quant.onnx").is_file()


@pytest.mark.slow
def test_action_fails_if_a_model_fails(repository_folder, tools):
    """A failing model is annotated and the summary is written. File names are not run as shell code."""
    repository_folder.joinpath("it's $(touch here); broken.onnx").write_bytes(b"no model")
    models = "\nit's $(touch here); broken.onnx\nsample_models/digits_rnn.onnx\n"
    results, summary, output = run_action(
        repository_folder, tools, models=models, options="--rules weight_only -j 1", reports="the reports"
    )
    assert [result.returncode for result in results] == [0, 1]
    assert "::error file=it's $(touch here); broken.onnx,title=GQ201::" in results[-1].stdout
    assert summary.startswith("### ❌")
    assert output == "report=the reports/report.json\n"
    assert not repository_folder.joinpath("here").exists()
    baseline = repository_folder / "the reports" / "report.json"
    data = json.loads(baseline.read_text("utf-8"))
    data["outcomes"][1]["size_after"] //= 2
    baseline.with_name("last.json").write_text(json.dumps(data), "utf-8")
    arguments = {"models": "sample_models/digits_rnn.onnx", "options": "--rules weight_only", "reports": "the reports"}
    results, summary, _ = run_action(
        repository_folder, tools, **arguments, compare="the reports/last.json", **{"fail-on": "regression"}
    )
    assert results[-1].returncode == 1
    assert "regressed: the output" in summary


def test_action_caches_after_a_failure():
    """The cache is saved after a failed run too. Each job of a matrix has its own cache key."""
    steps = {step["uses"].partition("@")[0]: step for step in ACTION["runs"]["steps"] if "uses" in step}
    assert "actions/cache" not in steps  # which saves only if the job succeeds
    restore, save = steps["actions/cache/restore"], steps["actions/cache/save"]
    assert save["if"].startswith("always()")
    assert {name: save["with"][name] for name in ("key", "path")} == {
        name: restore["with"][name] for name in ("key", "path")
    }
    assert "strategy.job-index" in save["with"]["key"]
    artifact_name = steps["actions/upload-artifact"]["with"]["name"]
    assert "strategy.job-total > 1 && format('-{0}', strategy.job-index)" in artifact_name


@pytest.mark.slow
def test_action_accepts_multiline_options(repository_folder, tools):
    """Every line of options is passed on. Reports of an earlier run are removed if this run fails early."""
    reports = repository_folder / "graphquant-reports"
    reports.mkdir()
    reports.joinpath("report.json").write_text("old", "utf-8")
    results, _, _ = run_action(repository_folder, tools, options="--jobs 1\n--no-such-option\n")
    assert results[-1].returncode == 2
    assert "--no-such-option" in results[-1].stderr
    assert not reports.joinpath("report.json").exists()
    results, summary, _ = run_action(repository_folder, tools, options="--jobs 1\n--prune-cache 0d\n")
    assert results[-1].returncode == 0, results[-1].stderr
    assert "2 models&#58; 2 done;" in summary
    assert list(repository_folder.joinpath(".graphquant-cache", "files").glob("*/*")) == []


def test_action_without_a_manifest(repository_folder, tools):
    """Without a manifest the step exits with code 2. The summary of an earlier run is not shown."""
    repository_folder.joinpath("graphquant.toml").unlink()
    reports = repository_folder / "graphquant-reports"
    reports.mkdir()
    reports.joinpath("summary.md").write_text("old", "utf-8")
    results, summary, _ = run_action(repository_folder, tools)
    assert results[-1].returncode == 2
    assert "graphquant.toml" in results[-1].stderr
    assert summary == ""


def test_page_names_every_action_input():
    """docs/ci.md lists every input of the action, in order."""
    (inputs_sentence,) = re.findall(r"Its inputs are (.*?);", PAGE, re.DOTALL)
    assert re.findall(r"`([^`]+)`", inputs_sentence) == list(ACTION["inputs"])


def test_page_lists_every_code_and_report():
    """docs/ci.md has a row for each finding code and for each report suffix, in order."""
    assert re.findall(r"^\| (GQ\d+) \|", PAGE, re.MULTILINE) == list(BATCH_CODES)
    assert re.findall(r"^\| `(\.\w+)` \|", PAGE, re.MULTILINE) == list(REPORTS)


def test_pipelines_of_the_page():
    """The GitHub workflow, the GitLab jobs and the pre-commit configuration use hooks and inputs that exist."""
    workflow, jobs, hooks = map(yaml.safe_load, code_blocks(PAGE, "yaml"))
    assert {hook["id"] for hook in hooks["repos"][0]["hooks"]} == {hook["id"] for hook in HOOKS}
    (step,) = (step for step in workflow["jobs"]["quantize"]["steps"] if "graphquant" in step["uses"])
    assert set(step["with"]) <= set(ACTION["inputs"])
    assert set(jobs) == {"quantize", "report"}
    permissions = workflow["jobs"]["report"]["permissions"]  # permissions that are not listed are not granted
    assert permissions == {"actions": "read", "contents": "read", "security-events": "write"}


@pytest.mark.slow
def test_gitlab_jobs(repository_folder, tools):
    """The GitLab scripts run in the runner's shell: a job per shard, then the job that merges reports."""
    jobs = yaml.safe_load(code_blocks(PAGE, "yaml")[1])
    total = str(jobs["quantize"]["parallel"])
    for index in range(1, int(total) + 1):
        process = run_bash(
            "\n".join(jobs["quantize"]["script"]),
            repository_folder,
            tools,
            CI_NODE_INDEX=str(index),
            CI_NODE_TOTAL=total,
        )
        assert process.returncode == 0, process.stderr
    assert sorted(path.name for path in repository_folder.glob(jobs["quantize"]["artifacts"]["reports"]["junit"])) == [
        "junit-1.xml",
        "junit-2.xml",
    ]
    process = run_bash("\n".join(jobs["report"]["script"]), repository_folder, tools)
    assert process.returncode == 0, process.stderr
    merged = read_report(repository_folder / "report.json")
    assert [outcome.name for outcome in merged.outcomes] == [
        "sample_models/digits_cnn.onnx",
        "sample_models/digits_rnn.onnx",
    ]
    assert all(repository_folder.joinpath(path).exists() for path in jobs["report"]["artifacts"]["paths"])


@pytest.mark.slow
def test_github_workflow_merges_shards(repository_folder, tools):
    """The GitHub workflow merges the reports of two shards from the artifact folders."""
    workflow = yaml.safe_load(code_blocks(PAGE, "yaml")[0])
    for number, shard in enumerate(workflow["jobs"]["quantize"]["strategy"]["matrix"]["shard"]):
        results, *_ = run_action(
            repository_folder,
            tools,
            shard=shard,
            options="--timeout 600",
            reports=f"reports/graphquant-reports-{number}",
        )
        assert results[-1].returncode == 0, results[-1].stderr
    shutil.copy(repository_folder / "reports/graphquant-reports-0/report.json", repository_folder / "baseline.json")
    summary = repository_folder / "step"
    for step in workflow["jobs"]["report"]["steps"]:
        if "run" in step:
            process = run_bash(step["run"], repository_folder, tools, GITHUB_STEP_SUMMARY=str(summary))
            assert process.returncode == 0, process.stderr
    assert "2 models&#58; 2 done;" in summary.read_text("utf-8")
    assert json.loads(repository_folder.joinpath("models.sarif").read_text("utf-8"))["runs"][0]["results"] == []


@pytest.mark.slow
def test_makefile(repository_folder, tools):
    """The makefile creates the report once, and again after a model changed."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    (makefile,) = code_blocks(PAGE, "make")
    repository_folder.joinpath("Makefile").write_text(makefile, "utf-8")
    assert run_bash("make accept", repository_folder, tools).returncode == 0
    assert repository_folder.joinpath("baseline.json").is_file()
    assert run_bash("make -q", repository_folder, tools).returncode == 0
    repository_folder.joinpath("sample_models", "digits_rnn.onnx").touch()
    assert "graphquant batch" in run_bash("make -n", repository_folder, tools).stdout


@pytest.mark.slow
def test_commands_of_the_page(repository_folder, tools):
    """The page's shell commands run in order."""
    repository_folder.joinpath("build").mkdir()
    process = run_bash("\n".join(code_blocks(PAGE, "bash")), repository_folder, tools, "-u")
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("2 models: 2 unchanged;") == 2
    assert repository_folder.joinpath("build", "digits_cnn.quant.onnx.intoto.json").is_file()


def test_links_are_valid():
    """Relative links of the page name existing files."""
    targets = re.findall(r"\]\(([^)#]+)", PAGE)
    assert [target for target in targets if "://" not in target and not ROOT.joinpath("docs", target).exists()] == []


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Return a git repository with valid and invalid models and rule files. pre-commit's home is temporary."""
    folder = tmp_path / "repository"
    folder.joinpath("rules").mkdir(parents=True)
    shutil.copy(ROOT / "rules" / "generic.toml", folder / "rules")
    folder.joinpath("rules", "notes.txt").write_text("no rules", "utf-8")
    folder.joinpath("broken.toml").write_text("no rules either", "utf-8")
    monkeypatch.setenv("PRE_COMMIT_HOME", str(tmp_path / "home"))
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):
        monkeypatch.delenv(name, raising=False)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


def run_hooks(folder, tools, **changes):
    """Run pre-commit on all files with the project's hooks and this checkout's graphquant."""
    hooks = [{**hook, "language": "system", **changes.get(hook["id"], {})} for hook in HOOKS]
    config = folder.parent / "config.yaml"
    config.write_text(yaml.safe_dump({"repos": [{"repo": "local", "hooks": hooks}]}), "utf-8")
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
    environment = {**os.environ, "PATH": os.pathsep.join([str(tools), os.environ.get("PATH", os.defpath)])}
    command = [sys.executable, "-m", "pre_commit", "run", "--all-files", "--verbose", "-c", str(config)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_hooks_manifest_is_valid():
    """`pre-commit validate-manifest` accepts the hooks. They run graphquant from a Python environment."""
    command = [sys.executable, "-m", "pre_commit", "validate-manifest", str(ROOT / ".pre-commit-hooks.yaml")]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout
    assert {hook["language"] for hook in HOOKS} == {"python"}
    assert {hook["entry"].split()[0] for hook in HOOKS} == {"graphquant"}


@pytest.mark.slow
def test_hooks(repository, tools, cli):
    """The hooks pass for valid files, and fail with the command's message for invalid ones."""
    model = repository / "net.quant.onnx"
    cli("insert", ROOT / "sample_models" / "digits_cnn.onnx", "--rules", "weight_only", "-o", model)
    process = run_hooks(repository, tools)
    assert process.returncode == 0, process.stdout
    assert re.search(r"net\.quant\.onnx: \d+ quantization ops, 0 findings\.", process.stdout)
    assert "rules/generic.toml: no mistakes in" in process.stdout

    repository.joinpath("mine.rules.toml").write_text('[[rule]]\nname = "a"\nquantise = "b"\n', "utf-8")
    repository.joinpath("not.onnx").write_bytes(b"no model")
    process = run_hooks(repository, tools)
    assert process.returncode == 1
    assert "mine.rules.toml:3:" in process.stdout
    assert "not.onnx" in process.stdout
    assert "broken.toml" not in process.stdout

    repository.joinpath("mine.rules.toml").unlink()
    repository.joinpath("not.onnx").unlink()
    process = run_hooks(repository, tools, **{"graphquant-check": {"args": ["--for", "onnxruntime"]}})
    assert "net.quant.onnx for onnxruntime:" in process.stdout


@pytest.mark.slow
def test_container_copies_all_sources(tmp_path):
    """The files that the Containerfile copies are sufficient to build a wheel with rules and templates."""
    recipe = ROOT.joinpath("Containerfile").read_text("utf-8")
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (?!--from)(.*)$", recipe, re.MULTILINE)]
    allowed = re.findall(r"^!(.*)$", ROOT.joinpath(".dockerignore").read_text("utf-8"), re.MULTILINE)
    names = [name for sources in copied for name in sources]
    assert sorted(names) == sorted(allowed)
    source = tmp_path / "source"
    source.mkdir()
    for name in names:
        if ROOT.joinpath(name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("graphquant-*.whl")
    from zipfile import ZipFile

    wheel_files = set(ZipFile(wheel).namelist())
    assert "graphquant/rules/generic.toml" in wheel_files
    source_files = {
        path.relative_to(source).as_posix() for path in source.joinpath("graphquant").rglob("*") if path.is_file()
    }
    assert source_files - wheel_files == set()
    assert "graphquant/batch/reports/report.schema.json" in source_files


def test_container_does_not_run_as_root():
    """The base image is a pinned slim image, and the entry point runs as an ordinary user."""
    recipe = ROOT.joinpath("Containerfile").read_text("utf-8")
    assert re.search(r"^ARG PYTHON=3\.\d+\.\d+-slim-\w+$", recipe, re.MULTILINE)
    last_stage = recipe[recipe.rindex("\nFROM") :]
    users = re.findall(r"^USER (\w+)$", last_stage, re.MULTILINE)
    assert users == ["graphquant"]
    assert last_stage.index("USER") < last_stage.index('ENTRYPOINT ["graphquant"]')


def test_release_workflow():
    """The workflow tests each wheel, and publishes attested tags only if it is switched on."""
    workflow = yaml.safe_load(ROOT.joinpath(".github", "workflows", "release.yml").read_text("utf-8"))
    jobs = workflow["jobs"]
    assert jobs["attest"]["permissions"]["attestations"] == "write"
    assert jobs["publish"]["if"] == "github.ref_type == 'tag' && vars.PUBLISH == 'true'"
    assert jobs["publish"]["needs"] == "attest"
    assert set(jobs["attest"]["needs"]) == {"wheels", "sdist"}
    assert any(step.get("run") == "python .ci/wheel.py dist/*.whl" for step in jobs["wheels"]["steps"])
    assert {name for name, job in jobs.items() if "id-token" in job.get("permissions", {})} == {"attest", "publish"}
