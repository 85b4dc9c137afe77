"""Whom clients trust of a service with a certificate of its own: that one, and what its authority issues after it."""

from __future__ import annotations

import ssl
from pathlib import Path

from orchestrator.errors import ConfigurationError

AUTHORITY_BESIDE = "ca.crt"


def trusting(certificate: Path) -> ssl.SSLContext:
    """A context that takes this certificate of a service, and what the authority issues that lies beside it, if one does.

    So a machine's folder of ``atoll certificates`` does, and whoever waits for long bears its certificate being renewed.
    Raises ConfigurationError for files that are none.
    """
    beside = certificate.with_name(AUTHORITY_BESIDE)
    named = certificate
    try:
        context = ssl.create_default_context(cafile=certificate)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it is named here, whoever has issued it
        if beside.exists():
            named = beside
            context.load_verify_locations(beside)
    except OSError as error:
        raise ConfigurationError(
            detail=f"{named}, by which the service is known here, cannot be used ({error.strerror}). Copy it anew from the "
            "service's machine."
        ) from error
    return context
