"""The spec of a run with the paths of its bundle's files, which a worker fetches from the coordinator, and what it refuses to load."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.bundle.layout import with_original_paths
from paceline.bundle.manifest import Kind
from paceline.calls.bundle_transfer import unpacked_spec
from paceline.calls.token import open_channel
from paceline.errors import InvalidInput
from paceline.files import function_files
from paceline.services.common.serving.grpc_server import CHANNEL_OPTIONS
from paceline.spec import RunSpec
from paceline.spec.reading import code_paths
from paceline.user_code.surroundings import isolation_is_required


def refusal_of_files(spec: RunSpec, bundle: str, allowed: Sequence[Path]) -> str:
    """Return the reason why a worker may not load a spec's code from its own disk, as a sentence; empty when it may, and for code in
    a bundle. `allowed` are the folders of `--functions-from`."""
    if bundle:
        return ""
    if isolation_is_required() and (named := code_paths(spec)):
        field, code = next(iter(named.items()))
        return (
            f"{field}: {code} comes from no bundle, and --require-isolation takes code of bundles only; submit the run with a client that "
            "sends its files"
        )
    return function_files.refusal(spec, allowed)


class BundledSpec:
    """A spec whose files stay where they are until `close`."""

    def __init__(
        self, spec: RunSpec, coordinator: str, bundle: str, *kinds: Kind, allowed: Sequence[Path] = ()
    ):
        """Fetch the files of some kinds that are not in this user's cache; without a bundle there are none. Blocks.

        `allowed` are the folders of `--functions-from`. Raises Unreadable, also for code that they do not have; Unavailable;
        InvalidInput.
        """
        self.original = self.spec = spec
        self._unpacked = None
        if bundle:
            with open_channel(coordinator, options=CHANNEL_OPTIONS) as channel:
                self.spec, self._unpacked = unpacked_spec(channel, spec, bundle, *kinds, allowed=allowed)

    def close(self) -> None:
        """Allow the removal of the files."""
        if self._unpacked is not None:
            self._unpacked.close()

    @contextlib.contextmanager
    def original_paths(self) -> Iterator[None]:
        """Give errors the paths that the submitter knows."""
        try:
            yield
        except InvalidInput as error:
            if self._unpacked is None:
                raise
            raise type(error)(with_original_paths(str(error), self.original, self._unpacked.root)) from error
