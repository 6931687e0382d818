"""``python -m hopshard.cli``, for environments whose PATH lacks the ``hopshard`` command."""

import sys

from hopshard.cli import main

sys.exit(main())
