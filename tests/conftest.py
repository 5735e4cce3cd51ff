"""What every test shares: hypothesis without a clock, for machines that are busy with other things."""

from hypothesis import settings

settings.register_profile("weftline", deadline=None)
settings.load_profile("weftline")
