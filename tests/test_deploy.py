"""What is in deploy/ and compose.yaml names only what there is: options, settings, routes, ports,
files, secrets; it has the shape that its readers want, and each alert has its runbook."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.prometheus_server import RULES
from tierkv.api.routes_status import StatusRoutes
from tierkv.api.settings import NodeSettings
from tierkv.cli.serving import gateway, serve
from tierkv.config import load
from tierkv.gateway.server import ProbeRoutes
from tierkv.gateway.settings import GatewaySettings
from tierkv.http.callers import Access
from tierkv.http.route import routes_of

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kubernetes" / "base"
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
Json = dict[str, Any]

KINDS: dict[str, tuple[click.Command, type[NodeSettings | GatewaySettings], type]] = {
    "serve": (serve, NodeSettings, StatusRoutes),
    "gateway": (gateway, GatewaySettings, ProbeRoutes),
}


def understood(
    words: Sequence[str], config: Path, environ: Mapping[str, str]
) -> tuple[Json, NodeSettings | GatewaySettings, set[str]]:
    """Options, settings and public paths of `tierkv WORDS`; `config` is the container's."""
    command, kind, routes = KINDS[words[0]]
    words = [str(config) if word == "/etc/tierkv/config.toml" else word for word in words]
    options = command.make_context(words[0], words[1:]).params
    given = [({"serve": "node"}.get(words[0], words[0]), "host", options["host"])]
    rows = routes_of(object.__new__(routes))
    public = {row.path for row in rows if row.access is Access.PUBLIC}
    return options, load(kind, config, environ, given), public


# Kubernetes


def documents(path: Path) -> list[Json]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one is not None]


MANIFESTS = sorted((DEPLOY / "kubernetes").rglob("*.yaml"))
OBJECTS = [one for path in MANIFESTS for one in documents(path) if one["kind"] != "Kustomization"]
WORKLOADS = [one for one in OBJECTS if one["kind"] in {"StatefulSet", "Deployment"}]
OURS = [one for one in WORKLOADS if one["metadata"]["name"] != "redis"]


def name_of(manifest: Json) -> str:
    return f"{manifest['kind']}-{manifest['metadata']['name']}"


def container_of(workload: Json) -> Json:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def labels_of(workload: Json) -> Json:
    labels: Json = workload["spec"]["template"]["metadata"]["labels"]
    return labels


@pytest.mark.promise("Kubernetes manifests are valid and use only existing commands and settings.")
@pytest.mark.parametrize("manifest", OBJECTS, ids=name_of)
def test_a_manifest_is_valid(manifest: Json) -> None:
    if manifest["kind"] == "ServiceMonitor":
        assert manifest["apiVersion"] == "monitoring.coreos.com/v1", "not one of Kubernetes' own"
        return
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_every_manifest_belongs_to_a_kustomization_whose_files_there_are() -> None:
    listed = set()
    for path in MANIFESTS:
        if path.name != "kustomization.yaml":
            continue
        (wanted,) = documents(path)
        files = [row for made in wanted.get("configMapGenerator", []) for row in made["files"]]
        listed |= {(path.parent / one).resolve() for one in wanted["resources"]}
        listed |= {(path.parent / one.partition("=")[2]).resolve() for one in files}
    assert all(path.exists() for path in listed)
    assert {path for path in MANIFESTS if path.name != "kustomization.yaml"} <= listed


@pytest.mark.promise("Kubernetes manifests are valid and use only existing commands and settings.")
@pytest.mark.parametrize("workload", OURS, ids=name_of)
def test_a_workloads_command_settings_and_probes_are_those_of_tierkv(workload: Json) -> None:
    container, pod = container_of(workload), workload["spec"]["template"]["spec"]
    command = container["args"][0]
    config = BASE / {"serve": "node.toml", "gateway": "gateway.toml"}[command]
    environ = {row["name"]: "memory://" for row in container["env"]}
    options, settings, public = understood(container["args"], config, environ)
    (port,) = container["ports"]
    assert options["port"] == port["containerPort"]
    for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
        if probe in container:
            asked = container[probe]["httpGet"]
            assert asked["path"] in public
            assert asked["port"] == port["name"]
    assert {"readinessProbe", "livenessProbe"} <= container.keys()
    assert "memory" in container["resources"]["limits"]
    if isinstance(settings, NodeSettings):
        longest = settings.node.drain_grace_s + settings.handoff.publish_deadline_s
        assert options["role"] == workload["metadata"]["name"]
    else:
        longest = settings.gateway.drain_grace_s
    assert pod["terminationGracePeriodSeconds"] > longest
    assert str(settings.auth.file) == "/etc/tierkv/auth/auth.json"
    mounted = {row["mountPath"]: row["name"] for row in container["volumeMounts"]}
    assert mounted.keys() == {"/etc/tierkv/config.toml", "/etc/tierkv/auth", "/tmp"}
    assert set(mounted.values()) == {row["name"] for row in pod["volumes"]}


