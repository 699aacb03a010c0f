"""The chart: clean for Helm 3 and 4, valid for Kubernetes, restricted, and its options are those of the services.

Without Helm (`make lint-deploy` fetches it) or the validators of custom kinds the tests concerned are skipped.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from chart_snapshots import CHART, EXAMPLES, HELM, ROOT, SNAPSHOTS, path_of, snapshot
from click.testing import CliRunner

from paceline.apps.dashboard.main import main as dashboard_main
from paceline.services.cli.main import main as cli
from paceline.services.common.serving.healthcheck import main as healthcheck_main
from paceline.services.coordinator.main import main as coordinator_main
from paceline.services.demo.smoke import main as smoke_main
from paceline.services.environment.main import main as environment_main
from paceline.services.learner.main import main as learner_main
from paceline.services.learner.nodes.settings import node_settings
from paceline.services.reward.main import main as reward_main
from paceline.services.rollout.main import main as rollout_main
from paceline.tls.certificates import ROLE_HOSTS

ROLES: dict[str, dict[str, Any]] = yaml.safe_load((CHART / "files/roles.yaml").read_text())["roles"]
COMMANDS = {
    "coordinator": coordinator_main,
    "rollout": rollout_main,
    "reward": reward_main,
    "environment": environment_main,
    "learner": learner_main,
    "dashboard": dashboard_main,
}
KUBERNETES = "1.34"
CORE_GROUPS = (
    "v1",
    "apps/v1",
    "batch/v1",
    "policy/v1",
    "networking.k8s.io/v1",
    "scheduling.k8s.io/v1",
    "resource.k8s.io/v1",
)
EVERYTHING = """
dashboard: {enabled: true, metricsPort: 0}
defaults: {metricsPort: 9465}
learner: {kind: JobSet, nodes: 2, gpus: 8, fabric: {kind: roce, devices: 1, hca: mlx5, network: roce}}
pools:
  rollout: {containers: 2, httpPort: 8000, resourceClaims: [{name: gpu, deviceClassName: gpu.nvidia.com}], sharedMemory: 1Gi}
  reward: {autoscaling: {enabled: true}}
