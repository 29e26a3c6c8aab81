"""The wire: contract, conversion, sessions, security. gRPC is imported here first, with its own log off.

gRPC's lines repeat, worse, what `aimaster.rpc.transport` reports. It reads the variable for that once, when
it is imported; the variable is taken away again, so that it reaches no worker. What the user has set is
respected.
"""

from __future__ import annotations

import os

_VERBOSITY = "GRPC_VERBOSITY"

if _VERBOSITY in os.environ:
    import grpc as _grpc
else:
    os.environ[_VERBOSITY] = "NONE"
    try:
        import grpc as _grpc  # noqa: F401
    finally:
        del os.environ[_VERBOSITY]
