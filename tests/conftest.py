"""What all tests share."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # Started in the background by a shell without job control: every child would inherit a deaf ear for Ctrl-C,
    # and the tests that press it would wait in vain.
    signal.signal(signal.SIGINT, signal.default_int_handler)