monitoring: {serviceMonitor: {enabled: true}, podMonitor: {enabled: true}, rules: {enabled: true}, dashboard: {enabled: true}}
retrain: {enabled: true, configMap: spec, overrides: [name=nightly], then: {command: [paceline, runs]}}
networkPolicy: {clients: [{namespaceSelector: {}}]}
"""
WITH_TLS = """
tls: {secretName: paceline-worker-tls, coordinatorSecretName: paceline-coordinator-tls}
dashboard: {enabled: true, metricsPort: 0}
defaults: {metricsPort: 9465, httpPort: 8000, fabric: {interface: lo}}
pools: {reward: {autoscaling: {enabled: true}}}
monitoring: {serviceMonitor: {enabled: true}, podMonitor: {enabled: true}, token: {secretName: prometheus}}
retrain: {enabled: true, configMap: spec}
networkPolicy: {clients: [{namespaceSelector: {}}]}
"""
Manifest = dict[str, Any]

needs_helm = pytest.mark.skipif(not HELM["3"].is_file(), reason="no Helm here; make lint-deploy fetches it")


def checker() -> Any:
    """The validator of custom kinds beside this repository, if it is there."""
    path = next(iter(sorted(ROOT.parent.glob("*/tools/check_manifests.py"))), None)
    if path is None:
        pytest.skip("no schemas of custom kinds here")
    spec = importlib.util.spec_from_file_location("check_manifests", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def helm(major: str, *arguments: str, values: str = "") -> subprocess.CompletedProcess[str]:
    extra = ("--values", "-") if values else ()
    return subprocess.run([HELM[major], *arguments, *extra], input=values, capture_output=True, text=True, timeout=120)


@cache
def rendered(example: str, major: str = "4", values: str = "") -> tuple[Manifest, ...]:
    files = ("--values", str(CHART / f"values-{example}.yaml")) if example else ()
    answer = helm(major, "template", "paceline", str(CHART), *files, values=values)
    assert answer.returncode == 0, answer.stderr
    return tuple(filter(None, yaml.load_all(answer.stdout, yaml.CSafeLoader)))


def every() -> list[tuple[str, str]]:
    return [("", ""), ("", EVERYTHING), ("", WITH_TLS), *((example, "") for example in EXAMPLES)]


def pods(manifests: tuple[Manifest, ...]) -> Iterator[tuple[str, Manifest]]:
    """(name of the object, its pod's spec) of each that has pods."""
    for manifest in manifests:
        name, spec = f"{manifest['kind']}/{manifest['metadata']['name']}", manifest.get("spec", {})
        match manifest["kind"]:
            case "Pod":
                yield name, spec
            case "Deployment" | "StatefulSet":
                yield name, spec["template"]["spec"]
            case "CronJob":
                yield name, spec["jobTemplate"]["spec"]["template"]["spec"]
            case "JobSet":
                for job in spec["replicatedJobs"]:
                    yield name, job["template"]["spec"]["template"]["spec"]


def of_kind(manifests: tuple[Manifest, ...], kind: str) -> dict[str, Manifest]:
    return {m["metadata"]["name"]: m for m in manifests if m["kind"] == kind}


@needs_helm
@pytest.mark.parametrize("major", sorted(HELM))
def test_lint_finds_nothing(major: str) -> None:
    for example in EXAMPLES:
        answer = helm(major, "lint", "--strict", str(CHART), "--values", str(CHART / f"values-{example}.yaml"))
        assert answer.returncode == 0, answer.stdout + answer.stderr
        assert "[WARNING]" not in answer.stdout


@needs_helm
def test_helm_3_and_4_render_the_same() -> None:
    for example in EXAMPLES:
        three, four = ([m for m in rendered(example, major) if m["kind"] != "Secret"] for major in ("3", "4"))
        assert three == four


@needs_helm
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_objects_of_a_values_file_are_those_of_its_snapshot(example: str) -> None:
    expected = path_of(example).read_text()
    assert snapshot(rendered(example)) == expected, "if that is right: python tests/support/services/chart_snapshots.py"


def test_each_snapshot_has_a_values_file() -> None:
    assert {path.stem for path in SNAPSHOTS.iterdir()} == set(EXAMPLES)


@needs_helm
def test_core_kinds_are_valid_and_others_are_expected() -> None:
    known_others = {
        "ScaledObject",
        "TriggerAuthentication",
        "NodePool",
        "PodGroup",
        "Queue",
        "JobSet",
        "ServiceMonitor",
        "PodMonitor",
        "PrometheusRule",
    }
    for example, values in every():
        for manifest in rendered(example, values=values):
            if manifest["apiVersion"] in CORE_GROUPS:
                kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
            else:
                assert manifest["kind"] in known_others


@needs_helm
def test_custom_kinds_are_valid() -> None:
    schemas = checker().load_crds()
    seen = set()
    for example, values in every():
        for manifest in rendered(example, values=values):
            if manifest["apiVersion"] not in CORE_GROUPS:
                schema = schemas[manifest["apiVersion"], manifest["kind"]]
                validator = jsonschema.Draft7Validator(schema)  # the schemas themselves have patterns of Go
                assert not [e.message for e in validator.iter_errors(manifest)], manifest["metadata"]
                seen.add(manifest["kind"])
    assert len(seen) == 9


def restricted_faults(pod: Manifest) -> list[str]:
    """What Pod Security's profile `restricted` refuses in a pod."""
    faults = [name for name in ("hostNetwork", "hostPID", "hostIPC", "hostUsers") if pod.get(name)]
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    faults += [f"volume {key}" for volume in pod.get("volumes", []) for key in set(volume) - allowed - {"name"}]
    general = pod.get("securityContext", {})
    faults += ["sysctls"] if general.get("sysctls") else []
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        context = general | container.get("securityContext", {})
        if context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0:
            faults.append("runs as root")
        if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
            faults.append("privileges")
        if context.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            faults.append("seccomp")
        capabilities = context.get("capabilities", {})
        if capabilities.get("drop") != ["ALL"]:
            faults.append("capabilities are kept")
        faults += [f"capability {name}" for name in capabilities.get("add", []) if name != "NET_BIND_SERVICE"]
        faults += ["hostPort" for port in container.get("ports", []) if port.get("hostPort")]
        faults += ["procMount"] if context.get("procMount", "Default") != "Default" else []
    return faults


@needs_helm
def test_pods_are_restricted_but_for_the_fabrics_that_are_listed() -> None:
    for example, values in every():
        for name, pod in pods(rendered(example, values=values)):
            is_listed = values == EVERYTHING and name == "JobSet/paceline-learner"
            assert restricted_faults(pod) == (["capability IPC_LOCK"] if is_listed else []), (example, name)
            assert pod["automountServiceAccountToken"] is False
            for container in [*pod["containers"], *pod.get("initContainers", [])]:
                assert container["securityContext"]["readOnlyRootFilesystem"]
                assert {"cpu", "memory"} <= set(container["resources"]["requests"]), (example, name)
                assert container["resources"]["limits"]["memory"]


def test_the_check_of_pods_sees_what_is_not_restricted() -> None:
    bad = {"hostNetwork": True, "volumes": [{"name": "x", "hostPath": {}}], "containers": [{}]}
    assert set(restricted_faults(bad)) == {
        "hostNetwork", "volume hostPath", "runs as root", "privileges", "seccomp", "capabilities are kept",
    }  # fmt: skip


@needs_helm
def test_services_understand_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_INSECURE", "1")
    seen = set()
    for example, values in every():
        for name, pod in pods(rendered(example, values=values)):
            for container in pod["containers"]:
                role = container["command"][-1].removeprefix("paceline-")
                if role not in COMMANDS:
                    continue
                seen.add(role)
                options = COMMANDS[role].make_context(role, list(container["args"])).params
                ports = {port["containerPort"] for port in container["ports"]}
                assert options["port"] in ports
                assert options.get("grace_s", 0) < pod["terminationGracePeriodSeconds"], (example, name)
                for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                    asked = container.get(probe, {}).get("exec", {}).get("command", [])
                    if asked:
                        words = asked[asked.index("paceline.services.common.serving.healthcheck") + 1 :]
                        check = healthcheck_main.make_context("healthcheck", words).params
                        assert check["address"] == f"127.0.0.1:{options['port']}"
                        assert check["timeout_s"] < container[probe]["timeoutSeconds"]
                        continue
                    way = "grpc" if "grpc" in ROLES[role]["ports"] else "httpGet"
                    assert probe not in container or container[probe][way]["port"] == options["port"]
                named = [port["containerPort"] for port in container["ports"] if "metrics" in port["name"]]
                assert named == [options["metrics_port"]] * (options["metrics_port"] is not None)
                environment = {v["name"]: v.get("value", "1") for v in container["env"]}
                if options.get("nodes", "1") != "1":
                    index = {"NODE_RANK": "1"} if "NODE_RANK" in environment else {"JOB_COMPLETION_INDEX": "1"}
                    given = options["nodes"], options["node_rank"], options["rendezvous"]
                    settings = node_settings(*given, index, "pod.domain")
                    assert settings is not None
                    assert settings.node_rank == 1
    assert seen == set(COMMANDS)


@needs_helm
def test_the_commands_of_the_test_and_of_the_cron_job_exist() -> None:
    answers = {"smoke": smoke_main, "paceline": cli}
    manifests = rendered("", values=EVERYTHING)
    for kind in ("Pod", "CronJob"):
        for name, pod in pods(manifests):
            if name.startswith(f"{kind}/"):
                for container in [*pod.get("initContainers", []), *pod["containers"]]:
                    command = [str(word) for word in container["command"]]
                    words = command[3:] if command[0] == "python" else command[1:]
                    program = answers["smoke" if command[0] == "python" else "paceline"]
                    answer = CliRunner().invoke(program, [*words, "--help"])
                    assert answer.exit_code == 0, answer.output
                    assert "--wait" not in words or "--wait" in answer.output


@needs_helm
def test_a_retraining_goes_on_after_success_alone() -> None:
    job = of_kind(rendered("", values=EVERYTHING), "CronJob")["paceline-retrain"]["spec"]["jobTemplate"]["spec"]
    assert job["podFailurePolicy"]["rules"][0] == {
        "action": "FailJob", "onExitCodes": {"operator": "In", "values": [2, 3, 4]},
    }  # fmt: skip
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert [c["name"] for c in pod["initContainers"]] == ["train"]  # a later container starts after exit status 0
    assert pod["initContainers"][0]["command"][-1] == "--wait"
    assert [c["name"] for c in pod["containers"]] == ["then"]


def matches(selector: Manifest, labels: Manifest) -> bool:
    return selector.items() <= labels.items()


@needs_helm
@pytest.mark.parametrize(("example", "values"), every())
def test_selectors_find_pods(example: str, values: str) -> None:
    manifests = rendered(example, values=values)
    labelled = [
        m["spec"]["template"]["metadata"]["labels"] for m in manifests if m["kind"] in ("Deployment", "StatefulSet")
    ]
    for manifest in manifests:
        spec, name = manifest.get("spec", {}), manifest["metadata"]["name"]
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            assert matches(spec["selector"]["matchLabels"], spec["template"]["metadata"]["labels"]), name
        elif manifest["kind"] == "Service":
            assert any(matches(spec["selector"], labels) for labels in labelled), name
        elif manifest["kind"] == "PodDisruptionBudget" and "JobSet" not in values:
            assert any(matches(spec["selector"]["matchLabels"], labels) for labels in labelled), name


@needs_helm
def test_pods_refer_to_what_the_chart_makes() -> None:
    for example, values in every():
        manifests = rendered(example, values=values)
        accounts, claims = of_kind(manifests, "ServiceAccount"), of_kind(manifests, "PersistentVolumeClaim")
        templates = of_kind(manifests, "ResourceClaimTemplate")
        for name, pod in pods(manifests):
            assert pod["serviceAccountName"] in accounts, name
            named = {volume["name"] for volume in pod["volumes"]}
            for volume in pod["volumes"]:
                claim = volume.get("persistentVolumeClaim", {}).get("claimName")
                assert claim is None or claim in claims, name
            for container in [*pod["containers"], *pod.get("initContainers", [])]:
                mounted = {mount["name"] for mount in container["volumeMounts"]}
                assert mounted <= named | {"runs"}, name
                assert {c["name"] for c in container["resources"].get("claims", [])} <= {
                    c["name"] for c in pod.get("resourceClaims", [])
                }
            for claim in pod.get("resourceClaims", []):
                assert claim["resourceClaimTemplateName"] in templates


def may_talk(manifests: tuple[Manifest, ...], caller: str, called: str, port: int) -> bool:
    """Whether both the caller's egress and the called role's ingress let a connection through."""

    def lets(rules: list[Manifest], peer: str, side: str) -> bool:
        return any(
            any(
                p.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/component") == peer
                for p in rule.get(side, [])
            )
            and ("ports" not in rule or any(p["port"] <= port <= p.get("endPort", p["port"]) for p in rule["ports"]))
            for rule in rules
        )

    policies = of_kind(manifests, "NetworkPolicy")
    out, into = policies[f"paceline-{caller}"]["spec"], policies[f"paceline-{called}"]["spec"]
    return lets(out.get("egress", []), called, "to") and lets(into.get("ingress", []), caller, "from")


@needs_helm
def test_roles_talk_to_whom_the_list_says_and_to_nobody_else() -> None:
    manifests = rendered("")
    for caller, about in ROLES.items():
        for called, other in ROLES.items():
            allowed = about["calls"].get(called, [])
            for name, port in other["ports"].items():
                expected = allowed == "any" or name in allowed
                assert may_talk(manifests, caller, called, port) == expected, (caller, called, name)
            assert may_talk(manifests, caller, called, 45_000) == (allowed == "any"), (caller, called)
    default = of_kind(manifests, "NetworkPolicy")["paceline-default"]["spec"]
    assert default["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in default


@needs_helm
def test_engines_of_a_pod_have_ports_and_claims_of_their_own() -> None:
    (pod,) = (pod for name, pod in pods(rendered("", values=EVERYTHING)) if name == "Deployment/paceline-rollout")
    ports = [port["containerPort"] for container in pod["containers"] for port in container["ports"]]
    assert sorted(ports) == [7080, 7081, 8000, 8001, 9465, 9466]
    assert [c["resources"]["claims"] for c in pod["containers"]] == [[{"name": "gpu-0"}], [{"name": "gpu-1"}]]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in pod["volumes"]
    policy = of_kind(rendered("", values=EVERYTHING), "NetworkPolicy")["paceline-environment"]["spec"]["egress"]
    assert {"protocol": "TCP", "port": 7080, "endPort": 7081} in [p for rule in policy for p in rule.get("ports", [])]


MONITORING = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]


@needs_helm
def test_metrics_of_workers_are_scraped_where_they_have_a_port() -> None:
    manifests = rendered("", values=EVERYTHING)
    policies = of_kind(manifests, "NetworkPolicy")

    def scraped(role: str) -> list[Manifest]:
        rules = policies[f"paceline-{role}"]["spec"].get("ingress", [])
        return [port for rule in rules if rule["from"] == MONITORING for port in rule["ports"]]

    assert scraped("rollout") == [{"protocol": "TCP", "port": 9465, "endPort": 9466}]
    assert scraped("reward") == scraped("learner") == [{"protocol": "TCP", "port": 9465}]
    assert scraped("coordinator") == [{"protocol": "TCP", "port": 9464}]
    assert scraped("dashboard") == []
    monitor = of_kind(manifests, "PodMonitor")["paceline-workers"]["spec"]
    assert "jobLabel" not in monitor  # the alert about the coordinator is about the job `paceline`
    ports = {port["name"] for _, pod in pods(manifests) for c in pod["containers"] for port in c.get("ports", [])}
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} == {"metrics", "metrics-1"} < ports
    (rule,) = monitor["podMetricsEndpoints"][0]["relabelings"]
    for labels, dropped in {
        ("learner", "0", ""): False,
        ("learner", "1", ""): True,
        ("learner", "", "0"): False,
        ("learner", "", "12"): True,
        ("rollout", "", ""): False,
    }.items():
        assert bool(re.fullmatch(rule["regex"], ";".join(labels))) == dropped, labels
    assert not of_kind(rendered(""), "PodMonitor")
    workers = [c for name, pod in pods(rendered("")) if "coordinator" not in name for c in pod["containers"]]
    assert not [a for c in workers for a in c.get("args", []) if a.startswith("--metrics-port")]