def test_the_gateway_asks_pods_that_there_are() -> None:
    settings = load(GatewaySettings, BASE / "gateway.toml", {})
    by_name = {one["metadata"]["name"]: one for one in OBJECTS if one["kind"] == "StatefulSet"}
    for role, urls in (
        ("prefill", settings.gateway.prefill),
        ("decode", settings.gateway.decode),
    ):
        nodes = by_name[role]
        (port,) = container_of(nodes)["ports"]
        assert list(urls) == [
            f"http://{role}-{number}.{nodes['spec']['serviceName']}:{port['containerPort']}"
            for number in range(nodes["spec"]["replicas"])
        ]


def test_what_is_selected_is_there() -> None:
    services = [one for one in OBJECTS if one["kind"] == "Service"]
    pods = [labels_of(one) for one in WORKLOADS]
    for one in OBJECTS:
        spec = one["spec"]
        match one["kind"]:
            case "Service":
                wanted, among = spec["selector"], pods
            case "PodDisruptionBudget":
                wanted, among = spec["selector"]["matchLabels"], pods
            case "NetworkPolicy":
                wanted, among = spec["podSelector"]["matchLabels"], pods
            case "ServiceMonitor":
                wanted = spec["selector"]["matchLabels"]
                among = [service["metadata"].get("labels", {}) for service in services]
            case _:
                wanted, among = spec["selector"]["matchLabels"], [labels_of(one)]
        assert any(wanted.items() <= labels.items() for labels in among), name_of(one)
    guarded = [one["metadata"]["name"] for one in OBJECTS if one["kind"] == "PodDisruptionBudget"]
    assert sorted(guarded) == sorted(one["metadata"]["name"] for one in OURS)


def secrets_in(value: object) -> Iterator[tuple[str, str]]:
    """Name and key of each secret that is referred to."""
    if isinstance(value, dict):
        if "secretKeyRef" in value:
            yield value["secretKeyRef"]["name"], value["secretKeyRef"]["key"]
        if "credentials" in value:
            yield value["credentials"]["name"], value["credentials"]["key"]
        if "secretName" in value:
            yield value["secretName"], "auth.json"
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from secrets_in(inner)


def test_every_secret_is_one_that_the_instructions_make() -> None:
    words = "".join(path.read_text() for path in MANIFESTS if path.name == "kustomization.yaml")
    made = {
        (name, key)
        for name, rest in re.findall(r"create secret generic (\S+)(.*)", words)
        for key in re.findall(r"--from-(?:literal|file)=([\w.]+)", rest)
    }
    assert {row for one in OBJECTS for row in secrets_in(one)} == made


# Compose


COMPOSE: Json = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: Json = COMPOSE["services"]
RUN_BY_US = [name for name, one in SERVICES.items() if one["image"].startswith("tierkv:")]


@pytest.mark.parametrize("name", RUN_BY_US)
def test_a_services_command_settings_and_probe_are_those_of_tierkv(name: str) -> None:
    service = SERVICES[name]
    config = ROOT / service["volumes"][0].split(":")[0]
    environ = {key: str(value) for key, value in service.get("environment", {}).items()}
    environ = {key: re.sub(r"\$\{\w+:-(.*)\}", r"\1", text) for key, text in environ.items()}
    options, _, public = understood(service["command"], config, environ)
    asked = re.search(r"http://127.0.0.1:(\d+)(/\w+)", " ".join(service["healthcheck"]["test"]))
    assert asked
    assert int(asked[1]) == options["port"]
    assert asked[2] in public


