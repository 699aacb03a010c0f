"""The environment variables of a process of user code: those that say how this host works, and those that somebody named.

Whatever may hold a secret is not among them: tokens, keys, passwords, addresses with a password, and every variable that this list
does not know. `--pass-env` names further ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from paceline.encryption.storage_key import FILE_VARIABLE, KEY_VARIABLE

PASSED_VARIABLE = "PACELINE_PASS_ENV"
"""Names of further variables, with commas between them; the option sets it."""
KEPT = re.compile(
    r"""
    PATH | HOME | USER | LOGNAME | SHELL | HOSTNAME | TERM | LANG | LANGUAGE | TZ | TMPDIR | TMP | TEMP
    | LD_LIBRARY_PATH | VIRTUAL_ENV | CONDA_PREFIX | TORCH_HOME | NLTK_DATA | TOKENIZERS_PARALLELISM
    | SSL_CERT_FILE | SSL_CERT_DIR | REQUESTS_CA_BUNDLE | (?i: (http|https|all|no)_proxy )
    | HF_HOME | HF_HUB_CACHE | HF_DATASETS_CACHE | HF_ENDPOINT | HF_HUB_OFFLINE | TRANSFORMERS_OFFLINE
    | PACELINE_ANSWER_CACHE | PACELINE_ANSWER_CACHE_MB
    | (LC | PYTHON | XDG | OMP | MKL | OPENBLAS | MALLOC | CUDA | NVIDIA) \w*
    """,
    re.VERBOSE,
)
HAS_USER = re.compile(r"://[^/]*@")
"""An address with a user, and perhaps a password."""


def passed_variables(
    named: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables of `environment` (default: this process') that user code gets; `named` are further names. The storage key is
    never among them."""
    given = os.environ if environment is None else environment
    chosen = {*named, *filter(None, given.get(PASSED_VARIABLE, "").split(","))}
    return {
        name: value
        for name, value in given.items()
        if name not in (FILE_VARIABLE, KEY_VARIABLE)
        and (name in chosen or (KEPT.fullmatch(name) and not HAS_USER.search(value)))
    }