@needs_helm
def test_the_page_is_off_until_asked_for_and_let_to_clients_alone() -> None:
    assert "paceline-dashboard" not in of_kind(rendered(""), "Deployment")
    assert "paceline-dashboard" not in of_kind(rendered(""), "Service")
    manifests = rendered("", values=EVERYTHING)
    service = of_kind(manifests, "Service")["paceline-dashboard"]["spec"]
    assert service["type"] == "ClusterIP"
    assert service["ports"] == [{"name": "http", "port": 7080, "targetPort": "http"}]
    template = of_kind(manifests, "Deployment")["paceline-dashboard"]["spec"]["template"]
    assert matches(service["selector"], template["metadata"]["labels"])
    (container,) = template["spec"]["containers"]
    assert container["image"] == "paceline-dashboard:0.2.0.dev0"
    assert "--ready-file" in container["args"]  # it prints keys without one
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/", "port": 7080}
        assert "grpc" not in container[probe]
    policy = of_kind(manifests, "NetworkPolicy")["paceline-dashboard"]["spec"]
    assert policy["ingress"] == [{"from": [{"namespaceSelector": {}}], "ports": [{"protocol": "TCP", "port": 7080}]}]
    assert "ingress" not in of_kind(rendered(""), "NetworkPolicy")["paceline-dashboard"]["spec"]
    stored = rendered("cluster", values="dashboard: {enabled: true}")
    (container,) = of_kind(stored, "Deployment")["paceline-dashboard"]["spec"]["template"]["spec"]["containers"]
    assert "envFrom" not in container  # keys of the store are no business of a page


