"""Settings of connections to object stores from environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CLIENT_FLAGS = ("allow_http", "allow_invalid_certificates", "http1_only", "http2_only", "randomize_addresses")
_CLIENT_TEXTS = ("connect_timeout", "timeout", "read_timeout", "proxy_url", "proxy_ca_certificate", "proxy_excludes")


def client_settings(prefix: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Read the connection variables, such as AWS_ALLOW_HTTP: obstore ignores them when it gets options."""
    texts = {name: environ.get(prefix + name.upper(), "") for name in (*_CLIENT_FLAGS, *_CLIENT_TEXTS)}
    flags = {name: texts[name].lower() in ("1", "true", "yes", "on") for name in _CLIENT_FLAGS if texts[name]}
    return flags | {name: texts[name] for name in _CLIENT_TEXTS if texts[name]}
