"""What all tests share."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# An example may take as long as a loaded machine makes it; hypothesis would call 200 ms, or slow drawing, a failure.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # Started in the background by a shell without job control: every child would inherit a deaf ear for Ctrl-C,
    # and the tests that press it would wait in vain.
    signal.signal(signal.SIGINT, signal.default_int_handler)
