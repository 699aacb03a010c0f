"""A deployment with certificates and tokens on hosts that share nothing but a network, by the commands of docs/operate/security_setup.md.

The commands are read from that page; only addresses, and the URL of the store, are put in. Two rollout hosts run the same command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from deployment import BUCKET, DEADLINE_S, until
from isolated_host import ROOT, Host, Switch

PAGE = ROOT / "docs" / "operate" / "security_setup.md"
SECTION = "## Encryption between hosts"
ROLES = {
    "coordinator": "coordinator",
    "learner": "learner",
    "rollout-0": "rollout",
    "rollout-1": "rollout",
} | {"reward": "reward"}
"""Role of each host."""
PRINTED = {"coordinator": "10.0.0.1", "learner": "10.0.0.2", "rollout": "10.0.0.3", "reward": "10.0.0.4"}
"""Addresses on the page, by role."""
TOKENS = {"coordinator": "", "client": "ann"}
"""Name of the token of a host; `workers` for the others, none for the coordinator."""


def documented() -> list[str]:
    """Return the commands of the section, one a line."""
    section = PAGE.read_text().split(SECTION, 1)[1].split("\n## ", 1)[0]
    blocks = re.findall(r"```bash\n(.*?)```", section, re.S)
    return "".join(blocks).replace("\\\n", " ").splitlines()


class SecureDeployment:
    """The hosts by name, and an operator's, which has the authority's key."""

    def __init__(self, switch: Switch, logs: Path) -> None:
        self.switch, self.logs = switch, logs
        self.commands = documented()
        self.operator = self.host("operator")
        self.store = self.host("store")
        self.hosts: Mapping[str, Host] = {name: self.host(name) for name in ROLES}
        self.coordinator, self.client = self.hosts["coordinator"], self.host("client")
        self.people_address = f"{self.coordinator.address}:7073"
        self.address = f"{self.coordinator.address}:7070"

    def host(self, name: str) -> Host:
        """Return a new host, which knows how to reach the store."""
        host = self.switch.host(name, self.logs)
        store = host if name in ("operator", "store") else self.store
        host.variables |= {
            "AWS_ENDPOINT_URL": f"https://{store.address}:5000",
            "AWS_CA_BUNDLE": "/tmp/ca.crt",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "NO_PROXY": "*",
        }
        return host

    def start(self) -> None:
        """Make certificates and tokens, and start every service."""
        for command in self._lines("paceline certs init", "paceline certs issue", "mkdir"):
            self._operate(command)
        # The page names one rollout host; the second has a certificate of its own, by the same command.
        again = self._lines("paceline certs issue ca rollout")[0].replace(" rollout ", " rollout-1 ")
        self._operate(again.replace(PRINTED["rollout"], self.hosts["rollout-1"].address))
        self._operate(f"paceline certs issue ca store --role viewer --host {self.store.address}")
        self._copy_certificates()
        files = ("-c", "/tmp/tls/tls.crt", "-k", "/tmp/tls/tls.key")
        self.store.start("python", "-m", "moto.server", "-H", self.store.address, "-p", "5000", *files)
        until(lambda: self.client.run("python", "-c", MAKE_BUCKET, check=False).returncode == 0, "the store")
        self._serve("coordinator")
        until(lambda: self.coordinator.run("test", "-s", "runs/token", check=False).returncode == 0, "its token")
        for command in self._lines("paceline token create"):
            self.coordinator.run("sh", "-c", command)
        for name, host in {**self.hosts, "client": self.client}.items():
            if token := TOKENS.get(name, "workers"):
                host.write("/tmp/token", self.token(token))
            if name in self.hosts and token:
                self._serve(name)

    def token(self, name: str) -> str:
        """Return the token that the coordinator's host made for a name."""
        return self.coordinator.run("cat", f"{name}.token").stdout

    def issue(self, name: str, options: str, authority: str = "ca") -> dict[str, str]:
        """Issue a certificate by the operator; return its files."""
        self._operate(f"paceline certs issue {authority} {name} {options}")
        return self.files(f"{authority}/{name}")

    def files(self, folder: str) -> dict[str, str]:
        """Return the files of a folder of the operator's, by name."""
        names = self.operator.run("ls", folder).stdout.split()
        return {name: self.operator.run("cat", f"{folder}/{name}").stdout for name in names}

    @property
    def access(self) -> list[str]:
        """Return the options of the documented command for a person."""
        (command,) = self._lines("paceline submit")
        command = command.replace(PRINTED["coordinator"], self.coordinator.address)
        return shlex.split(command)[3:]

    def members(self) -> str:
        """Return the members as the person sees them; empty while the coordinator does not answer."""
        command = ("paceline", "members", *self.access, "--json")
        done = self.client.run(*command, check=False, timeout_s=DEADLINE_S)
        return done.stdout if done.returncode == 0 else ""

    def _serve(self, name: str) -> None:
        role, host = ROLES[name], self.hosts[name]
        (command,) = self._lines(f"paceline serve {role} ")
        command = command.replace(PRINTED[role], host.address).replace("s3://bucket/runs", f"{BUCKET}/runs")
        host.start(*shlex.split(command.replace(PRINTED["coordinator"], self.coordinator.address)))

    def _lines(self, *beginnings: str) -> list[str]:
        found = [line for line in self.commands if line.startswith(beginnings)]
        if not found:
            raise ValueError(f"{PAGE} has no command that begins with {beginnings}")
        return found

    def _operate(self, command: str) -> None:
        for role, address in PRINTED.items():
            name = role if role in self.hosts else f"{role}-0"
            command = command.replace(address, self.hosts[name].address)
        self.operator.run("sh", "-c", command)

    def _copy_certificates(self) -> None:
        folders = {self.hosts[name]: f"ca/{name}" for name in self.hosts}
        folders[self.hosts["rollout-0"]] = "ca/rollout"
        folders[self.store] = "ca/store"
        for host, folder in folders.items():
            write_folder(host, "/tmp/tls", self.files(folder))
        write_folder(self.client, "/tmp/person", self.files("person"))
        for host in (*self.hosts.values(), self.client):
            host.write("/tmp/ca.crt", self.files("person")["ca.crt"])


def write_folder(host: Host, folder: str, files: Mapping[str, str]) -> None:
    """Write files to a folder of a host."""
    for name, text in files.items():
        host.write(f"{folder}/{name}", text)


MAKE_BUCKET = "import s3fs; s3fs.S3FileSystem().makedirs('bucket', exist_ok=True)"
