"""Secrets out of whatever is shown, stored or logged.

Two kinds are removed: values under a name that says it is a secret (HF_TOKEN=..., "wandb_api_key": "..."), and
values that show by their own form what they are (hf_..., a user and password inside a URL, a private key block).
The name stays, so a reader still sees that a token was set.

>>> scrub("HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz python -m trainer")
'HF_TOKEN=*** python -m trainer'
>>> scrub("git clone https://me:s3cret@example.org/x")
'git clone https://***@example.org/x'
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"

_SECRET_WORD = (
    r"(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|API[_-]?KEY|ACCESS[_-]?KEY|PRIVATE[_-]?KEY|AUTHORIZATION)"
)
_SECRET_NAME = rf"(?:[A-Z0-9_.-]*(?:{_SECRET_WORD}|_KEY)(?:_?ID)?|WANDB_[A-Z0-9_]*KEY)"
# In the trainer's own vocabulary a token is a piece of text, so these are numbers and settings, not secrets.
_HARMLESS_NAME = re.compile(
    r"^(?:.*[._-])?(?:mask_token(?:_id)?|token_id|token_budget|max_document_tokens?|(?:bos|eos|pad|unk|sep|cls)_token(?:_id)?|"
    r"tokens|context_tokens(?:_per_s)?|block_tokens(?:_per_s)?|host_key|known_key|cache_key|guard_key|sort_key)$",
    re.IGNORECASE,
)
_SECRET_NAME_ALONE = re.compile(rf"^{_SECRET_NAME}$", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"(?P<name>(?<![A-Z0-9_.-]){_SECRET_NAME})(?P<sep>[\"']?\s*[:=]\s*)"
    r"(?:\"(?P<dq>(?:[^\"\\\n]|\\.)*)\"|'(?P<sq>(?:[^'\\\n]|\\.)*)'|(?P<scheme>(?:Bearer|Basic|token)\s+)?(?P<bare>[^\s\"',;&}\])]+))",
    re.IGNORECASE,
)
_FLAG = re.compile(
    rf"(?P<flag>--{_SECRET_NAME}|--[A-Z0-9-]*-KEY)(?P<sep>[ =]+|[\"'],\s*[\"'])(?P<value>[^\s\"']+)", re.IGNORECASE
)
_URL = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]{1,20}://)(?P<user>[^\s/@\"'<>]{1,512})@", re.IGNORECASE)
_FORM = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|\b(?:ghp|gho|ghs|ghu|github_pat)_[A-Za-z0-9_]{20,}"  # GitHub
    r"|\bsk-[A-Za-z0-9_-]{20,}"  # several model vendors
    r"|\bAKIA[A-Z0-9]{16}\b"  # AWS access key id
    r"|\bBearer\s+[A-Za-z0-9._~+/-]{16,}=*"
)
_KEY_BLOCK = re.compile(
    r"(?P<begin>-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----).*?(?P<end>-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----|\Z)",
    re.DOTALL,
)


def scrub(text: str) -> str:
    """`text` without its secrets. Applying it twice changes nothing more."""
    text = _KEY_BLOCK.sub(lambda match: f"{match['begin']}{MASK}{match['end']}", text)
    text = _URL.sub(lambda match: f"{match['scheme']}{MASK}@", text)
    text = _ASSIGNED.sub(_mask_assigned, text)
    text = _FLAG.sub(
        lambda match: match[0] if _harmless(match["flag"][2:]) else f"{match['flag']}{match['sep']}{MASK}", text
    )
    return _FORM.sub(MASK, text)


def is_secret_name(name: str) -> bool:
    """Does the name of a variable or a key say that its value is a secret?

    >>> [is_secret_name(name) for name in ("HF_TOKEN", "wandb_api_key", "mask_token_id", "token_budget")]
    [True, True, False, False]
    """
    return _SECRET_NAME_ALONE.match(name) is not None and not _harmless(name)


def scrub_record(value: Any) -> Any:
    """A JSON-like value without its secrets: by key name, and by form in every string."""
    if isinstance(value, Mapping):
        return {
            scrub(key) if isinstance(key, str) else key: MASK
            if isinstance(key, str) and is_secret_name(key) and item not in (None, "", False)
            else scrub_record(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [scrub_record(item) for item in value]
    return scrub(value) if isinstance(value, str) else value


def _harmless(name: str) -> bool:
    return _HARMLESS_NAME.match(name.replace("-", "_")) is not None


def _mask_assigned(match: re.Match[str]) -> str:
    if _harmless(match["name"]):
        return match[0]
    for group, quote in (("dq", '"'), ("sq", "'")):
        if match[group] is not None:
            return f"{match['name']}{match['sep']}{quote}{MASK if match[group] else ''}{quote}"
    return f"{match['name']}{match['sep']}{match['scheme'] or ''}{MASK}"
