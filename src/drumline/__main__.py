"""`python -m drumline` is the command `drumline`."""

import sys

from drumline.cli.__main__ import main

sys.exit(main())
