"""Names of registered models (`NAME`, `NAME:VERSION`, `NAME@ALIAS`), and the calls of ModelService as methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.v1.registry_pb2 import RegisteredModel, ShowResponse
import re
from typing import NamedTuple

from paceline.errors import InvalidInput

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ALIAS = re.compile(r"[a-z][a-z0-9_-]{0,31}")
REFERENCE = re.compile(rf"(?P<name>{NAME.pattern})(?::(?P<version>[1-9]\d{{0,8}})|@(?P<alias>{ALIAS.pattern}))?")
CHAMPION = "champion"
"""Default alias: the version in use."""


class Reference(NamedTuple):
    """Name of a registered model, alone or with a version or an alias."""

    name: str
    version: int = 0
    """Number of the version; 0: the newest."""
    alias: str = ""

    def __str__(self) -> str:
        return self.name + (f":{self.version}" if self.version else f"@{self.alias}" if self.alias else "")


def read_reference(text: str) -> Reference:
    """Return the reference in a text. Raises InvalidInput."""
    match = REFERENCE.fullmatch(text)
    if match is None:
        raise InvalidInput(
            f"{text[:80]!r} is not a registered model; write NAME, NAME:VERSION or NAME@ALIAS, such as arithmetic@{CHAMPION}. "
            "Names have up to 64 letters, digits, dots, hyphens and underscores"
        )
    return Reference(match["name"], int(match["version"] or 0), match["alias"] or "")


def check_name(name: str) -> None:
    """Raise InvalidInput for a text that cannot be the name of a model."""
    if not NAME.fullmatch(name):
        raise InvalidInput(
            f"the model's name is {name[:80]!r}; it must be 1 to 64 letters, digits, dots, hyphens and underscores, the first "
            "a letter or digit"
        )


def check_alias(alias: str) -> None:
    """Raise InvalidInput for a text that cannot be an alias."""
    if not ALIAS.fullmatch(alias):
        raise InvalidInput(
            f"the alias is {alias[:80]!r}; it must be 1 to 32 lower-case letters, digits, hyphens and underscores, the first a "
            f"letter, such as {CHAMPION!r}"
        )


Call = Callable[[str, Any], Any]
"""Takes the name of a method of ModelService and its request; returns the response. Raises PacelineError."""


class Models:
    """The registered models, through methods of ModelService that `call` sends."""

    def __init__(self, call: Call):
        self._call = call

    def register(self, model: RegisteredModel) -> RegisteredModel:
        """Register the next version of a model. Raises InvalidInput, Conflict, NotFound, NotPermitted."""
        from paceline.v1.registry_pb2 import RegisterRequest

        found: RegisteredModel = self._call("Register", RegisterRequest(run_id=model.run_id, model=model)).model
        return found

    def list(self, name: str = "") -> Iterator[RegisteredModel]:
        """Yield the versions of a model, or of all, newest first, without their evidence."""
        from paceline.v1.registry_pb2 import ModelServiceListRequest

        request = ModelServiceListRequest(name=name)
        while True:
            page = self._call("List", request)
            yield from page.models
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def show(self, reference: Reference) -> ShowResponse:
        """Return a version and the history of the model's aliases. Raises NotFound."""
        from paceline.v1.registry_pb2 import ShowRequest

        found: ShowResponse = self._call("Show", ShowRequest(**reference._asdict()))
        return found

    def promote(self, name: str, version: int, *, alias: str = "", override: str = "") -> RegisteredModel:
        """Point an alias (default `champion`) at a version. Raises NotFound; Conflict for a version that did not pass
        its gate, unless `override` gives a reason."""
        from paceline.v1.registry_pb2 import PromoteRequest

        request = PromoteRequest(name=name, version=version, alias=alias, override=override)
        found: RegisteredModel = self._call("Promote", request).model
        return found

    def roll_back(self, name: str, version: int, reason: str, *, alias: str = "") -> RegisteredModel:
        """Move the alias of `version` back to the version that had it before, and return that version. Raises NotFound,
        Conflict."""
        from paceline.v1.registry_pb2 import RollbackRequest

        request = RollbackRequest(name=name, version=version, alias=alias, reason=reason)
        found: RegisteredModel = self._call("Rollback", request).model
        return found
