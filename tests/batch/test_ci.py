"""What graphquant offers to CI systems runs here as there: the action, the hooks, the container, docs/ci.md."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from graphquant.batch.reports import REPORTS
from graphquant.batch.reports.text import BATCH_CODES
from graphquant.batch.types import read_report

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load(ROOT.joinpath("action.yml").read_text("utf-8"))
HOOKS = yaml.safe_load(ROOT.joinpath(".pre-commit-hooks.yaml").read_text("utf-8"))
PAGE = ROOT.joinpath("docs", "ci.md").read_text("utf-8")


def blocks(language):
    """The code blocks of the page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def tools(tmp_path):
    """A folder with a `graphquant` that is this checkout's, and a `pip` and a `python` that install nothing."""
    folder = tmp_path / "tools"
    folder.mkdir()
    pip = f'echo "$*" >> "{tmp_path}/installed"'
    for name, does in {
        "graphquant": f'PYTHONPATH="{ROOT}" exec "{sys.executable}" -m graphquant "$@"',
        "pip": pip,
        "python": pip,
    }.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{does}\n", "utf-8")
        path.chmod(0o755)
    return folder


@pytest.fixture
def workspace(tmp_path):
    """A repository's folder: the sample models and the manifest of the page."""
    folder = tmp_path / "work"
    folder.joinpath("sample_models").mkdir(parents=True)
    for name in ("digits_cnn.onnx", "digits_rnn.onnx", "digits_cnn_calib.npz", "digits_rnn_calib.npz"):
        shutil.copy(ROOT / "sample_models" / name, folder / "sample_models")
    (manifest,) = blocks("toml")
    folder.joinpath("graphquant.toml").write_text(manifest, "utf-8")
    return folder


def bash(script, folder, tools, *options, **environment):
    """Runs a script as a runner would."""
    path = os.pathsep.join([str(tools), os.environ.get("PATH", os.defpath)])
    given = {"PATH": path, "HOME": str(folder.parent), **environment}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", *options, "-c", script]
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=False)


def filled(text, inputs):
    """The action's expressions with their values, none of which may stand in a script itself."""
    values = {f"inputs.{name}": value for name, value in inputs.items()} | {"github.action_path": str(ROOT)}
    return re.sub(r"\$\{\{ *(.*?) *\}\}", lambda found: values[found[1]], text)


