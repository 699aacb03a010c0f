"""Validates the HTTPRoutes in deploy/examples by the schema of the Gateway API, from an npm package.

    npm install --prefix FOLDER @kubernetes-models/gateway-api@2.0.0
    python deploy/check_routes.py FOLDER

The validator checks fields, types, enumerations and limits. It does not detect a field that the schema lacks, nor a
feature that an implementation of the Gateway API does not support.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import yaml

EXAMPLES = Path(__file__).resolve().parent / "examples"
VALIDATE = """
import {readFileSync} from "node:fs";
import {HTTPRoute} from "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1/HTTPRoute";
for (const route of JSON.parse(readFileSync(0, "utf8"))) new HTTPRoute(route).validate();
"""


def main() -> None:
    """Exit with a message unless there are routes and all of them are valid."""
    routes = [
        document
        for path in sorted(EXAMPLES.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
        if document["kind"] == "HTTPRoute"
    ]
    if not routes:
        raise SystemExit(f"no HTTPRoute in {EXAMPLES}")
    done = subprocess.run(
        ["node", "--input-type=module", "-e", VALIDATE],
        cwd=sys.argv[1],
        input=json.dumps(routes),
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"an HTTPRoute in {EXAMPLES} is not valid")
    print(f"{len(routes)} HTTPRoute valid")


if __name__ == "__main__":
    main()
