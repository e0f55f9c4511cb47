"""Check the files of `deploy/` with validators that bring their schemas with them."""

import configparser
import json
import re
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import promql_parser
import pytest
import yaml
from documented import ROOT
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dllm_plugin.commands.options import take_model
from dllm_plugin.config.options import Options
from dllm_plugin.decoding.families import FAMILIES
from dllm_plugin.decoding.methods import choose_method
from dllm_plugin.models.catalogue import CHECKPOINTS

DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("*.Dockerfile"))
KUBERNETES = "1.33.0"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yml").read_text(encoding="utf-8"))
BOARD = json.loads((DEPLOY / "grafana" / "board.json").read_text(encoding="utf-8"))


def expressions() -> list[str]:
    """Every query of the board and the alerts."""
    found = []
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            found.append(target["expr"].replace("$__rate_interval", "5m"))
    alerts = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    for group in alerts["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["summary"] and rule["labels"]["severity"]
            found.append(rule["expr"])
    return found


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_dockerfiles_have_no_lint(path: Path) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_images_copy_files_that_exist(path: Path) -> None:
    """And leave nothing out of the image that its commands read."""
    text = path.read_text(encoding="utf-8")
    (script,) = re.findall(r"(scripts/\S+) /opt/venv", text)
    assert (ROOT / script).is_file()
    left_out = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for kept in ("scripts", "requirements", "dllm_plugin", "pyproject.toml"):
        assert kept not in left_out and (ROOT / kept).exists()


def test_compose_is_of_its_schema() -> None:
    schemas = resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((schemas / "compose-spec.json").read_text(encoding="utf-8"))
    jsonschema.validate(COMPOSE, schema)
    wrong = COMPOSE | {"services": {"x": {"port": 1}}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)


def test_compose_mounts_and_scrapes_what_exists() -> None:
    services = COMPOSE["services"]
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
            else:
                assert source in COMPOSE["volumes"]
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8")
    for scraped in yaml.safe_load(text)["scrape_configs"]:
        (target,) = scraped["static_configs"][0]["targets"]
        assert target.split(":")[0] in services
    text = (DEPLOY / "grafana" / "datasources.yml").read_text(encoding="utf-8")
    (source,) = yaml.safe_load(text)["datasources"]
    assert source["url"].split("/")[-1].split(":")[0] in services


MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yml"))


def pods(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the pods that manifests describe; a leader comes before its workers."""
    found = []
    for document in documents:
        spec = document["spec"]
        group = spec.get("leaderWorkerTemplate", {})
        templates = [spec.get("template")]
        templates += [group.get("leaderTemplate"), group.get("workerTemplate")]
        for template in filter(None, templates):
            head = {"apiVersion": "v1", "kind": "Pod"}
            found.append(head | {"metadata": {"name": "x"}, "spec": template["spec"]})
    return found


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_are_of_their_schemas(path: Path) -> None:
    documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    checked = [d for d in documents if d["kind"] != "LeaderWorkerSet"]
    found = pods(documents)
    for document in [*checked, *found]:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    (container,) = found[0]["spec"]["containers"]
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] == "/health"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    container["imagePull"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(found[0], KUBERNETES, strict=True)


def containers(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the container of each pod."""
    return [
        container for pod in pods(documents) for container in pod["spec"]["containers"]
    ]


def test_hosts_differ_only_in_their_role() -> None:
    """A host has as many ranks as GPUs and is a stage, and all get the same options."""
    text = (DEPLOY / "kubernetes" / "hosts.yml").read_text(encoding="utf-8")
    documents = list(yaml.safe_load_all(text))
    group = documents[0]["spec"]["leaderWorkerTemplate"]
    leader, worker = containers(documents)
    assert worker["args"][:-1] == leader["args"][:-1]
    assert worker["args"][-1] == "--headless"
    parser = make_arg_parser(FlexibleArgumentParser())
    given = [arg.replace("$(LWS_LEADER_ADDRESS)", "leader") for arg in worker["args"]]
    given = [re.sub(r"\$\(\w+\)", str(group["size"]), arg) for arg in given]
    args = parser.parse_args(given)
    gpus = worker["resources"]["limits"]["nvidia.com/gpu"]
    assert args.tensor_parallel_size == gpus and args.headless
    assert args.pipeline_parallel_size == args.nnodes == group["size"]
    assert args.model in [one.hub for one in CHECKPOINTS.values()]
    assert leader["env"] == worker["env"]


def test_values_of_the_production_stack() -> None:
    """The chart starts `vllm serve` with our options, and names every plugin of ours."""
    text = (DEPLOY / "production-stack.values.yml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    (model,) = values["servingEngineSpec"]["modelSpec"]
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(["--model=x", *model["vllmConfig"]["extraArgs"]])
    options = Options.from_user(args.additional_config["dllm"])
    caches = choose_method(options.strategy, FAMILIES["LLaDAModelLM"], False)[0].refuses
    assert model["vllmConfig"]["enablePrefixCaching"] == (
        "prefix_caching" not in caches
    )
    assert values["routerSpec"]["routingLogic"] == "roundrobin"
    (plugins,) = [one["value"] for one in model["env"] if one["name"] == "VLLM_PLUGINS"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = project["project"]["entry-points"]
    named = {name for group in groups if "vllm" in group for name in groups[group]}
    assert set(plugins.split(",")) == named


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_images_serve_the_model_that_a_manifest_names(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    (line,) = [x for x in text.splitlines() if x.startswith("ENTRYPOINT ")]
    words = json.loads(line.removeprefix("ENTRYPOINT "))
    assert words[:2] == ["diffuplug", "serve"]
    manifest = (DEPLOY / "kubernetes" / "diffuplug.yml").read_text(encoding="utf-8")
    (container,) = containers(list(yaml.safe_load_all(manifest)))
    for arguments in (container["args"], COMPOSE["services"]["diffuplug"]["command"]):
        model, rest = take_model([*words[2:], *arguments])
        assert model is not None and "LLaDA-8B-Instruct" in model
        assert "--host" in rest


def test_pods_live_longer_than_their_drain() -> None:
    text = (DEPLOY / "kubernetes" / "diffuplug.yml").read_text(encoding="utf-8")
    documents = list(yaml.safe_load_all(text))
    (container,) = containers(documents)
    drain = int(container["args"][-1].removeprefix("--shutdown-timeout="))
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    pod = documents[1]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > drain + pause


def test_queries_are_promql() -> None:
    assert len(expressions()) > 20
    for expression in expressions():
        promql_parser.parse(expression)
    with pytest.raises(ValueError):
        promql_parser.parse("sum(rate(x[5m])")


def test_panels_are_described_and_do_not_overlap() -> None:
    places = set()
    for panel in BOARD["panels"]:
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        places.add((panel["gridPos"]["x"], panel["gridPos"]["y"]))
    assert len(places) == len(BOARD["panels"])


def test_the_unit_starts_the_command() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "diffuplug.service")
    words = unit["Service"]["ExecStart"].split()
    assert words[0].endswith("/bin/diffuplug") and words[1] == "serve"
    assert unit["Service"]["KillMode"] == "mixed"