def run_action(folder, tools, **given):
    """The steps of the action that are scripts, with inputs; their results and what they handed on."""
    inputs = {name: one["default"] for name, one in ACTION["inputs"].items()} | given
    files = {name: folder.parent / name for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
    for path in files.values():
        path.write_text("", "utf-8")
    results = []
    for step in ACTION["runs"]["steps"]:
        if "run" not in step:
            continue
        assert "${{" not in step["run"]
        environment = {name: filled(value, inputs) for name, value in step["env"].items()}
        environment |= {name: str(path) for name, path in files.items()} | {"GITHUB_ACTIONS": "true", "CI": "true"}
        results.append(bash(step["run"], folder, tools, **environment))
        if results[-1].returncode:
            break
    return results, *(path.read_text("utf-8") for path in files.values())


def test_the_action_is_as_its_schema_says(published):
    """By the schema that editors use for actions."""
    jsonschema.validate(ACTION, published("https://json.schemastore.org/github-action.json"))


@pytest.mark.slow
def test_the_action(workspace, tools, tmp_path):
    """Its steps install, quantize what the manifest says, write the summary and all reports, and hand the report on."""
    results, summary, output = run_action(workspace, tools, extras="data")
    assert [one.returncode for one in results] == [0, 0], results[-1].stderr
    assert tmp_path.joinpath("installed").read_text("utf-8") == f"-m pip install {ROOT}[data]\n"
    assert "2 models&#58; 2 done;" in summary
    assert output == "report=graphquant-reports/report.json\n"
    report = read_report(workspace / "graphquant-reports" / "report.json")
    assert [one.status for one in report.outcomes] == ["done", "done"]
    assert {path.suffix for path in workspace.joinpath("graphquant-reports").iterdir() if path.is_file()} == {*REPORTS}
    assert workspace.joinpath("build", "digits_cnn.quant.onnx").is_file()

    shutil.rmtree(workspace / "build")  # as in the next checkout, with the cache of this one
    results, summary, _ = run_action(workspace, tools)
    assert [one.returncode for one in results] == [0, 0]
    assert "2 models&#58; 2 unchanged;" in summary
    assert workspace.joinpath("build", "digits_cnn.quant.onnx").is_file()


@pytest.mark.slow
def test_the_action_fails_where_a_model_fails(workspace, tools):
    """Odd names are taken as they are, the failure is annotated, and the summary is written all the same."""
    workspace.joinpath("it's $(touch here); broken.onnx").write_bytes(b"no model")
    models = "\nit's $(touch here); broken.onnx\nsample_models/digits_rnn.onnx\n"
    results, summary, output = run_action(
        workspace, tools, models=models, options="--rules weight_only -j 1", reports="the reports"
    )
    assert [one.returncode for one in results] == [0, 1]
    assert "::error file=it's $(touch here); broken.onnx,title=GQ201::" in results[-1].stdout
    assert summary.startswith("### ❌")
    assert output == "report=the reports/report.json\n"
    assert not workspace.joinpath("here").exists()
    baseline = workspace / "the reports" / "report.json"
    data = json.loads(baseline.read_text("utf-8"))
    data["outcomes"][1]["size_after"] //= 2
    baseline.with_name("last.json").write_text(json.dumps(data), "utf-8")
    given = {"models": "sample_models/digits_rnn.onnx", "options": "--rules weight_only", "reports": "the reports"}
    results, summary, _ = run_action(
        workspace, tools, **given, compare="the reports/last.json", **{"fail-on": "regression"}
    )
    assert results[-1].returncode == 1
    assert "regressed: the output has" in summary


def test_the_action_keeps_what_was_finished():
    """The cache is saved after a red run as well, under a key of each job's own."""
    steps = {step["uses"].partition("@")[0]: step for step in ACTION["runs"]["steps"] if "uses" in step}
    assert "actions/cache" not in steps  # which saves only if the job succeeds
    restore, save = steps["actions/cache/restore"], steps["actions/cache/save"]
    assert save["if"].startswith("always()")
    assert {name: save["with"][name] for name in ("key", "path")} == {
        name: restore["with"][name] for name in ("key", "path")
    }
    assert "strategy.job-index" in save["with"]["key"]
    named = steps["actions/upload-artifact"]["with"]["name"]
    assert "strategy.job-total > 1 && format('-{0}', strategy.job-index)" in named


@pytest.mark.slow
def test_the_action_takes_options_on_several_lines(workspace, tools):
    """Each counts, and the reports of an earlier run are gone if this one writes none."""
    reports = workspace / "graphquant-reports"
    reports.mkdir()
    reports.joinpath("report.json").write_text("old", "utf-8")
    results, _, _ = run_action(workspace, tools, options="--jobs 1\n--no-such-option\n")
    assert results[-1].returncode == 2
    assert "--no-such-option" in results[-1].stderr
    assert not reports.joinpath("report.json").exists()
    results, summary, _ = run_action(workspace, tools, options="--jobs 1\n--prune-cache 0d\n")
    assert results[-1].returncode == 0, results[-1].stderr
    assert "2 models&#58; 2 done;" in summary
    assert list(workspace.joinpath(".graphquant-cache", "files").glob("*/*")) == []


def test_the_action_without_a_manifest(workspace, tools):
    """A usage error is the step's, with its code and words, and there is no summary of an earlier run."""
    workspace.joinpath("graphquant.toml").unlink()
    reports = workspace / "graphquant-reports"
    reports.mkdir()
    reports.joinpath("summary.md").write_text("old", "utf-8")
    results, summary, _ = run_action(workspace, tools)
    assert results[-1].returncode == 2
    assert "graphquant.toml" in results[-1].stderr
    assert summary == ""


def test_the_page_names_the_inputs_of_the_action():
    """Each of them."""
    (said,) = re.findall(r"Its inputs are (.*?);", PAGE, re.DOTALL)
    assert re.findall(r"`([^`]+)`", said) == list(ACTION["inputs"])


def test_the_page_has_every_code():
    """A row for each, in order; the reports' table has each suffix."""
    assert re.findall(r"^\| (GQ\d+) \|", PAGE, re.MULTILINE) == list(BATCH_CODES)
    assert re.findall(r"^\| `(\.\w+)` \|", PAGE, re.MULTILINE) == list(REPORTS)


def test_the_pipelines_of_the_page_are_as_their_schemas_say(published):
    """GitHub's workflow, GitLab's jobs and the hooks' configuration."""
    workflow, jobs, hooks = map(yaml.safe_load, blocks("yaml"))
    workflow["on"] = workflow.pop(True)  # which is what YAML 1.1 takes that key for
    jsonschema.validate(workflow, published("https://json.schemastore.org/github-workflow.json"))
    gitlab = "https://gitlab.com/gitlab-org/gitlab/-/raw/master/app/assets/javascripts/editor/schema/ci.json"
    jsonschema.validate(jobs, published(gitlab))
    jsonschema.validate(hooks, published("https://json.schemastore.org/pre-commit-config.json"))
    assert {one["id"] for one in hooks["repos"][0]["hooks"]} == {one["id"] for one in HOOKS}
    (step,) = (one for one in workflow["jobs"]["quantize"]["steps"] if "graphquant" in one["uses"])
    assert set(step["with"]) <= set(ACTION["inputs"])
    assert set(jobs) == {"quantize", "report"}
    rights = workflow["jobs"]["report"]["permissions"]  # what is not named there is none
    assert rights == {"actions": "read", "contents": "read", "security-events": "write"}


@pytest.mark.slow
def test_gitlab(workspace, tools):
    """The scripts of the jobs run in the shell of a runner, one for each shard, then the one that merges."""
    jobs = yaml.safe_load(blocks("yaml")[1])
    total = str(jobs["quantize"]["parallel"])
    for index in range(1, int(total) + 1):
        ran = bash(
            "\n".join(jobs["quantize"]["script"]), workspace, tools, CI_NODE_INDEX=str(index), CI_NODE_TOTAL=total
        )
        assert ran.returncode == 0, ran.stderr
    assert sorted(path.name for path in workspace.glob(jobs["quantize"]["artifacts"]["reports"]["junit"])) == [
        "junit-1.xml",
        "junit-2.xml",
    ]
    ran = bash("\n".join(jobs["report"]["script"]), workspace, tools)
    assert ran.returncode == 0, ran.stderr
    merged = read_report(workspace / "report.json")
    assert [one.name for one in merged.outcomes] == ["sample_models/digits_cnn.onnx", "sample_models/digits_rnn.onnx"]
    assert all(workspace.joinpath(path).exists() for path in jobs["report"]["artifacts"]["paths"])


@pytest.mark.slow
def test_github_merges(workspace, tools):
    """The workflow's scripts, with the reports of two shards where the artifacts come to be."""
    workflow = yaml.safe_load(blocks("yaml")[0])
    for place, shard in enumerate(workflow["jobs"]["quantize"]["strategy"]["matrix"]["shard"]):
        results, *_ = run_action(
            workspace, tools, shard=shard, options="--timeout 600", reports=f"reports/graphquant-reports-{place}"
        )
        assert results[-1].returncode == 0, results[-1].stderr
    shutil.copy(workspace / "reports/graphquant-reports-0/report.json", workspace / "baseline.json")
    summary = workspace / "step"
    for step in workflow["jobs"]["report"]["steps"]:
        if "run" in step:
            ran = bash(step["run"], workspace, tools, GITHUB_STEP_SUMMARY=str(summary))
            assert ran.returncode == 0, ran.stderr
    assert "2 models&#58; 2 done;" in summary.read_text("utf-8")
    assert json.loads(workspace.joinpath("models.sarif").read_text("utf-8"))["runs"][0]["results"] == []


@pytest.mark.slow
def test_make(workspace, tools):
    """The makefile makes the report once, and again after a model changed."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    (makefile,) = blocks("make")
    workspace.joinpath("Makefile").write_text(makefile, "utf-8")
    assert bash("make accept", workspace, tools).returncode == 0
    assert workspace.joinpath("baseline.json").is_file()
    assert bash("make", workspace, tools).stdout == "make: 'build/report.json' is up to date.\n"
    workspace.joinpath("sample_models", "digits_rnn.onnx").touch()
    assert "graphquant batch" in bash("make -n", workspace, tools).stdout


@pytest.mark.slow
def test_the_commands_of_the_page(workspace, tools):
    """They run in order, as they stand."""
    workspace.joinpath("build").mkdir()
    ran = bash("\n".join(blocks("bash")), workspace, tools, "-u")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("2 models: 2 unchanged;") == 2
    assert workspace.joinpath("build", "digits_cnn.quant.onnx.intoto.json").is_file()


def test_links_lead_somewhere():
    """Links to files name files that exist."""
    targets = re.findall(r"\]\(([^)#]+)", PAGE)
    assert [one for one in targets if "://" not in one and not ROOT.joinpath("docs", one).exists()] == []


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git repository with models and rule files, good and bad, in which pre-commit has a home of its own."""
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
    """What pre-commit says of all files: the hooks as they are offered, but that this checkout's graphquant runs."""
    hooks = [{**hook, "language": "system", **changes.get(hook["id"], {})} for hook in HOOKS]
    config = folder.parent / "config.yaml"
    config.write_text(yaml.safe_dump({"repos": [{"repo": "local", "hooks": hooks}]}), "utf-8")
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
    environment = {**os.environ, "PATH": os.pathsep.join([str(tools), os.environ.get("PATH", os.defpath)])}
    command = [sys.executable, "-m", "pre_commit", "run", "--all-files", "--verbose", "-c", str(config)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_hooks_are_as_pre_commit_wants_them():
    """Its own check of the file passes."""
    command = [sys.executable, "-m", "pre_commit", "validate-manifest", str(ROOT / ".pre-commit-hooks.yaml")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert {hook["language"] for hook in HOOKS} == {"python"}
    assert {hook["entry"].split()[0] for hook in HOOKS} == {"graphquant"}


@pytest.mark.slow
def test_the_hooks(repository, tools, cli):
    """They pass over what is good, and fail with the words of the command at what is not."""
    model = repository / "net.quant.onnx"
    cli("insert", ROOT / "sample_models" / "digits_cnn.onnx", "--rules", "weight_only", "-o", model)
    ran = run_hooks(repository, tools)
    assert ran.returncode == 0, ran.stdout
    assert re.search(r"net\.quant\.onnx: \d+ quantization ops, 0 findings\.", ran.stdout)
    assert "rules/generic.toml: no mistakes in" in ran.stdout

    repository.joinpath("mine.rules.toml").write_text('[[rule]]\nname = "a"\nquantise = "b"\n', "utf-8")
    repository.joinpath("not.onnx").write_bytes(b"no model")
    ran = run_hooks(repository, tools)
    assert ran.returncode == 1
    assert "mine.rules.toml:3:" in ran.stdout
    assert "not.onnx" in ran.stdout
    assert "broken.toml" not in ran.stdout

    repository.joinpath("mine.rules.toml").unlink()
    repository.joinpath("not.onnx").unlink()
    ran = run_hooks(repository, tools, **{"graphquant-check": {"args": ["--for", "onnxruntime"]}})
    assert "net.quant.onnx for onnxruntime:" in ran.stdout


@pytest.mark.slow
def test_the_container_has_all_that_is_built(tmp_path):
    """What the recipe copies, and the ignore file lets through, is enough for a wheel with rules and pages' parts."""
    recipe = ROOT.joinpath("Containerfile").read_text("utf-8")
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (?!--from)(.*)$", recipe, re.MULTILINE)]
    let_in = re.findall(r"^!(.*)$", ROOT.joinpath(".dockerignore").read_text("utf-8"), re.MULTILINE)
    names = [name for some in copied for name in some]
    assert sorted(names) == sorted(let_in)
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

    inside = set(ZipFile(wheel).namelist())
    assert "graphquant/rules/generic.toml" in inside
    there = {path.relative_to(source).as_posix() for path in source.joinpath("graphquant").rglob("*") if path.is_file()}
    assert there - inside == set()
    assert "graphquant/batch/reports/report.schema.json" in there


def test_the_container_runs_without_rights():
    """A pinned slim image, and a user that is not root when the command is run."""
    recipe = ROOT.joinpath("Containerfile").read_text("utf-8")
    assert re.search(r"^ARG PYTHON=3\.\d+\.\d+-slim-\w+$", recipe, re.MULTILINE)
    last = recipe[recipe.rindex("\nFROM") :]
    users = re.findall(r"^USER (\w+)$", last, re.MULTILINE)
    assert users == ["graphquant"]
    assert last.index("USER") < last.index('ENTRYPOINT ["graphquant"]')
