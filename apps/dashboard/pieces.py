"""The text of single tokens, for views that colour a completion by token.

Tokenizers are loaded when they are first asked for, by a thread of the dashboard's process, and only from folders on this machine:
the page works without the internet, and without the tokenizer it shows numbers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paceline.apps.dashboard.backends import Backend
from paceline.apps.dashboard.methods import methods
from paceline.data.tokens import load_tokenizer
from paceline.errors import InvalidInput, NotFound, PacelineError
from paceline.spec.reading import spec_of_run
from paceline.v1 import records_pb2

MAX_IDS = 65_536
TOKENIZERS = 4
LARGEST_ID = (1 << 31) - 1


class Pieces:
    """Tokenizers of a backend's runs."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self._thread = ThreadPoolExecutor(1, "tokenizers")
        self._tokenizers: dict[str, Any] = {}

    async def texts(self, run_id: Any, ids: Any) -> list[str]:
        """Return the text of each token. Raises InvalidInput; NotFound where the tokenizer is not on this machine."""
        if not isinstance(run_id, str) or not isinstance(ids, list) or len(ids) > MAX_IDS:
            raise InvalidInput(f"send runId, a text, and ids, a list of at most {MAX_IDS} numbers")
        if not all(isinstance(each, int) and 0 <= each <= LARGEST_ID for each in ids):
            raise InvalidInput("ids has something that is no token: they are numbers from 0")
        method = methods()["paceline.v1.RecordsService/GetSpec"]
        answer = await self._backend.call(method, records_pb2.GetSpecRequest(run_id=run_id))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._texts, run_id, answer.spec_yaml, ids)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _texts(self, run_id: str, spec_yaml: str, ids: Sequence[int]) -> list[str]:
        policy = spec_of_run(run_id, spec_yaml)[0].policy
        name = policy.tokenizer_name or policy.model_name
        if not os.path.isdir(name):
            raise NotFound(f"the tokenizer {name} is not in a folder of this machine")
        if name not in self._tokenizers:
            while len(self._tokenizers) >= TOKENIZERS:
                self._tokenizers.pop(next(iter(self._tokenizers)))
            self._tokenizers[name] = load_tokenizer(policy)
        try:
            tokenizer = self._tokenizers[name]
            return [str(tokenizer.decode([each])) for each in ids]
        except PacelineError:
            raise
        except Exception as error:  # an id that the tokenizer does not know
            raise InvalidInput(f"the tokenizer cannot decode these tokens: {error}") from None