@needs_helm
def test_what_all_workers_have_does_not_reach_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_INSECURE", "1")
    elsewhere = (
        "learner: {enabled: false}\ncoordinator: {enabled: false, address: other:7070}\ntoken: {existingSecret: t}\n"
    )
    worker = (
        "{gpus: 8, containers: 2, httpPort: 8000, sharedMemory: 1Gi, fabric: {kind: roce, devices: 1, interface: eth1}}"
    )
    pools = "pools: {reward: null, environment: null}\ndashboard: {enabled: true}\n"
    manifests = rendered("", values=f"{elsewhere}{pools}defaults: {worker}\n")
    template = of_kind(manifests, "Deployment")["paceline-dashboard"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    options = COMMANDS["dashboard"].make_context("dashboard", list(container["args"])).params
    assert options["coordinator"] == "other:7070"
    assert container["image"] == "paceline-dashboard:0.2.0.dev0"
    assert set(container["resources"]["limits"]) == {"memory"}
    assert restricted_faults(template["spec"]) == []
    assert "shm" not in {volume["name"] for volume in template["spec"]["volumes"]}


@needs_helm
def test_with_certificates_everything_is_encrypted_and_checked() -> None:
    manifests = rendered("", values=WITH_TLS)
    for name, pod in pods(manifests):
        secrets = {v["name"]: v["secret"] for v in pod["volumes"] if "secret" in v}
        is_command = name.split("/")[0] in ("Pod", "CronJob")
        expected = "paceline-coordinator-tls" if name == "StatefulSet/paceline-coordinator" else "paceline-worker-tls"
        assert secrets["tls"]["secretName"] == expected, name
        assert ("items" in secrets["tls"]) == is_command, name  # people's commands get the authority alone
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            environment = {v["name"]: v.get("value") for v in container["env"]}
            assert environment["PACELINE_TLS_DIR"] == "/tls"
            assert "PACELINE_INSECURE" not in environment
            assert {"name": "tls", "mountPath": "/tls", "readOnly": True} in container["volumeMounts"]
            if is_command:
                assert environment["PACELINE_COORDINATOR"].endswith(".svc:7073")
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                assert "grpc" not in container.get(probe, {}), name  # the kubelet's know no TLS
    service = of_kind(manifests, "Service")["paceline-coordinator"]["spec"]
    assert {"name": "people", "port": 7073, "targetPort": "people"} in service["ports"]
    assert may_talk(manifests, "cli", "coordinator", 7073)
    assert not may_talk(manifests, "rollout", "coordinator", 7073)
    (endpoint,) = of_kind(manifests, "ServiceMonitor")["paceline"]["spec"]["endpoints"]
    (workers,) = of_kind(manifests, "PodMonitor")["paceline-workers"]["spec"]["podMetricsEndpoints"]
    for scraped, host in (
        (endpoint, "paceline-coordinator.default.svc"),
        (workers, "worker.paceline.internal"),
    ):
        assert scraped["scheme"] == "https"
        assert scraped["tlsConfig"]["serverName"] == host
        assert scraped["authorization"]["credentials"] == {"name": "prometheus", "key": "token"}
    (trigger,) = of_kind(manifests, "ScaledObject")["paceline-reward"]["spec"]["triggers"]
    metadata = trigger["metadata"]
    assert metadata["url"] == "https://paceline-coordinator.default.svc:9464/scale/reward"
    assert metadata["authMode"] == "tls,bearer"
    authentication = of_kind(manifests, "TriggerAuthentication")[trigger["authenticationRef"]["name"]]
    sources = {each["parameter"]: each["name"] for each in authentication["spec"]["secretTargetRef"]}
    worker = "paceline-worker-tls"
    assert sources == {"ca": worker, "cert": worker, "key": worker, "token": "prometheus"}
    plain = "\n".join(yaml.safe_dump(manifest) for manifest in rendered(""))
    assert "PACELINE_TLS_DIR" not in plain
    assert "people" not in plain


@needs_helm
def test_the_storage_key_is_a_file_of_coordinator_and_learner_alone() -> None:
    manifests = rendered("", values=EVERYTHING + "storageKey: {secretName: at-rest, key: hex}\n")
    holders = set()
    for name, pod in pods(manifests):
        secrets = {v["name"]: v["secret"] for v in pod["volumes"] if "secret" in v}
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            environment = {v["name"]: v.get("value") for v in container["env"]}
            assert "PACELINE_STORAGE_KEY" not in environment
            if "PACELINE_STORAGE_KEY_FILE" not in environment:
                assert "storage-key" not in secrets, name
                continue
            holders.add(name)
            assert environment["PACELINE_STORAGE_KEY_FILE"] == "/storage-key/key"
            items = [{"key": "hex", "path": "key"}]
            assert secrets["storage-key"] == {"secretName": "at-rest", "defaultMode": 0o440, "items": items}
            mount = {"name": "storage-key", "mountPath": "/storage-key", "readOnly": True}
            assert mount in container["volumeMounts"]
    assert holders == {"StatefulSet/paceline-coordinator", "JobSet/paceline-learner"}
    workers = [pod for name, pod in pods(manifests) if name == "Deployment/paceline-reward"]
    assert {"name": "PACELINE_ANSWER_CACHE_MB", "value": "0"} in workers[0]["containers"][0]["env"]
    plain = "\n".join(yaml.safe_dump(manifest) for manifest in rendered(""))
    assert "STORAGE_KEY" not in plain
    assert "ANSWER_CACHE" not in plain


@needs_helm
def test_the_example_of_certificates_has_the_names_that_the_chart_dials() -> None:
    documents = list(yaml.safe_load_all((ROOT / "deploy/examples/cert-manager.yaml").read_text()))
    specs = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "Certificate"}
    for role in ("coordinator", "worker"):
        spec = specs[f"paceline-{role}"]
        assert spec["subject"]["organizations"] == [role]
        assert f"paceline-{role}-tls" == spec["secretName"]
        assert spec["secretName"] in WITH_TLS
        assert [name for name in spec["dnsNames"] if name.endswith(".internal")] == list(ROLE_HOSTS[role])
        assert ("ipAddresses" in spec, "localhost" in spec["dnsNames"]) == (role == "coordinator",) * 2
    assert "paceline-coordinator.training.svc" in specs["paceline-coordinator"]["dnsNames"]


