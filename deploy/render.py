"""Makes deploy/docker/Dockerfile and deploy/compose.yaml from the list of roles, deploy/helm/paceline/files/roles.yaml.

python deploy/render.py [--check]

An image, a service of compose and the chart need nothing but a role's entry. --check exits with 1 if a file is not
current.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parent
ROLES = DEPLOY / "helm" / "paceline" / "files" / "roles.yaml"
MADE = "# Made by deploy/render.py from deploy/helm/paceline/files/roles.yaml; do not edit.\n"
Role = dict[str, Any]

BUNDLES = "/bundles"
"""Cache of bundles, in a separate folder, because user code can create no files beside hidden ones."""
COMPOSE_HEAD = """#
# All roles on one host. Profile `cpu` needs nothing else; `gpu` gives a GPU to each rollout worker and to the learner.
#
#   docker compose -f deploy/compose.yaml --profile cpu up --build --detach
#   docker compose -f deploy/compose.yaml run --rm cli submit spec.yaml --wait
#
# The folder in PACELINE_WORK is what you bring (specs, data, models), mounted at /work. The volume `runs` is the ledger, `store` has
# checkpoints and exports. Nothing is encrypted: the network is the containers' own, and the coordinator and the page (port 7081) are
# published on this host's loopback only. On Linux 6.12 Paceline's secrets are hidden from user code; PACELINE_REQUIRE_ISOLATION=1
# requires it, 0 turns it off (docs/operate/security_setup.md). PACELINE_STORAGE_KEY encrypts files. The page's links, which carry keys:
#
#   docker compose -f deploy/compose.yaml exec dashboard python -m paceline.apps.dashboard.links 127.0.0.1:7081
"""


def roles() -> dict[str, Role]:
    """Return the roles by name."""
    listed: dict[str, Role] = yaml.safe_load(ROLES.read_text())["roles"]
    return listed


def dockerfile() -> str:
    """Return the Dockerfile with a stage for each role and image."""
    parts = [MADE + (DEPLOY / "docker" / "base.Dockerfile").read_text()]
    for name, role in roles().items():
        for image in role["images"]:
            target = name if image == role["images"][0] else f"{name}-{image}"
            parts.append(_stage(target, image, role))
    return "\n".join(parts)


def _stage(target: str, image: str, role: Role) -> str:
    title = json.dumps(f"Paceline {target}")
    about = json.dumps(role["summary"])
    lines = [
        f"FROM {image} AS {target}",
        f"LABEL org.opencontainers.image.title={title} \\",
        f"      org.opencontainers.image.description={about}",
    ]
    if role["ports"]:
        port = _port(role)
        address = f"127.0.0.1:{port}" if "grpc" in role["ports"] else f"http://127.0.0.1:{port}{role['health']}"
        health = ["python", "-m", "paceline.services.common.serving.healthcheck", address]
        lines += [
            "EXPOSE " + " ".join(str(number) for number in role["ports"].values()),
            "HEALTHCHECK --interval=10s --timeout=10s --start-period=60s --retries=3 \\",
            f"    CMD {json.dumps(health)}",
        ]
        fixed = [*role["command"].split(), "--host", "0.0.0.0", "--port", str(port), *role["options"]]
        lines.append(f"ENTRYPOINT {json.dumps(fixed)}")
        lines.append(f"CMD {json.dumps(_arguments(role))}")
    else:
        lines += ["HEALTHCHECK NONE", f"ENTRYPOINT {json.dumps([role['command']])}", 'CMD ["--help"]']
    return "\n".join(lines) + "\n"


def _port(role: Role) -> int:
    return int(role["ports"].get("grpc") or role["ports"]["http"])


def _arguments(role: Role) -> list[str]:
    """Return the options of a role outside a cluster."""
    if role["workload"] == "coordinator":
        return ["--directory", "/runs", "--store", "/store"]
    return ["--coordinator", f"coordinator:{roles()['coordinator']['ports']['grpc']}"]


def compose() -> str:
    """Return the compose file."""
    services: dict[str, Any] = {}
    volumes = {"runs", "store", "token"}
    for name, role in roles().items():
        services[name] = _service(name, role, "cpu")
        volumes.add(f"cache-{name}")
        if "code" in role["takes"]:
            volumes.add(f"bundles-{name}")
        if "gpu" in role["images"] and name in ("rollout", "learner"):
            services[f"{name}-gpu"] = _service(name, role, "gpu")
    tree = {"name": "paceline", "services": services, "volumes": dict.fromkeys(sorted(volumes))}
    return MADE + COMPOSE_HEAD + yaml.safe_dump(tree, sort_keys=False, width=110)


def _service(name: str, role: Role, profile: str) -> dict[str, Any]:
    grows = name not in ("rollout", "learner")  # the profile gpu has separate services for these
    is_command, is_coordinator = role["workload"] == "command", role["workload"] == "coordinator"
    target = name if profile == "cpu" else f"{name}-gpu"
    service: dict[str, Any] = {
        "profiles": ["cli"] if is_command else ["cpu", "gpu"] if grows else [profile],
        "build": {
            "context": "..",
            "dockerfile": "deploy/docker/Dockerfile",
            "target": target,
            "tags": [f"paceline-{target}:0.2.0.dev0"],
        },
        "init": True,
        "restart": "no" if is_command else "unless-stopped",
        "read_only": True,
        "tmpfs": ["/tmp"],
        "security_opt": ["no-new-privileges:true"],
        "cap_drop": ["ALL"],
        "environment": {
            "OMP_NUM_THREADS": "1",
            "PACELINE_TOKEN_FILE": "/token/token",
            "PACELINE_INSECURE": "1",
        },
    }
    if "code" in role["takes"]:
        service["environment"]["PACELINE_REQUIRE_ISOLATION"] = "${PACELINE_REQUIRE_ISOLATION:-}"
        service["environment"]["PACELINE_BUNDLE_CACHE"] = BUNDLES
    if name in ("coordinator", "learner", "cli"):
        service["environment"]["PACELINE_STORAGE_KEY"] = "${PACELINE_STORAGE_KEY:-}"
    if is_command:
        service["environment"]["PACELINE_COORDINATOR"] = _arguments(role)[1]
        service["working_dir"] = "/work"
    else:
        service["stop_grace_period"] = f"{role['grace_s'] + 10}s"
        service["command"] = _arguments(role) + [
            option for option in role["compose"]["options"] if option not in _arguments(role)
        ]
    if "publish" in role["compose"]:
        service["ports"] = [f"127.0.0.1:{role['compose']['publish']}:{_port(role)}"]
    if not is_coordinator and not is_command:
        service["depends_on"] = {"coordinator": {"condition": "service_healthy"}}
        service["deploy"] = {"replicas": role["compose"]["replicas"]}
    if profile == "gpu":
        device = {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
        service["deploy"]["resources"] = {"reservations": {"devices": [device]}}
        service["ipc"] = "shareable"
        service["shm_size"] = "8gb"
    mounts = [f"{volume}:/{volume}{'' if mode == 'rw' else ':ro'}" for volume, mode in role["mounts"].items()]
    mounts += [f"token:/token{'' if is_coordinator else ':ro'}", f"cache-{name}:/cache"]
    if "code" in role["takes"]:
        mounts.append(f"bundles-{name}:{BUNDLES}")
    service["volumes"] = [*mounts, "${PACELINE_WORK:-./work}:/work:ro"]
    return service


def main() -> None:
    """Write both files, or check them."""
    made = {DEPLOY / "docker" / "Dockerfile": dockerfile(), DEPLOY / "compose.yaml": compose()}
    for path, text in made.items():
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            raise SystemExit(f"{path} is not current; run `python deploy/render.py`")


if __name__ == "__main__":
    main()