def test_every_redis_has_the_one_policy_that_the_documentation_recommends() -> None:
    files = [ROOT / "compose.yaml", *DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.yml")]
    text = "".join(file.read_text() for file in files)
    policies = re.findall(r"--maxmemory-policy[\s,-]+([\w-]+)", text)
    assert len(policies) == text.count("--maxmemory-policy") >= 3
    assert set(policies) == {"allkeys-lru"}
    for page in ("storage.md", "operations.md"):
        assert "`maxmemory-policy allkeys-lru`" in (ROOT / "docs" / page).read_text()


def test_the_profile_monitoring_looks_at_the_whole_fleet() -> None:
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    targets = set()
    for job in scraped["scrape_configs"]:
        assert job["job_name"].startswith("tierkv"), "the alerts know jobs by that"
        targets |= {one for row in job.get("static_configs", []) for one in row["targets"]}
        targets |= {
            f"{name}:{row['port']}"
            for row in job.get("dns_sd_configs", [])
            for name in row["names"]
        }
    assert targets == {f"{name}:8080" for name in RUN_BY_US}
    assert scraped["rule_files"] == ["/etc/prometheus/alerts.yml"]
    for name in ("prometheus", "grafana"):
        assert SERVICES[name]["profiles"] == ["monitoring"]
        assert re.search(r":v?\d+\.\d+\.\d+$", SERVICES[name]["image"]), "a tag that stays"
        for volume in SERVICES[name]["volumes"]:
            assert (ROOT / volume.split(":")[0]).exists()
    assert "./deploy/prometheus:/etc/prometheus:ro" in SERVICES["prometheus"]["volumes"]
    provisioned = DEPLOY / "grafana" / "provisioning"
    (source,) = documents(provisioned / "datasources" / "prometheus.yml")[0]["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = documents(provisioned / "dashboards" / "tierkv.yml")[0]["providers"]
    board = f"./deploy/grafana/tierkv.json:{provider['options']['path']}/tierkv.json:ro"
    assert board in SERVICES["grafana"]["volumes"]


# Dashboard and alerts


def test_the_dashboard_has_the_shape_that_grafana_reads() -> None:
    source = json.loads((DEPLOY / "grafana" / "tierkv.json").read_text())
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(source)))
    assert missing(source, read) == []
    panels = [panel for panel in source["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in source["panels"]}) == len(source["panels"])
    for panel in panels:
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}", "no data source of one installation"
    places = [panel["gridPos"] for panel in source["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert [pair for pair in combinations(places, 2) if overlap(*pair)] == []


def missing(source: object, read: object, at: str = "") -> list[str]:
    """What Grafana's own types did not take over from `source`."""
    if isinstance(source, dict) and isinstance(read, dict):
        return [one for key in source for one in missing(source[key], read.get(key), f"{at}/{key}")]
    if isinstance(source, list) and isinstance(read, list) and len(source) == len(read):
        pairs = enumerate(zip(source, read, strict=True))
        return [one for at_, (a, b) in pairs for one in missing(a, b, f"{at}/{at_}")]
    return [] if source == read else [at]


def overlap(a: Json, b: Json) -> bool:
    return bool(
        a["x"] < b["x"] + b["w"]
        and b["x"] < a["x"] + a["w"]
        and a["y"] < b["y"] + b["h"]
        and b["y"] < a["y"] + a["h"]
    )


@pytest.mark.promise("Each alert has a runbook and a test.")
def test_each_alert_has_a_runbook_and_a_test_that_makes_it_fire() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    section = re.compile(r"^### (TierKV\w+)\n\n(.+?)(?=\n##|\Z)", re.MULTILINE | re.DOTALL)
    sections = dict(section.findall(OPERATIONS))
    assert [rule["alert"] for rule in rules] == list(sections), "in one order, and no other"
    fired = set(
        re.findall(
            r'on\.fires\("(\w+)"', (ROOT / "tests" / "e2e" / "test_monitoring.py").read_text()
        )
    )
    assert fired == set(sections)
    for rule in rules:
        name = rule["alert"]
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{name.lower()}"
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert len(sections[name].split()) > 30, "it says what to do"


def test_operations_names_only_metrics_that_the_tables_have() -> None:
    told = set(re.findall(r"`(tierkv_\w+)", OPERATIONS))
    tables = (ROOT / "docs" / "metrics.md").read_text() + (ROOT / "docs" / "gateway.md").read_text()
    assert {name for name in told if name not in tables} == set()
