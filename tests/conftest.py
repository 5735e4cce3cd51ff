"""What every test shares: hypothesis without a clock, for busy machines, and Ctrl-C where it was switched off."""

import signal

from hypothesis import settings

settings.register_profile("weftline", deadline=None)
settings.load_profile("weftline")

# A shell starts what it puts in the background with Ctrl-C ignored, and whatever that starts inherits it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