@needs_helm
def test_defaults_reach_the_roles_that_have_options_for_them() -> None:
    having: dict[str, set[str]] = {}
    for _, pod in pods(rendered("", values=WITH_TLS)):
        for container in pod["containers"]:
            for argument in container.get("args", []):
                having.setdefault(argument.partition("=")[0], set()).add(container["name"])
    assert having["--fabric"] == {"rollout", "learner"}
    assert having["--http-port"] == {"rollout"}


@needs_helm
def test_bundles_have_a_folder_of_their_own_where_user_code_runs() -> None:
    for name, pod in pods(rendered("")):
        for container in pod["containers"]:
            role = container["name"].partition("-")[0]
            variables = {each["name"]: each.get("value") for each in container.get("env", [])}
            mounts = {each["mountPath"]: each["name"] for each in container.get("volumeMounts", [])}
            runs_user_code = role in ROLES and "code" in ROLES[role]["takes"]
            assert (variables.get("PACELINE_BUNDLE_CACHE") == "/bundles") == runs_user_code, name
            assert ("/bundles" in mounts) == runs_user_code, name


@needs_helm
def test_a_pool_restricts_user_code_by_the_options_of_its_role() -> None:
    values = "pools: {reward: {requireIsolation: true, only: [code_tests, math]}, environment: {functionsFrom: [/srv/a, /srv/b]}}"
    arguments = {
        pod["containers"][0]["name"]: pod["containers"][0]["args"]
        for name, pod in pods(rendered("", values=values))
        if name.startswith("Deployment/")
    }
    assert arguments["reward"][-5:] == ["--require-isolation", "--only", "code_tests", "--only", "math"]
    assert arguments["environment"][-4:] == ["--functions-from", "/srv/a", "--functions-from", "/srv/b"]
    plain = [argument for _, pod in pods(rendered("")) for argument in pod["containers"][0].get("args", [])]
    assert not {"--require-isolation", "--only", "--functions-from"} & set(plain)


