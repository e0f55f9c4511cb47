"""Check the files of `deploy/` with validators that bring their schemas with them."""

import configparser
import json
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import promql_parser
import pytest
import yaml
from documented import ROOT

from dllm_plugin.commands.serve import take_model

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


@pytest.mark.parametrize("path", sorted((DEPLOY / "kubernetes").glob("*.yml")))
def test_manifests_are_of_their_schemas(path: Path) -> None:
    documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    for document in documents:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    (container,) = containers(documents)
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] == "/health"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    container["imagePull"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(documents[1], KUBERNETES, strict=True)


def containers(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The containers of the deployment among some documents."""
    (found,) = [d for d in documents if d["kind"] == "Deployment"]
    return list(found["spec"]["template"]["spec"]["containers"])


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
