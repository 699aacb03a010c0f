"""The chat template on this machine's disk: a person may correct it while the run is paused because it refused prompts."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from paceline.data.tokens import load_tokenizer
from paceline.errors import InvalidInput
from paceline.files.whole_file import stamp
from paceline.spec import PolicySection

FILES = ("chat_template*", "tokenizer_config.json")

log = logging.getLogger(__name__)


class TemplateFile:
    """The files of one tokenizer that may hold its chat template. `reload` may be called from any thread."""

    def __init__(self, policy: PolicySection):
        self._policy = policy
        self._folder = Path(policy.tokenizer_name or policy.model_name).expanduser()
        self._stamp = stamp(self._folder, FILES)
        self._lock = threading.Lock()
        self.reloads = 0
        """Number of times that another template was taken: an attempt that began before one may fail by the old one."""

    def reload(self, tokenizer: Any) -> bool:
        """Give `tokenizer` the template that is on the disk now; return whether that is another one."""
        with self._lock:
            now = stamp(self._folder, FILES)
            if now == self._stamp:
                return False
            self._stamp = now
            try:
                template = load_tokenizer(self._policy).chat_template
            except InvalidInput as error:
                log.error("the changed chat template cannot be read: %s", error)
                return False
            if template == tokenizer.chat_template:
                return False
            tokenizer.chat_template = template
            self.reloads += 1
        log.warning("the chat template in %s was changed and is read anew", self._folder)
        return True