def test_the_list_says_which_roles_run_user_code_and_which_choose_functions() -> None:
    for role, command in COMMANDS.items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert ("code" in ROLES[role]["takes"]) == ({"--require-isolation", "--functions-from"} <= options), role
        assert ("only" in ROLES[role]["takes"]) == ("--only" in options), role


@needs_helm
def test_a_scaled_pool_leaves_its_size_to_keda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_INSECURE", "1")
    manifests = rendered("cluster")
    deployment, scaled = (
        of_kind(manifests, "Deployment")["paceline-rollout"],
        of_kind(manifests, "ScaledObject")["paceline-rollout"],
    )
    assert "replicas" not in deployment["spec"]
    (trigger,) = scaled["spec"]["triggers"]
    (container,) = of_kind(manifests, "StatefulSet")["paceline-coordinator"]["spec"]["template"]["spec"]["containers"]
    options = coordinator_main.make_context("coordinator", list(container["args"])).params
    assert trigger == {
        "type": "metrics-api",
        "metricType": "AverageValue",
        "metadata": {
            "url": f"http://paceline-coordinator.default.svc:{options['metrics_port']}/scale/rollout",
            "valueLocation": "desired",
            "targetValue": "1",
            "activationTargetValue": "0",
        },
    }
    ports = {port["port"] for port in of_kind(manifests, "Service")["paceline-coordinator"]["spec"]["ports"]}
    assert options["metrics_port"] in ports
    (config,) = (pool for pool in options["pools"] if pool.name == "rollout")
    assert (config.role, config.members, config.bounds.most) == ("rollout", "rollout-", 48)
    assert scaled["spec"]["maxReplicaCount"] == 48
    assert scaled["spec"]["scaleTargetRef"]["name"] == "paceline-rollout"


