"""Calls of ModelService as methods: those of a coordinator, or of a ledger that is opened in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from paceline.models.references import Reference

if TYPE_CHECKING:
    from paceline.v1.registry_pb2 import RegisteredModel, ShowResponse

Call = Callable[[str, Any], Any]
"""Takes the name of a method of ModelService and its request; returns the response. Raises PacelineError."""


class Models:
    """The registered models behind `call`."""

    def __init__(self, call: Call):
        self._call = call

    def register(self, model: RegisteredModel) -> RegisteredModel:
        """Record the next version of a model. Raises InvalidInput, Conflict, NotFound, NotPermitted."""
        from paceline.v1.registry_pb2 import RegisterRequest

        found: RegisteredModel = self._call(
            "Register", RegisterRequest(run_id=model.run_id, model=model)
        ).model
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
        """Return a version and the changes of the model's aliases. Raises NotFound."""
        from paceline.v1.registry_pb2 import ShowRequest

        found: ShowResponse = self._call("Show", ShowRequest(**reference._asdict()))
        return found

    def promote(self, name: str, version: int, *, alias: str = "", override: str = "") -> RegisteredModel:
        """Give an alias (default `champion`) to a version. Raises NotFound; Conflict for a version that did not pass its gate,
        without the reason `override`."""
        from paceline.v1.registry_pb2 import PromoteRequest

        request = PromoteRequest(name=name, version=version, alias=alias, override=override)
        found: RegisteredModel = self._call("Promote", request).model
        return found

    def roll_back(self, name: str, version: int, reason: str, *, alias: str = "") -> RegisteredModel:
        """Give the alias of `version` back to the version that had it before, and return that one. Raises NotFound, Conflict."""
        from paceline.v1.registry_pb2 import RollbackRequest

        request = RollbackRequest(name=name, version=version, alias=alias, reason=reason)
        found: RegisteredModel = self._call("Rollback", request).model
        return found
