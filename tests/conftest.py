"""Settings for the whole suite."""

from __future__ import annotations

import hypothesis

# An example's time depends on what else runs on the machine, so it proves nothing; and the examples
# are derived from the test alone, so that two runs of the same tree give the same verdict.
hypothesis.settings.register_profile("blocktrain", deadline=None, derandomize=True)
hypothesis.settings.load_profile("blocktrain")