@needs_helm
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("pools: {x: {role: learner, replicas: 1}}", "no role of a pool"),
        ("pools: {reward: {role: rollout}}", "name of another role"),
        ("pools: {environment: {gpus: 1}}", "has no GPU image"),
        ("{coordinator: {enabled: false}, token: {existingSecret: t}}", "coordinator.address"),
        ("pools: {rollout: {replica: 2}}", "replica"),
        ("learner: {kind: Deployment}", "learner"),
        ("retrain: {enabled: true}", "retrain.configMap"),
        ("monitoring: {podMonitor: {enabled: true}}", "defaults.metricsPort"),
        ("dashboard: {service: {type: LoadBalancer}}", "service"),
        (
            "pools: {rollout: {autoscaling: {enabled: true}}, rollout-l4: {role: rollout, replicas: 1}}",
            "apart",
        ),
        (
            "{coordinator: {metrics: {enabled: false}}, pools: {reward: {autoscaling: {enabled: true}}}}",
            "coordinator.metrics.enabled",
        ),
        ("pools: {reward: {containers: 2, autoscaling: {enabled: true}}}", "counts workers"),
        ("pools: {rollout: {requireIsolation: true}}", "pools.rollout.requireIsolation is set"),
        ("pools: {environment: {only: [math]}}", "a pool of the role reward"),
        ("pools: {reward: {functionsFrom: [rewards]}}", "functionsFrom"),
    ],
)
def test_values_that_make_no_deployment_are_refused(values: str, message: str) -> None:
    for major in HELM:
        answer = helm(major, "template", "paceline", str(CHART), values=values)
        assert answer.returncode != 0
        assert message in answer.stderr, answer.stderr


