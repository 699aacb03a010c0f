"""`bundle`: the files that travel with a run, besides those that the spec names elsewhere."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from pydantic import field_validator

from paceline.spec.sections.base import PositiveInt, Section

MODULE_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class BundleSection(Section):
    """The files that travel with the run: reward functions with the modules beside them that they import, data files,
    and those that are listed here. The run goes on with them as they were when it was submitted."""

    include: tuple[str, ...] = ()
    """Further files for the reward functions: paths, globs (`answers/*.json`) or folders, relative to the spec's file."""
    max_mb: PositiveInt = 512
    """Largest sum of the files' sizes in MB; larger data belongs at a URL."""
    requirements: tuple[str, ...] = ()
    """Modules that the reward functions import beyond the standard library and Paceline's dependencies, as in
    `import NAME`. A reward worker without one of them reports it before the first group."""

    @field_validator("include")
    @classmethod
    def _check_include(cls, include: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in include:
            path = PurePosixPath(pattern)
            if (
                not path.parts
                or path.is_absolute()
                or ".." in path.parts
                or "\\" in pattern
                or "\0" in pattern
            ):
                raise ValueError(
                    f"{pattern!r} is not below the spec's folder; copy the file there and name it relative to the spec"
                )
        return include

    @field_validator("requirements")
    @classmethod
    def _check_requirements(cls, requirements: tuple[str, ...]) -> tuple[str, ...]:
        for name in requirements:
            if MODULE_NAME.fullmatch(name) is None:
                raise ValueError(
                    f"{name!r} is not a module's name; write it as in `import NAME`, without a version"
                )
        return requirements