@needs_helm
def test_a_new_role_joins_by_its_entry(tmp_path: Path) -> None:
    copy = tmp_path / "paceline"
    subprocess.run(["cp", "-r", CHART, copy], check=True)
    roles = copy / "files" / "roles.yaml"
    entry = dict(ROLES["reward"], command="paceline-judge", health="paceline.v1.JudgeService")
    roles.write_text(yaml.safe_dump({"roles": {**ROLES, "judge": entry}}))
    values = "pools: {judge: {role: judge, replicas: 3, resources: {requests: {cpu: 1}}}}"
    answer = helm("4", "template", "paceline", str(copy), values=values)
    assert answer.returncode == 0, answer.stderr
    manifests = tuple(filter(None, yaml.load_all(answer.stdout, yaml.CSafeLoader)))
    assert of_kind(manifests, "Deployment")["paceline-judge"]["spec"]["replicas"] == 3
    assert may_talk(manifests, "judge", "coordinator", 7070)
    assert "paceline-judge" in of_kind(manifests, "ServiceAccount")


def test_the_workflow_is_restricted_and_gates_on_exit_statuses() -> None:
    workflow = yaml.safe_load((ROOT / "deploy/examples/argo-retrain.yaml").read_text())["spec"]["workflowSpec"]
    templates = {template["name"]: template for template in workflow["templates"]}
    for name in ("train", "look"):
        container = templates[name]["container"]
        pod = {"securityContext": workflow["securityContext"], "containers": [container]}
        assert restricted_faults(pod) == []
        answer = CliRunner().invoke(cli, [*container["command"][1:], "--help"])
        assert answer.exit_code == 0, answer.output
        assert {mount["name"] for mount in container["volumeMounts"]} <= {v["name"] for v in workflow["volumes"]}
    assert templates["train"]["container"]["command"][-1] == "--wait"
    assert [step[0]["template"] for step in templates["retrain"]["steps"]] == ["train", "look"]
    assert templates["train"]["retryStrategy"]["expression"] == "asInt(lastRetry.exitCode) == 1"


def test_the_split_of_two_models_is_valid_restricted_and_keeps_feedback_with_its_answer() -> None:
    text = (ROOT / "deploy/examples/model-split.yaml").read_text()
    found = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text)}
    arms = ("champion", "candidate")
    assert set(found) == {
        ("HTTPRoute", "assistant"),
        *((k, arm) for k in ("Deployment", "Service") for arm in arms),
    }
    for arm in arms:
        deployment, service = found["Deployment", arm], found["Service", arm]
        for manifest in (deployment, service):
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        pod = deployment["spec"]["template"]["spec"]
        assert restricted_faults(pod) == []
        assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
        (fetch,), (serve,) = pod["initContainers"], pod["containers"]
        assert f"assistant@{arm}" in fetch["command"]
        for container in (fetch, serve):
            variables = {each["name"]: each["value"] for each in container["env"]}
            answer = CliRunner().invoke(cli, [*container["command"][1:], "--help"], env=variables)
            assert answer.exit_code == 0, answer.output
            assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    rated, rated_else, split = found["HTTPRoute", "assistant"]["spec"]["rules"]
    for backend in split["backendRefs"]:
        (header,) = backend["filters"][0]["responseHeaderModifier"]["set"]
        assert header == {"name": "x-paceline-arm", "value": backend["name"]}
        assert backend["port"] == found["Service", backend["name"]]["spec"]["ports"][0]["port"]
    assert [backend["weight"] for backend in split["backendRefs"]] == [90, 10]
    (match,) = rated["matches"]
    assert match["headers"] == [{"name": "x-paceline-arm", "value": "candidate"}]
    assert [rule["backendRefs"][0]["name"] for rule in (rated, rated_else)] == ["candidate", "champion"]
